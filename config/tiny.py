"""The 1.4B's stand-in on a CPU: what scripts.reproduce trains at --scale tiny. 0.1M weights on bytes of the quick start's text.

    python train.py config/tiny.py --attention=xsa --out_dir=runs/tiny-xsa
"""

dataset = "quickstart"
vocab_size = 257  # 256 bytes and the end-of-text token

n_layer = 2
n_head = 2
n_embd = 64
head_dim = 48  # inner width 96, one and a half times the model's as in the 1.4B
block_size = 128  # a sixteenth of the paper's

global_batch_size = 32  # x 128 = 4,096 tokens a step
micro_batch_size = 32
max_iters = 200
warmup_iters = 20
learning_rate = 4e-3  # ten times the paper's

eval_interval = 40
eval_tokens = 32_768
log_interval = 1
save_interval = 200
keep_checkpoints = 1
