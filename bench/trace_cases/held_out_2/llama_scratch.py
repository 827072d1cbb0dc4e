"""Train a small Llama from scratch on one GPU (bf16 autocast, gradient accumulation), then sample from it."""
import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.type_as(x) * self.weight


def precompute_freqs_cis(head_dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary(x, freqs_cis):
    # x: B, T, H, D
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    out = torch.view_as_real(x_ * freqs_cis[None, :, None, :]).flatten(3)
    return out.type_as(x)


def repeat_kv(x, n_rep):
    if n_rep == 1:
        return x
    b, t, h, d = x.shape
    return x[:, :, :, None, :].expand(b, t, h, n_rep, d).reshape(b, t, h * n_rep, d)


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads, self.n_kv = args.n_heads, args.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.n_kv * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, self.n_kv * self.head_dim, bias=False)
        self.wo = nn.Linear(self.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x, freqs_cis, cache=None, start_pos=0):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim)
        k = self.wk(x).view(b, t, self.n_kv, self.head_dim)
        v = self.wv(x).view(b, t, self.n_kv, self.head_dim)
        q, k = apply_rotary(q, freqs_cis), apply_rotary(k, freqs_cis)
        if cache is not None:
            cache_k, cache_v = cache
            cache_k[:, start_pos:start_pos + t] = k
            cache_v[:, start_pos:start_pos + t] = v
            k, v = cache_k[:, :start_pos + t].to(q.dtype), cache_v[:, :start_pos + t].to(q.dtype)
        k = repeat_kv(k, self.n_heads // self.n_kv)
        v = repeat_kv(v, self.n_heads // self.n_kv)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=t > 1)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, args):
        super().__init__()
        hidden = 256 * math.ceil(int(8 * args.dim / 3) / 256)
        self.w1 = nn.Linear(args.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim)
        self.ffn_norm = RMSNorm(args.dim)

    def forward(self, x, freqs_cis, cache=None, start_pos=0):
        x = x + self.attention(self.attention_norm(x), freqs_cis, cache, start_pos)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.register_buffer("freqs_cis", precompute_freqs_cis(args.dim // args.n_heads, args.seq_len * 2),
                             persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, tokens, targets=None, caches=None, start_pos=0):
        h = self.tok_embeddings(tokens)
        freqs = self.freqs_cis[start_pos:start_pos + tokens.shape[1]]
        for i, layer in enumerate(self.layers):
            h = layer(h, freqs, None if caches is None else caches[i], start_pos)
        h = self.norm(h)
        if targets is None:
            return self.output(h[:, -1])
        logits = self.output(h).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@torch.no_grad()
def generate(model, prompt, max_new_tokens, temperature=0.8, top_k=50):
    args, (b, t) = model.args, prompt.shape
    shape = (b, t + max_new_tokens, args.n_kv_heads, args.dim // args.n_heads)
    caches = [(torch.zeros(shape, device=prompt.device, dtype=torch.bfloat16),
               torch.zeros(shape, device=prompt.device, dtype=torch.bfloat16)) for _ in range(args.n_layers)]
    tokens, cur, pos = prompt, prompt, 0
    for _ in range(max_new_tokens):
        logits = model(cur, caches=caches, start_pos=pos).float() / temperature
        pos += cur.shape[1]
        v, _ = torch.topk(logits, top_k)
        logits[logits < v[:, [-1]]] = -float("inf")
        cur = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
        tokens = torch.cat([tokens, cur], dim=1)
    return tokens


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=768)
    p.add_argument("--n_layers", type=int, default=12)
    p.add_argument("--n_heads", type=int, default=12)
    p.add_argument("--n_kv_heads", type=int, default=4)
    p.add_argument("--vocab_size", type=int, default=32000)
    p.add_argument("--seq_len", type=int, default=1024)
    p.add_argument("--batch_size", type=int, default=4)
    p.add_argument("--grad_accum", type=int, default=3)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--eval_interval", type=int, default=2)
    p.add_argument("--lr", type=float, default=4e-4)
    args = p.parse_args()

    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda"
    model = Llama(args).to(device)
    print(f"{sum(x.numel() for x in model.parameters()) / 1e6:.1f}M parameters")
    decay = [x for x in model.parameters() if x.dim() >= 2]
    no_decay = [x for x in model.parameters() if x.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95), fused=True)
    data = torch.randint(0, args.vocab_size, (1_000_000,))

    def get_batch(batch_size=args.batch_size):
        ix = torch.randint(len(data) - args.seq_len - 1, (batch_size,)).tolist()
        x = torch.stack([data[i:i + args.seq_len] for i in ix])
        y = torch.stack([data[i + 1:i + 1 + args.seq_len] for i in ix])
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)

    ctx = torch.autocast(device_type=device, dtype=torch.bfloat16)

    @torch.no_grad()
    def evaluate(iters=3):
        model.eval()
        losses = torch.zeros(iters)
        for k in range(iters):
            x, y = get_batch(args.batch_size * 2)
            with ctx:
                losses[k] = model(x, y).item()
        model.train()
        return losses.mean().item()

    x, y = get_batch()
    for step in range(args.steps):
        for g in optimizer.param_groups:
            g["lr"] = args.lr * min(1.0, (step + 1) / 3)
        if step > 0 and step % args.eval_interval == 0:
            print(f"step {step}: val loss {evaluate():.4f}")
        t0 = time.time()
        for _ in range(args.grad_accum):
            with ctx:
                loss = model(x, y) / args.grad_accum
            x, y = get_batch()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item() * args.grad_accum:.4f} norm {norm.item():.2f} {time.time() - t0:.2f}s")

    model.eval()
    with ctx:
        out = generate(model, torch.randint(0, args.vocab_size, (4, 64), device=device), 64)
    print("sampled", tuple(out.shape), out[0, -8:].tolist())


if __name__ == "__main__":
    main()
