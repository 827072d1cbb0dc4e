# A 10.6M GPT that writes Shakespeare letter by letter: minutes on any GPU with 4 GB.
# Data: nanoGPT's data/shakespeare_char (train.bin, val.bin, meta.pkl), as its prepare.py writes it.

out_dir = 'runs/shakespeare-char'
dataset = 'shakespeare_char'
vocab_size = 65  # its characters

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2  # the text is small enough to learn by heart
block_size = 256

batch_size = 64
gradient_accumulation_steps = 1

max_iters = 5000
lr_decay_iters = max_iters
warmup_iters = 100
learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99  # a step has few tokens, so average over more of them

eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # keep the best: later ones have overfitted
