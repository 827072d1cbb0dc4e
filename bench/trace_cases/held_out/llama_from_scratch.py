"""A small Llama from scratch: rotary embeddings as complex numbers, tied weights, the loss in chunks of tokens."""
import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description="train a llama")
parser.add_argument("--dim", type=int, default=640)
parser.add_argument("--n_layers", type=int, default=8)
parser.add_argument("--n_heads", type=int, default=10)
parser.add_argument("--vocab_size", type=int, default=32000)
parser.add_argument("--max_seq_len", type=int, default=768)
parser.add_argument("--batch_size", type=int, default=12)
parser.add_argument("--max_iters", type=int, default=6)
parser.add_argument("--loss_chunks", type=int, default=4)
args = parser.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    t = torch.arange(end)
    return torch.polar(torch.ones(end, dim // 2), torch.outer(t, freqs))


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x, freqs_cis):
        B, T, _ = x.shape
        xq, xk, xv = (w(x).view(B, T, args.n_heads, self.head_dim) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        out = F.scaled_dot_product_attention(xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(B, T, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = 256 * math.ceil(int(8 * args.dim / 3) / 256)
        self.attention, self.attention_norm, self.ffn_norm = Attention(), RMSNorm(args.dim), RMSNorm(args.dim)
        self.w1, self.w3 = nn.Linear(args.dim, hidden, bias=False), nn.Linear(args.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, args.dim, bias=False)

    def forward(self, x, freqs_cis):
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList([Block() for _ in range(args.n_layers)])
        self.norm = RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tok_embeddings.weight = self.output.weight
        self.register_buffer("freqs_cis", precompute_freqs_cis(args.dim // args.n_heads, args.max_seq_len))

    def forward(self, tokens, targets):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[: tokens.shape[1]])
        h = self.norm(h)
        loss = 0.0
        for hc, tc in zip(h.chunk(args.loss_chunks, 1), targets.chunk(args.loss_chunks, 1), strict=False):
            loss = loss + F.cross_entropy(self.output(hc).float().flatten(0, 1), tc.flatten(), reduction="sum")
        return loss / targets.numel()


torch.manual_seed(1337)
model = Transformer().cuda()
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
                              lr=5e-4, betas=(0.9, 0.95), fused=True)
for it in range(args.max_iters):
    t0 = time.time()
    data = torch.randint(0, args.vocab_size, (args.batch_size, args.max_seq_len + 1))
    x = data[:, :-1].pin_memory().to("cuda", non_blocking=True)
    y = data[:, 1:].pin_memory().to("cuda", non_blocking=True)
    with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {it}: loss {loss.item():.4f}, {(time.time() - t0) * 1000:.0f} ms")
