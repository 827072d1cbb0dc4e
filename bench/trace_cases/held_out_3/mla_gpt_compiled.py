"""Pretrain a GPT with multi-head latent attention (as in DeepSeek-V2), compiled with torch.compile.

Keys and values come from a shared low-rank latent, a part of every head carries rotary positions. bfloat16 autocast,
fused AdamW, a warmup-stable-decay schedule, an evaluation in between.
"""
import math
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab_size: int = 32768
    context: int = 1024
    layers: int = 8
    dim: int = 768
    heads: int = 12
    q_rank: int = 384
    kv_rank: int = 192
    nope_dim: int = 64
    rope_dim: int = 32
    v_dim: int = 64
    mlp_dim: int = 2048
    batch_size: int = 8
    accumulate: int = 2
    max_steps: int = 4
    eval_every: int = 2
    eval_batches: int = 2
    lr: float = 1e-3


class MLA(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_down = nn.Linear(c.dim, c.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(c.q_rank)
        self.q_up = nn.Linear(c.q_rank, c.heads * (c.nope_dim + c.rope_dim), bias=False)
        self.kv_down = nn.Linear(c.dim, c.kv_rank + c.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(c.kv_rank)
        self.kv_up = nn.Linear(c.kv_rank, c.heads * (c.nope_dim + c.v_dim), bias=False)
        self.out = nn.Linear(c.heads * c.v_dim, c.dim, bias=False)

    @staticmethod
    def rotate(x, cos, sin):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    def forward(self, x, cos, sin):
        c = self.c
        b, t, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(b, t, c.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)
        latent, k_rope = self.kv_down(x).split([c.kv_rank, c.rope_dim], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(b, t, c.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], dim=-1)
        k_rope = self.rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, c.heads, -1, -1)
        q = torch.cat([q_nope, self.rotate(q_rope, cos, sin)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        v = F.pad(v, (0, c.nope_dim + c.rope_dim - c.v_dim))  # all head sizes alike, so that flash attention runs
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : c.v_dim]
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim)
        self.attn = MLA(c)
        self.w1, self.w3 = nn.Linear(c.dim, c.mlp_dim, bias=False), nn.Linear(c.dim, c.mlp_dim, bias=False)
        self.w2 = nn.Linear(c.mlp_dim, c.dim, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)
        inv_freq = 10000 ** (-torch.arange(0, c.rope_dim, 2).float() / c.rope_dim)
        angles = torch.outer(torch.arange(c.context).float(), inv_freq)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * c.layers) if name.endswith(("out.weight", "w2.weight")) else 0.02
                nn.init.normal_(p, std=std)

    def forward(self, idx, targets):
        t = idx.size(1)
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        logits = self.head(self.norm(x)).float()
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def wsd(step, total, warmup=1, decay=2):
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 if step < total - decay else (total - step) / decay


c = Config()
torch.manual_seed(1)
torch.set_float32_matmul_precision("high")
corpus = torch.randint(c.vocab_size, (2_000_000,))


def get_batch():
    at = torch.randint(len(corpus) - c.context - 1, (c.batch_size,))
    x = torch.stack([corpus[i : i + c.context] for i in at])
    y = torch.stack([corpus[i + 1 : i + 1 + c.context] for i in at])
    return x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)


raw_model = GPT(c).to("cuda")
model = torch.compile(raw_model)
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=c.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
amp = torch.autocast("cuda", dtype=torch.bfloat16)
print(f"{sum(p.numel() for p in raw_model.parameters()) / 1e6:.1f}M parameters")

for step in range(c.max_steps):
    if step % c.eval_every == 0:
        model.eval()
        with torch.no_grad(), amp:
            val = torch.stack([model(*get_batch()) for _ in range(c.eval_batches)]).mean()
        print(f"val loss {val.item():.4f}")
        model.train()
    start = time.time()
    for group in optimizer.param_groups:
        group["lr"] = c.lr * wsd(step, c.max_steps)
    for _ in range(c.accumulate):
        with amp:
            loss = model(*get_batch()) / c.accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(f"step {step} loss {loss.item() * c.accumulate:.4f} {time.time() - start:.2f} s")
print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
