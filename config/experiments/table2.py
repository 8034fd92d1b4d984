"""The paper's Table 2: eight downstream tasks, three sizes, baseline and XSA."""

title = "Table 2: downstream tasks"
figure = "tasks"

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
    "arguments": ["--limit=20"],
}
