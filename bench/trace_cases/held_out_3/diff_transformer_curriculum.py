"""Pretrain a small Differential Transformer (Ye et al., 2024) with a curriculum of sequence lengths.

Attention is written out as in the reference implementation: two softmax maps per head, their difference weights the
values. The number of tokens per batch is constant while the sequences get longer. The loss has a z-loss term.
"""
import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--embed_dim", type=int, default=768)
parser.add_argument("--num_heads", type=int, default=6)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--vocab", type=int, default=32000)
parser.add_argument("--tokens_per_batch", type=int, default=4096)
parser.add_argument("--stages", type=int, nargs="+", default=[256, 512, 1024])
parser.add_argument("--steps_per_stage", type=int, default=2)
parser.add_argument("--lr", type=float, default=6e-4)
parser.add_argument("--z_coef", type=float, default=1e-4)
args = parser.parse_args()


def lambda_init_fn(depth):
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def apply_rotary(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5, affine=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def forward(self, x):
        out = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
        return out if self.weight is None else out * self.weight


class MultiheadDiffAttn(nn.Module):
    def __init__(self, dim, heads, depth):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads // 2
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.lambda_init = lambda_init_fn(depth)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(torch.zeros(self.head_dim).normal_(std=0.1)))
        self.subln = RMSNorm(2 * self.head_dim)

    def forward(self, x, cos, sin, attn_mask):
        bsz, length, _ = x.shape
        q = self.q_proj(x).view(bsz, length, 2 * self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(bsz, length, 2 * self.heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(bsz, length, self.heads, 2 * self.head_dim).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        q = q * self.head_dim**-0.5
        weights = torch.matmul(q, k.transpose(-1, -2))
        weights = torch.nan_to_num(weights)
        weights += attn_mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights)
        lambda_1 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1).float()).type_as(q)
        lambda_2 = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2).float()).type_as(q)
        lambda_full = lambda_1 - lambda_2 + self.lambda_init
        weights = weights.view(bsz, self.heads, 2, length, length)
        weights = weights[:, :, 0] - lambda_full * weights[:, :, 1]
        out = self.subln(torch.matmul(weights, v)) * (1 - self.lambda_init)
        return self.out_proj(out.transpose(1, 2).reshape(bsz, length, -1))


class Block(nn.Module):
    def __init__(self, dim, heads, depth):
        super().__init__()
        self.attn_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attn = MultiheadDiffAttn(dim, heads, depth)
        hidden = (8 * dim // 3 + 63) // 64 * 64
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, *rest):
        x = x + self.attn(self.attn_norm(x), *rest)
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class DiffTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.embed_dim)
        self.blocks = nn.ModuleList(Block(args.embed_dim, args.num_heads, i) for i in range(args.depth))
        self.norm = RMSNorm(args.embed_dim)
        self.head = nn.Linear(args.embed_dim, args.vocab, bias=False)
        half = args.embed_dim // args.num_heads // 4
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(half) / half), persistent=False)
        nn.init.normal_(self.embed.weight, std=args.embed_dim**-0.5)

    def forward(self, tokens):
        length = tokens.size(1)
        angles = torch.outer(torch.arange(length, device=tokens.device), self.inv_freq)
        mask = torch.triu(torch.full((length, length), float("-inf"), device=tokens.device), 1)
        x = self.embed(tokens) * math.sqrt(args.embed_dim)
        mask = mask.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x))


torch.manual_seed(1337)
model = DiffTransformer().to("cuda")
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
                              lr=args.lr, betas=(0.9, 0.95))
total = len(args.stages) * args.steps_per_stage
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=total + 1)
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")

for stage, seq_len in enumerate(args.stages):
    batch_size = args.tokens_per_batch // seq_len
    for step in range(args.steps_per_stage):
        data = torch.randint(args.vocab, (batch_size, seq_len + 1)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(data[:, :-1])
        logits = logits.float().view(-1, args.vocab)
        nll = F.cross_entropy(logits, data[:, 1:].reshape(-1))
        z_loss = args.z_coef * torch.logsumexp(logits, dim=-1).pow(2).mean()
        (nll + z_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"stage {stage} ({batch_size}x{seq_len}) step {step}: nll {nll.item():.3f} z {z_loss.item():.4f}")
print(f"max memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
