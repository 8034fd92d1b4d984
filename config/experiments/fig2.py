"""The paper's Fig 2: time and memory of one block of the 1.4B, XSA on and off, against sequence length and against width."""

title = "Fig 2: time and memory of one block"
figure = "block"

arguments = ["--rounds=10"]  # sizes: those of scripts.bench block, the paper's on a GPU

tiny = {"arguments": ["--device=cpu", "--rounds=4", "--micro_batch_size=2"]}
