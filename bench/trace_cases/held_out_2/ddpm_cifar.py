"""Denoising diffusion (DDPM) on CIFAR-sized images: U-Net with attention at 16x16 and an EMA of the weights."""
import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    a = t[:, None].float() * freqs[None]
    return torch.cat([a.cos(), a.sin()], dim=1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb, dropout=0.1):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.t = nn.Linear(temb, cout)
        self.n2, self.c2 = nn.GroupNorm(32, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()
        nn.init.zeros_(self.c2.weight)

    def forward(self, x, emb):
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.t(F.silu(emb))[:, :, None, None]
        h = self.c2(self.drop(F.silu(self.n2(h))))
        return h + self.skip(x)


class AttnBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(32, c)
        self.qkv = nn.Conv2d(c, 3 * c, 1)
        self.proj = nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).unbind(1)
        scores = torch.softmax(torch.einsum("bci,bcj->bij", q, k) / math.sqrt(c), dim=-1)
        out = torch.einsum("bij,bcj->bci", scores, v).reshape(b, c, h, w)
        return x + self.proj(out)


class UNet(nn.Module):
    def __init__(self, ch=128, mults=(1, 2, 2, 2), blocks=2, attn_res=(16,), size=32):
        super().__init__()
        temb = 4 * ch
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, temb), nn.SiLU(), nn.Linear(temb, temb))
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.down, skips, c, res = nn.ModuleList(), [ch], ch, size
        for i, m in enumerate(mults):
            for _ in range(blocks):
                attn = AttnBlock(ch * m) if res in attn_res else nn.Identity()
                self.down.append(nn.ModuleList([ResBlock(c, ch * m, temb), attn]))
                c = ch * m
                skips.append(c)
            if i < len(mults) - 1:
                self.down.append(nn.Conv2d(c, c, 3, stride=2, padding=1))
                skips.append(c)
                res //= 2
        self.mid1, self.mid_attn, self.mid2 = ResBlock(c, c, temb), AttnBlock(c), ResBlock(c, c, temb)
        self.up = nn.ModuleList()
        for i, m in reversed(list(enumerate(mults))):
            for _ in range(blocks + 1):
                attn = AttnBlock(ch * m) if res in attn_res else nn.Identity()
                self.up.append(nn.ModuleList([ResBlock(c + skips.pop(), ch * m, temb), attn]))
                c = ch * m
            if i > 0:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"),
                                             nn.Conv2d(c, c, 3, padding=1)))
                res *= 2
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.ch))
        h = self.inp(x)
        hs = [h]
        for layer in self.down:
            if isinstance(layer, nn.ModuleList):
                h = layer[1](layer[0](h, emb))
            else:
                h = layer(h)
            hs.append(h)
        h = self.mid2(self.mid_attn(self.mid1(h, emb)), emb)
        for layer in self.up:
            if isinstance(layer, nn.ModuleList):
                h = layer[1](layer[0](torch.cat([h, hs.pop()], dim=1), emb))
            else:
                h = layer(h)
        return self.out(h)


@torch.no_grad()
def ema_update(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p, 1 - decay)
    for e, p in zip(ema.buffers(), model.buffers()):
        e.copy_(p)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch_size", type=int, default=64)
    ap.add_argument("--channels", type=int, default=128)
    ap.add_argument("--T", type=int, default=1000)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--lr", type=float, default=2e-4)
    args = ap.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    data = torch.randint(0, 256, (2048, 3, 32, 32), dtype=torch.uint8)

    model = UNet(ch=args.channels).to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    print(f"U-Net with {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=1000)
    betas = torch.linspace(1e-4, 0.02, args.T, device=device)
    abar = torch.cumprod(1 - betas, dim=0)

    model.train()
    for step in range(args.steps):
        idx = torch.randint(0, len(data), (args.batch_size,))
        x0 = data[idx].to(device, non_blocking=True).float() / 127.5 - 1
        flip = torch.rand(args.batch_size, 1, 1, 1, device=device) < 0.5
        x0 = torch.where(flip, x0.flip(-1), x0)
        t = torch.randint(0, args.T, (args.batch_size,), device=device)
        noise = torch.randn_like(x0)
        a = abar[t].view(-1, 1, 1, 1)
        xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
        loss = F.mse_loss(model(xt, t), noise)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        warmup.step()
        ema_update(ema, model, 0.9999)
        print(f"step {step} loss {loss.item():.4f}")
    print(f"peak reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
