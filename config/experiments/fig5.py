"""The paper's Fig 5: final losses of the 1.4B against the length of the training sequences, baseline and XSA, at the same
learning rate and 524,288 tokens a step."""

title = "Fig 5: final loss against training sequence length"
figure = "final"
x = "block_size"
x_label = "training sequence length T"
x_scale = "log2"
y_limits = [2.45, 2.70]

base = ["config/1.4b.py"]
grid = {
    "length": [
        {"block_size": 512, "global_batch_size": 1024, "micro_batch_size": 32},
        {"block_size": 1024, "global_batch_size": 512, "micro_batch_size": 16},
        {"block_size": 2048, "global_batch_size": 256, "micro_batch_size": 8},
        {"block_size": 4096, "global_batch_size": 128, "micro_batch_size": 4},
        {"block_size": 8192, "global_batch_size": 64, "micro_batch_size": 2},
        {"block_size": 16384, "global_batch_size": 32, "micro_batch_size": 1},
    ],
    "attention": ["sa", "xsa"],
}

tiny = {
    "base": ["config/tiny.py"],
    "grid": {
        "length": [
            {"block_size": 32, "global_batch_size": 128, "micro_batch_size": 128},
            {"block_size": 64, "global_batch_size": 64, "micro_batch_size": 64},
            {"block_size": 128, "global_batch_size": 32, "micro_batch_size": 32},
            {"block_size": 256, "global_batch_size": 16, "micro_batch_size": 16},
            {"block_size": 512, "global_batch_size": 8, "micro_batch_size": 8},
            {"block_size": 1024, "global_batch_size": 4, "micro_batch_size": 4},
        ],
    },
}
