"""GSXA at the paper's three sizes, beside the baseline and XSA: Fig 3 with one more variant, whose runs it shares.

    python -m scripts.reproduce gsxa

The weights by size stand in config/gsxa_*.py.
"""

title = "GSXA: loss against iteration"
figure = "curves"

grid = {
    "size": [
        {"name": "0.7B", "config": "config/0.7b.py"},
        {"name": "1.4B", "config": "config/1.4b.py"},
        {"name": "2.7B", "config": "config/2.7b.py"},
    ],
    "attention": ["sa", "xsa", "gsxa"],
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
