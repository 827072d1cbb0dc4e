"""RetNet language model in plain PyTorch: multi-scale retention in its chunkwise recurrent form.

The stack is an nn.Sequential that runs under torch.utils.checkpoint.checkpoint_sequential; RAdam; float32 weights with
bfloat16 autocast, the state between chunks stays in float32.
"""
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint_sequential

# ---- configuration ----
vocab_size = 32768
d_model = 768
n_heads = 6
n_layers = 12
ffn_dim = 1536
chunk_size = 256
seq_len = 2048
batch_size = 4
segments = 4
max_iters = 4
learning_rate = 3e-4
device = "cuda"
torch.manual_seed(2024)
torch.set_float32_matmul_precision("high")


def rotate(x, sin, cos):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return x * cos + torch.stack((-x2, x1), dim=-1).flatten(-2) * sin


class MultiScaleRetention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key_dim, self.value_dim = d_model // n_heads, 2 * d_model // n_heads
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, d_model, bias=False)
        self.wv = nn.Linear(d_model, 2 * d_model, bias=False)
        self.wg = nn.Linear(d_model, 2 * d_model, bias=False)
        self.wo = nn.Linear(2 * d_model, d_model, bias=False)
        self.group_norm = nn.GroupNorm(n_heads, 2 * d_model, affine=False)
        gamma = 1 - 2 ** (-5 - torch.arange(n_heads, dtype=torch.float32))
        index = torch.arange(chunk_size, dtype=torch.float32)
        distance = index[:, None] - index[None, :]
        inner = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0.0)
        self.register_buffer("inner_decay", inner)                                   # (heads, chunk, chunk)
        self.register_buffer("query_decay", (gamma[:, None] ** (index + 1))[..., None])
        self.register_buffer("value_decay", (gamma[:, None] ** (chunk_size - 1 - index))[..., None])
        self.register_buffer("chunk_decay", (gamma**chunk_size)[:, None, None])
        freq = 1.0 / 10000 ** torch.linspace(0, 1, self.key_dim // 2).repeat_interleave(2)
        angle = torch.arange(seq_len, dtype=torch.float32)[:, None] * freq
        self.register_buffer("sin", angle.sin())
        self.register_buffer("cos", angle.cos())
        for w in (self.wq, self.wk, self.wv, self.wg):
            nn.init.xavier_uniform_(w.weight, gain=2**-2.5)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, n_heads, self.key_dim).transpose(1, 2)
        k = self.wk(x).view(b, t, n_heads, self.key_dim).transpose(1, 2) * self.key_dim**-0.5
        v = self.wv(x).view(b, t, n_heads, self.value_dim).transpose(1, 2)
        q, k = rotate(q, self.sin[:t], self.cos[:t]), rotate(k, self.sin[:t], self.cos[:t])
        state = torch.zeros(b, n_heads, self.key_dim, self.value_dim, device=x.device)
        outputs = []
        for qc, kc, vc in zip(q.split(chunk_size, 2), k.split(chunk_size, 2), v.split(chunk_size, 2), strict=True):
            scores = qc @ kc.transpose(-1, -2) * self.inner_decay
            inner = scores @ vc
            cross = (qc * self.query_decay) @ state
            outputs.append(inner + cross)
            state = state * self.chunk_decay + kc.transpose(-1, -2) @ (vc * self.value_decay)
        out = torch.cat(outputs, dim=2).transpose(1, 2).reshape(b * t, -1)
        out = self.group_norm(out).view(b, t, -1)
        return self.wo(F.silu(self.wg(x)) * out)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.retention = MultiScaleRetention()
        self.ffn = nn.Sequential(nn.Linear(d_model, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, d_model))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.retention(self.norm1(x)))
        return x + self.dropout(self.ffn(self.norm2(x)))


class RetNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.layers = nn.Sequential(*[Layer() for _ in range(n_layers)])
        self.norm = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.lm_head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.embed(idx) * math.sqrt(d_model)
        x = checkpoint_sequential(self.layers, segments, x, use_reentrant=False) if self.training else self.layers(x)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    data = torch.randint(0, vocab_size, (batch_size, seq_len + 1))
    return data[:, :-1].to(device), data[:, 1:].to(device)


model = RetNet().to(device)
print("parameters:", sum(p.numel() for p in model.parameters()))
optimizer = torch.optim.RAdam(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.05,
                              decoupled_weight_decay=True)

for it in range(max_iters):
    t0 = time.time()
    model.train()
    x, y = get_batch()
    with torch.amp.autocast(device, dtype=torch.bfloat16):
        logits, loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 2.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"iter {it}: loss {loss.item():.4f}, {(time.time() - t0) * 1000:.0f} ms")

    if it % 2 == 1:
        model.eval()
        with torch.no_grad(), torch.amp.autocast(device, dtype=torch.bfloat16):
            x, y = get_batch()
            _, val_loss = model(x, y)
        print(f"         val loss {val_loss.item():.4f}, perplexity {val_loss.exp().item():.1f}")
