"""The paper's architecture at GPT-2's 124M size, for those without a cluster: 85M weights outside the embedding, 10.5B tokens.

    torchrun --nproc_per_node=8 train.py config/gpt2_124m.py --attention=xsa --out_dir=runs/124m-xsa

The paper has no such size: learning rate and batch are NanoGPT's, block_size and schedule the paper's.
"""

n_layer = 12
n_head = 12
n_embd = 768
head_dim = 64
block_size = 2048
vocab_size = 50304

global_batch_size = 256  # x 2048 = 524,288 tokens a step
micro_batch_size = 32
max_iters = 20_000
warmup_iters = 700
learning_rate = 6e-4
