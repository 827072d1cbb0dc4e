# A 63.5M GPT on FineWeb, for a 12 GB GPU: 12 layers, 8 heads of 64, about half a million tokens per step.
# Data: fitgpt prepare --hub=HuggingFaceFW/fineweb --hub_config=sample-10BT --name=fineweb --max_tokens=6B
# Start: fitgpt train config/train_fineweb.py        Resume: fitgpt train config/train_fineweb.py --resume

out_dir = 'runs/fineweb'
dataset = 'fineweb'
vocab_size = 50304  # GPT-2's tokenizer: 50,257, padded to a multiple of 64

n_layer = 12
n_head = 8
n_embd = 512  # a multiple of n_head: 512 / 8 = 64
block_size = 1024

batch_size = 16
gradient_accumulation_steps = 32  # 16 * 1024 * 32 = 524,288 tokens per step

max_iters = 10000  # 5.2 billion tokens
lr_decay_iters = max_iters
warmup_iters = 500
learning_rate = 6e-4
min_lr = learning_rate / 10

eval_interval = 500
eval_iters = 100
eval_batch_size = 4
log_interval = 10

grad_checkpoint = False  # True if the GPU is also your screen's, or smaller: less memory, more time
