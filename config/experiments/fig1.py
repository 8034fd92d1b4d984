"""The paper's Fig 1: attention similarity bias by layer of the trained 1.4B baseline, and beside it XSA's."""

title = "Fig 1: attention similarity bias"
figure = "bias"

base = ["config/1.4b.py"]
grid = {"attention": ["sa", "xsa"]}
arguments = ["--sequences=1024"]

tiny = {"base": ["config/tiny.py"], "arguments": ["--sequences=256"]}
