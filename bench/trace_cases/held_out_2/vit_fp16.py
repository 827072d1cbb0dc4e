"""ViT-B/16-ish from scratch: fp16 autocast + GradScaler, mixup, SDPA, stochastic depth."""
import argparse

import numpy as np
import torch
from torch import nn
import torch.nn.functional as F


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=48)
    ap.add_argument("--img", type=int, default=224)
    ap.add_argument("--patch", type=int, default=16)
    ap.add_argument("--dim", type=int, default=768)
    ap.add_argument("--depth", type=int, default=12)
    ap.add_argument("--heads", type=int, default=12)
    ap.add_argument("--classes", type=int, default=1000)
    ap.add_argument("--mixup", type=float, default=0.8)
    ap.add_argument("--iters", type=int, default=5)
    return ap.parse_args()


class PatchEmbed(nn.Module):
    def __init__(self, img, patch, dim):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.n = (img // patch) ** 2

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, drop=0.0):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.out = nn.Linear(dim, dim)
        self.drop = drop

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep).div_(keep)


class Layer(nn.Module):
    def __init__(self, dim, heads, dp):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = SelfAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))
        self.dp = DropPath(dp)

    def forward(self, x):
        x = x + self.dp(self.attn(self.norm1(x)))
        return x + self.dp(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.patch = PatchEmbed(a.img, a.patch, a.dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, a.dim))
        self.pos = nn.Parameter(torch.empty(1, self.patch.n + 1, a.dim))
        nn.init.trunc_normal_(self.pos, std=0.02)
        rates = np.linspace(0, 0.1, a.depth)
        self.layers = nn.Sequential(*[Layer(a.dim, a.heads, float(r)) for r in rates])
        self.norm = nn.LayerNorm(a.dim, eps=1e-6)
        self.head = nn.Linear(a.dim, a.classes)

    def forward(self, x):
        x = self.patch(x)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.layers(x))[:, 0])


def mixup(x, y, classes, alpha, smoothing=0.1):
    lam = float(np.random.beta(alpha, alpha))
    perm = torch.randperm(x.size(0), device=x.device)
    onehot = F.one_hot(y, classes).float() * (1 - smoothing) + smoothing / classes
    return lam * x + (1 - lam) * x[perm], lam * onehot + (1 - lam) * onehot[perm]


def main():
    a = parse()
    torch.manual_seed(0)
    np.random.seed(0)
    dev = torch.device("cuda", 0)
    model = ViT(a).to(dev).train()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss()

    for it in range(a.iters):
        images = torch.randn(a.batch_size, 3, a.img, a.img).to(dev, non_blocking=True)
        labels = torch.randint(a.classes, (a.batch_size,)).to(dev, non_blocking=True)
        images, targets = mixup(images, labels, a.classes, a.mixup)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(images)
            loss = criterion(logits, targets)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        acc = (logits.argmax(-1) == labels).float().mean()
        print(f"iter {it}  loss {loss.item():.3f}  acc {acc.item():.3f}  scale {scaler.get_scale():.0f}")
    print("max reserved MiB", torch.cuda.max_memory_reserved() // 2**20)


if __name__ == "__main__":
    main()
