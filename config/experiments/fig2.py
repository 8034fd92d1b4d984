"""The paper's Fig 2: time and memory of one block of the 1.4B's kind, XSA on and off, against T and against the width."""

title = "Fig 2: time and memory of one block"
figure = "block"

base = ["config/1.4b.py"]
arguments = ["--micro_batch_size=32", "--dtype=bfloat16"]

tiny = {"base": ["config/tiny.py"], "arguments": ["--micro_batch_size=4"]}
