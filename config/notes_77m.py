# A 76.8M GPT in float16, batch 16 × 1024: the run that nanoGPT fits on a 12 GB GPU
# only compiled, and only while nothing else is on it.
# Meant for a 12 GB GPU. On one that has bfloat16 (RTX 30 and later), --dtype=bfloat16 needs no loss scaling.

out_dir = 'runs/notes-77m'
dataset = 'fineweb'
vocab_size = 50304  # GPT-2's tokenizer: 50,257, padded to a multiple of 64

n_layer = 12
n_head = 12
n_embd = 576
block_size = 1024

batch_size = 16
gradient_accumulation_steps = 32

max_iters = 10000
lr_decay_iters = max_iters
warmup_iters = 500
learning_rate = 6e-4
min_lr = 6e-5

eval_interval = 500
eval_iters = 200
log_interval = 10

dtype = 'float16'
