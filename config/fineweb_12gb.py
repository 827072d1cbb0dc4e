# GPT-2 small (124M) on FineWeb with Muon, for a 12 GB GPU: 4.3 GiB by `fitgpt plan config/fineweb_12gb.py --gpu=4070`.
# Muon reaches nanoGPT's loss after 400 AdamW steps in 124: docs/benchmarks.md, bench/results/fineweb_recipe_h200.json.
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

# Of 6e-4, 1.2e-3, 2.4e-3, 4.8e-3 and 9.6e-3, in runs of 180 steps of this size on an H200, 4.8e-3 ended with the lowest
# loss and 2.4e-3 with the second (bench/fineweb_recipe.py sweep). This run is 140 times as long, and long runs need a
# lower rate than short ones: half of the best. With --optimizer=adamw the best of six was 3e-4.
optimizer = 'muon'
learning_rate = 2.4e-3
min_lr = learning_rate / 10

eval_interval = 500
eval_iters = 100
eval_batch_size = 4
log_interval = 10
