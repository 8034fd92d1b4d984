"""Sequences of 16384 tokens, to be laid over a size, at the paper's 524,288 tokens a step (Fig 5).

    torchrun --nproc_per_node=8 train.py config/1.4b.py config/seq16k.py --attention=xsa --out_dir=runs/1.4b-16k-xsa
"""

block_size = 16384
global_batch_size = 32
micro_batch_size = 1
