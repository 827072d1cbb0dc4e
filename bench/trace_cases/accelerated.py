"""Trains a model with accelerate: mixed precision, accumulation and clipping are the library's."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16", "no"])
parser.add_argument("--arch", default="qwen3")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()

accelerator = Accelerator(mixed_precision=args.precision, gradient_accumulation_steps=args.accumulate, cpu=args.cpu)
torch.manual_seed(0)
config = AutoConfig.for_model(args.arch, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
                              num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=50304,
                              use_cache=False)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 100)
data = DataLoader(TensorDataset(torch.randint(0, 50304, (args.batch * args.accumulate * args.steps, args.seq))),
                  batch_size=args.batch, pin_memory=True)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

model.train()
for (ids,) in data:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        accelerator.print(f"loss {loss.item():.3f}")
