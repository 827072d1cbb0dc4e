# GPT-2 small (124M), from random weights, meant for a 12 GB GPU (by arithmetic: not run there).
# To start from OpenAI's weights instead: --init_from=gpt2

out_dir = 'runs/gpt2_124m'
dataset = 'fineweb'
vocab_size = 50304  # GPT-2's tokenizer: 50,257, padded to a multiple of 64

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

batch_size = 12
gradient_accumulation_steps = 40  # 12 * 1024 * 40 = 491,520 tokens per step

max_iters = 600000
lr_decay_iters = max_iters
warmup_iters = 2000
learning_rate = 6e-4
min_lr = learning_rate / 10

eval_interval = 1000
eval_iters = 200
eval_batch_size = 4
log_interval = 10
