"""Pretrain a small llama-flavoured GPT: torch.compile + bf16 autocast + fused AdamW."""
import argparse
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--batch_size", type=int, default=6)
p.add_argument("--block_size", type=int, default=1024)
p.add_argument("--n_layer", type=int, default=12)
p.add_argument("--n_head", type=int, default=12)
p.add_argument("--n_embd", type=int, default=768)
p.add_argument("--vocab_size", type=int, default=32768)
p.add_argument("--lr", type=float, default=6e-4)
p.add_argument("--steps", type=int, default=6)
p.add_argument("--no_compile", action="store_true")
args = p.parse_args()

torch.manual_seed(1337)
torch.set_float32_matmul_precision("high")
device = "cuda"


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).type_as(x)


def rope_cache(seq_len, dim, base=10000.0):
    inv = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
    t = torch.outer(torch.arange(seq_len).float(), inv)
    return t.cos()[None, None], t.sin()[None, None]


def apply_rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    def __init__(self, dim):
        super().__init__()
        hidden = 256 * ((int(8 * dim / 3) + 255) // 256)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.attn = RMSNorm(dim), Attention(dim, heads)
        self.n2, self.mlp = RMSNorm(dim), SwiGLU(dim)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.n1(x), cos, sin)
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(args.vocab_size, args.n_embd)
        self.blocks = nn.ModuleList(Block(args.n_embd, args.n_head) for _ in range(args.n_layer))
        self.norm = RMSNorm(args.n_embd)
        self.lm_head = nn.Linear(args.n_embd, args.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        cos, sin = rope_cache(args.block_size, args.n_embd // args.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for n, w in self.named_parameters():
            if w.dim() == 2:
                std = 0.02 / math.sqrt(2 * args.n_layer) if n.endswith(("proj.weight", "w2.weight")) else 0.02
                nn.init.normal_(w, std=std)

    def forward(self, idx, targets):
        T = idx.size(1)
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x, self.cos[:, :, :T], self.sin[:, :, :T])
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))


data = np.random.default_rng(0).integers(0, args.vocab_size, size=2_000_000, dtype=np.uint16)


def get_batch():
    ix = np.random.randint(0, len(data) - args.block_size - 1, size=args.batch_size)
    x = torch.stack([torch.from_numpy(data[i:i + args.block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + args.block_size].astype(np.int64)) for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


raw_model = GPT().to(device)
print(f"{sum(w.numel() for w in raw_model.parameters()) / 1e6:.1f}M parameters")
decay = [w for w in raw_model.parameters() if w.dim() >= 2]
no_decay = [w for w in raw_model.parameters() if w.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=args.lr, betas=(0.9, 0.95), fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 3))
model = raw_model if args.no_compile else torch.compile(raw_model)

model.train()
x, y = get_batch()
for step in range(args.steps):
    t0 = time.time()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x, y)
    x, y = get_batch()  # prefetch the next batch while the GPU is busy
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f} {1000 * (time.time() - t0):.0f} ms")
print(f"peak {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB reserved")
