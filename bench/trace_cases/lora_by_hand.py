"""Adds hand-written LoRA adapters to a frozen GPT-2 of transformers."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--device", default="cuda")
args = parser.parse_args()


class LoraLayer(nn.Module):
    def __init__(self, base: Conv1D, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(base.weight.shape[0], rank))
        self.up = nn.Parameter(torch.zeros(rank, base.weight.shape[1]))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.down @ self.up)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=8))
model.config.use_cache = False
for parameter in model.parameters():
    parameter.requires_grad = False
for block in model.transformer.h:
    block.attn.c_attn = LoraLayer(block.attn.c_attn, args.rank)
    block.mlp.c_fc = LoraLayer(block.mlp.c_fc, args.rank)
model = model.to(args.device, torch.bfloat16 if args.bf16 else torch.float32).train()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)

for step in range(args.steps):
    ids = torch.randint(0, 50257, (args.batch, args.seq)).to(args.device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
