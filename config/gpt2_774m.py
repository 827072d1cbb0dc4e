# GPT-2 large (774M), from random weights, meant for a 24 GB GPU (by arithmetic: not run there).
# To start from OpenAI's weights instead: --init_from=gpt2-large

out_dir = 'runs/gpt2_774m'
dataset = 'fineweb'
vocab_size = 50304  # GPT-2's tokenizer: 50,257, padded to a multiple of 64

n_layer = 36
n_head = 20
n_embd = 1280
block_size = 1024

batch_size = 4
gradient_accumulation_steps = 120  # 4 * 1024 * 120 = 491,520 tokens per step

max_iters = 600000
lr_decay_iters = max_iters
warmup_iters = 2000
learning_rate = 2.5e-4
min_lr = learning_rate / 10

eval_interval = 1000
eval_iters = 200
eval_batch_size = 4
log_interval = 10

grad_checkpoint = True
