# A 29.9M GPT in float16, batch 16 × 512: small enough for an 8 GB card with a screen on it.

out_dir = 'runs/notes-30m'
dataset = 'fineweb'

n_layer = 6
n_head = 6
n_embd = 384
block_size = 512

batch_size = 16
gradient_accumulation_steps = 32

max_iters = 10000
lr_decay_iters = max_iters
warmup_iters = 500
learning_rate = 1e-3
min_lr = 1e-4

eval_interval = 500
eval_iters = 200
log_interval = 10

dtype = 'float16'
