"""The paper's 0.7B: Table 1 and its training recipe. 0.679B weights outside the embedding, 104.9B tokens.

    torchrun --nproc_per_node=8 train.py config/0.7b.py --attention=xsa --out_dir=runs/0.7b-xsa
"""

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
