# GPT-2 small (124M) on FineWeb with Muon, for a 12 GB GPU: 4.3 GiB by `fitgpt plan config/fineweb_12gb.py --gpu=4070`.
# Muon reached the validation loss of nanoGPT's AdamW run (83 s) in 26 s, on an H200, in runs of 400 steps of this size:
# bench/results/fineweb_recipe_h200.json.
# Data: fitgpt prepare --hub=HuggingFaceFW/fineweb --hub_config=sample-10BT --name=fineweb --max_tokens=2.6B
# Start: fitgpt train config/fineweb_12gb.py        Resume: fitgpt train config/fineweb_12gb.py --resume

out_dir = 'runs/fineweb_12gb'
dataset = 'fineweb'

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # GPT-2's 50,257 tokens, padded to a multiple of 64

batch_size = 12
gradient_accumulation_steps = 8  # 12 * 1024 * 8 = 98,304 tokens per step

max_iters = 25500  # 2.5 billion tokens: 20 per parameter; 61,000 for 6 billion
lr_decay_iters = max_iters
warmup_iters = 500

# Validation losses after 180 steps, from the sweep of bench/fineweb_recipe.py. Muon: 4.8e-3 2.27, 2.4e-3 2.40, 9.6e-3
# 2.48. The lower of the two best is taken, because this run is 140 times as long, and longer runs want lower learning
# rates; that is not measured here. AdamW: 3e-4 3.48, others more: --optimizer=adamw --learning_rate=3e-4 --min_lr=3e-5
optimizer = 'muon'
learning_rate = 2.4e-3
min_lr = learning_rate / 10

eval_interval = 500
eval_iters = 100
eval_batch_size = 4
log_interval = 10
