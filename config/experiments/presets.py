"""Every preset of attention trained for 100 steps, a table and a picture of where they got: that all of them work.

    python -m scripts.reproduce presets --scale=tiny        # at the quick start's size: a CPU's quarter of an hour
    python -m scripts.reproduce presets                     # at GPT-2's 124M size

So few steps say nothing about a method's worth.
"""

title = "Every preset, 100 steps"
figure = "final"

base = ["config/gpt2_124m.py"]
grid = {
    "attention": [
        "sa", "xsa", "xsa_learned",
        "gqa", "qknorm", "qkclip", "resformer", "nope", "rnope",
        "softcap", "swa",
        "ssmax", "sink", "sigmoid", "diff",
        "gated", "gated_element",
        "qwen3", "gemma2", "gpt_oss", "gsxa",
    ],
    "length": [{"name": "100 steps", "max_iters": 100, "warmup_iters": 20, "eval_interval": 100}],
}

tiny = {"base": ["config/quickstart.py"]}
