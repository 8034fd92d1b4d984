"""The paper's 2.7B: Table 1 and its training recipe. 2.684B weights outside the embedding, 104.9B tokens.

    torchrun --nproc_per_node=8 train.py config/2.7b.py --attention=xsa --out_dir=runs/2.7b-xsa
"""

n_layer = 32
n_head = 24
n_embd = 2560
head_dim = 128  # inner width 3072, wider than the model
block_size = 2048
vocab_size = 50304

global_batch_size = 256  # x 2048 = 524,288 tokens a step
micro_batch_size = 4
max_iters = 200_000
warmup_iters = 2_000
learning_rate = 3e-4
