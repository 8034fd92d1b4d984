"""GSXA at the paper's 0.7B shape and recipe: 0.585B weights outside the embedding, the baseline's 0.679B.

    torchrun --nproc_per_node=8 train.py config/gsxa_0.7b.py --out_dir=runs/0.7b-gsxa

The same but for attention as config/0.7b.py: 1 kv head in place of 6 save more weights than the gates add.
"""

attention = "gsxa"

n_layer = 24
n_head = 6
n_embd = 1536
head_dim = 256
block_size = 2048
vocab_size = 50304

global_batch_size = 256  # x 2048 = 524,288 tokens a step
micro_batch_size = 16
max_iters = 200_000
warmup_iters = 2_000
learning_rate = 5e-4
