"""GSXA with each of its parts taken out alone, beside plain attention and XSA, at GPT-2's 124M size: which parts it needs.

    python -m scripts.reproduce ablate_gsxa

Three seeds, for the differences are smaller than those between methods. --n_layer=24 and so on give another size.
"""

title = "GSXA without each of its parts"
figure = "final"

base = ["config/gpt2_124m.py"]
grid = {
    "variant": [
        {"name": "gsxa", "attention": "gsxa"},
        {"name": "sa", "attention": "sa"},
        {"name": "xsa", "attention": "xsa"},
        # GSXA's switches but n_kv_head, which is then n_head at any size.
        {"name": "without GQA", "attention": "xsa", "qk_norm": True, "qk_clip": 100.0, "value_residual": True,
         "softmax": "ssmax", "gate": "head"},
        {"name": "without QK norm", "attention": "gsxa", "qk_norm": False},
        {"name": "without QK-Clip", "attention": "gsxa", "qk_clip": 0.0},
        {"name": "without value residual", "attention": "gsxa", "value_residual": False},
        {"name": "without SSMax", "attention": "gsxa", "softmax": "softmax"},
        {"name": "without exclusion", "attention": "gsxa", "exclusive": "off"},
        {"name": "without gate", "attention": "gsxa", "gate": "off"},
    ],
}
seeds = [1337, 1338, 1339]

tiny = {"base": ["config/tiny.py"], "seeds": [1337, 1338]}
