"""A GPT with RMSNorm, rotary embeddings, grouped-query attention, QK-norm and SwiGLU, trained with Muon."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--kv_heads", type=int, default=4)
parser.add_argument("--vocab", type=int, default=50304)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--optimizer", default="muon", choices=["muon", "adamw", "adamw-fused"])
parser.add_argument("--dtype", default="autocast", choices=["autocast", "bfloat16", "float32"])
parser.add_argument("--attention", default="gqa", choices=["gqa", "repeat", "manual"])
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--device", default="cuda")
args = parser.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = args.width // args.heads
        self.q = nn.Linear(args.width, args.width, bias=False)
        self.kv = nn.Linear(args.width, 2 * args.kv_heads * self.size, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.size), RMSNorm(self.size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q = self.q(x).view(batch, seq, args.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(batch, seq, 2, args.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        if args.attention != "gqa":
            k, v = (each.repeat_interleave(args.heads // args.kv_heads, dim=1) for each in (k, v))
        if args.attention == "manual":
            scores = q @ k.transpose(-2, -1) / self.size**0.5
            mask = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
            y = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), args.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=args.dropout if self.training else 0.0,
                                               is_causal=True, enable_gqa=args.attention == "gqa")
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = 8 * args.width // 3 // 64 * 64
        self.norm1, self.attention, self.norm2 = RMSNorm(args.width), Attention(), RMSNorm(args.width)
        self.gate, self.up = nn.Linear(args.width, hidden, bias=False), nn.Linear(args.width, hidden, bias=False)
        self.down = nn.Linear(hidden, args.width, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        h = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm, self.head = RMSNorm(args.width), nn.Linear(args.width, args.vocab, bias=False)
        size = args.width // args.heads
        angles = torch.outer(torch.arange(args.seq).float(), 10000 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if args.recompute:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))


torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
model = GPT().to(args.device)
if args.dtype == "bfloat16":
    model = model.bfloat16()
matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
others = [p for name, p in model.named_parameters() if p.dim() != 2 or not name.startswith("blocks")]
if args.optimizer == "muon":
    optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95), fused=True)]
else:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4, fused=args.optimizer == "adamw-fused")]
forward = torch.compile(model) if args.compile else model
autocast = torch.autocast(args.device, torch.bfloat16) if args.dtype == "autocast" else nullcontext()

for step in range(args.steps):
    for _ in range(args.accumulate):
        tokens = torch.randint(args.vocab, (args.batch, args.seq + 1)).to(args.device)
        with autocast:
            loss = forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / args.accumulate
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    print(f"step {step}: loss {args.accumulate * loss.item():.3f}, gradient norm {norm.item():.3f}")
