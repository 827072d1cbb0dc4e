# A 0.8M GPT on bytes that learns to write Python, from the standard library's own source: no GPU needed.
# Data: fitgpt prepare --embedded --name=stdlib --tokenizer=bytes --val_fraction=0.05
# Or all of it at once: fitgpt demo

out_dir = 'runs/demo'
dataset = 'stdlib'

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

batch_size = 16
gradient_accumulation_steps = 1

max_iters = 400
lr_decay_iters = max_iters
warmup_iters = 20
learning_rate = 2e-3
min_lr = 2e-4
beta2 = 0.99

eval_interval = 100
eval_iters = 10
log_interval = 10
