"""The quick start: 0.8M weights on bytes of the presidential messages, two minutes on two cores (scripts/quickstart.sh).

    python -m data.local
    python train.py config/quickstart.py --attention=xsa --out_dir=runs/quickstart/xsa
"""

dataset = "quickstart"
vocab_size = 257  # 256 bytes and the end-of-text token

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256

global_batch_size = 16  # x 256 = 4,096 tokens a step
micro_batch_size = 16
max_iters = 500
warmup_iters = 50
learning_rate = 3e-3

eval_interval = 50
eval_tokens = 131_072
log_interval = 1
save_interval = 250
