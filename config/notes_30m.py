# A 29.9M GPT in float16, batch 16 × 512, 4 micro-batches per step: small enough for an 8 GB GPU with a screen on it.
# The run of nanoGPT's train.py that showed 6582 MiB in use on a 4070, 4464 MiB of them for its process.

out_dir = 'runs/notes-30m'
dataset = 'fineweb'
vocab_size = 50304  # GPT-2's tokenizer: 50,257, padded to a multiple of 64

n_layer = 6
n_head = 6
n_embd = 384
block_size = 512

batch_size = 16
gradient_accumulation_steps = 4

max_iters = 10000
lr_decay_iters = max_iters
warmup_iters = 500
learning_rate = 1e-3
min_lr = 1e-4

eval_interval = 500
eval_iters = 200
log_interval = 10

dtype = 'float16'
