# GPT-2 medium (350M), from random weights, meant for a 24 GB GPU (by arithmetic: not run there).
# On a 12 GB GPU: --batch_size=4 --gradient_accumulation_steps=120 --grad_checkpoint
# To start from OpenAI's weights instead: --init_from=gpt2-medium

out_dir = 'runs/gpt2_350m'
dataset = 'fineweb'
vocab_size = 50304  # GPT-2's tokenizer: 50,257, padded to a multiple of 64

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024

batch_size = 8
gradient_accumulation_steps = 60  # 8 * 1024 * 60 = 491,520 tokens per step

max_iters = 600000
lr_decay_iters = max_iters
warmup_iters = 2000
learning_rate = 3e-4
min_lr = learning_rate / 10

eval_interval = 1000
eval_iters = 200
eval_batch_size = 4
log_interval = 10
