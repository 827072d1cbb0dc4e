# A 0.8M GPT on bytes that learns to write Python, from the standard library's own source: no GPU needed.
# Data: fitgpt prepare --embedded --name=stdlib --tokenizer=bytes --val_fraction=0.05
# Or all of it at once: fitgpt demo

out_dir = 'runs/demo'
dataset = 'stdlib'
vocab_size = 320  # 256 bytes and an end-of-text token, padded to a multiple of 64

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64

batch_size = 12
gradient_accumulation_steps = 1

max_iters = 1400
lr_decay_iters = 1400
warmup_iters = 100
learning_rate = 2e-3
min_lr = 1e-4
beta2 = 0.99

eval_interval = 350
eval_iters = 40
log_interval = 50
