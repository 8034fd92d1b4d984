"""The paper's Fig 3: training and validation loss against iteration, three sizes, baseline and XSA."""

title = "Fig 3: loss against iteration"
figure = "curves"
y_limits = [2.4, 3.2]

grid = {
    "size": [
        {"name": "0.7B", "config": "config/0.7b.py"},
        {"name": "1.4B", "config": "config/1.4b.py"},
        {"name": "2.7B", "config": "config/2.7b.py"},
    ],
    "attention": ["sa", "xsa"],
}

tiny = {
    "base": ["config/tiny.py"],
    "grid": {
        "size": [
            {"name": "small", "n_layer": 2, "n_embd": 48, "n_head": 2, "head_dim": 24, "learning_rate": 5e-3},
            {"name": "middle"},
            {"name": "large", "n_layer": 3, "n_embd": 80, "n_head": 2, "head_dim": 48, "learning_rate": 3e-3},
        ],
    },
    "seeds": [1337, 1338],
}
