"""mT5 with its large vocabulary: bfloat16 weights, Adafactor of transformers with relative steps, accumulation."""
import argparse

import torch
from transformers import Adafactor, MT5Config, MT5ForConditionalGeneration

p = argparse.ArgumentParser()
p.add_argument("-b", "--batch", type=int, default=6)
p.add_argument("--source", type=int, default=512)
p.add_argument("--target", type=int, default=96)
p.add_argument("--accumulate", type=int, default=2)
p.add_argument("--updates", type=int, default=5)
opt = p.parse_args()

torch.manual_seed(0)
config = MT5Config(vocab_size=100112, d_model=512, d_kv=64, d_ff=1024, num_layers=6, num_heads=6,
                   decoder_start_token_id=0, dropout_rate=0.1)
model = MT5ForConditionalGeneration(config).to(torch.bfloat16).to("cuda").train()
optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)

for update in range(opt.updates):
    running = 0.0
    for _micro in range(opt.accumulate):
        source = torch.randint(2, config.vocab_size, (opt.batch, opt.source))
        source[: opt.batch // 2, -100:] = 0
        target = torch.randint(2, config.vocab_size, (opt.batch, opt.target))
        target[:, -7:] = -100
        batch = {"input_ids": source, "attention_mask": (source != 0).long(), "labels": target}
        batch = {name: value.to("cuda") for name, value in batch.items()}
        out = model(**batch)
        (out.loss / opt.accumulate).backward()
        running += out.loss.item() / opt.accumulate
        del out, batch
    optimizer.step()
    optimizer.zero_grad()
    print(f"update {update}: {running:.3f}")
