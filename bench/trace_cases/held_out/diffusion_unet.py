"""A diffusion U-Net with time embedding and attention, float16 with GradScaler, an EMA of the weights."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, i, o, emb):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, i), nn.Conv2d(i, o, 3, padding=1)
        self.emb = nn.Linear(emb, o)
        self.norm2, self.conv2 = nn.GroupNorm(32, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, c, heads=4):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, c), heads
        self.qkv, self.proj = nn.Conv1d(c, 3 * c, 1), nn.Conv1d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).view(b, c, -1)).view(b, 3, self.heads, c // self.heads, -1).unbind(1)
        a = F.scaled_dot_product_attention(*(each.transpose(-1, -2) for each in (q, k, v)))
        return x + self.proj(a.transpose(-1, -2).reshape(b, c, -1)).view(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, base=128, mults=(1, 2, 2)):
        super().__init__()
        emb = 4 * base
        self.time = nn.Sequential(nn.Linear(base, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.base, self.inp = base, nn.Conv2d(3, base, 3, padding=1)
        widths, c, self.downs, self.ups = [base * m for m in mults], base, nn.ModuleList(), nn.ModuleList()
        for level, o in enumerate(widths):
            last = level == len(widths) - 1
            self.downs.append(nn.ModuleList([ResBlock(c, o, emb), Attention(o) if level else nn.Identity(),
                                             nn.Identity() if last else nn.Conv2d(o, o, 3, 2, 1)]))
            c = o
        self.mid = nn.ModuleList([ResBlock(c, c, emb), Attention(c), ResBlock(c, c, emb)])
        for level, o in reversed(list(enumerate(widths))):
            self.ups.append(nn.ModuleList([ResBlock(c + o, o, emb), Attention(o) if level else nn.Identity(),
                                           nn.Upsample(scale_factor=2) if level else nn.Identity()]))
            c = o
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x, t):
        emb, x, kept = self.time(timestep_embedding(t, self.base)), self.inp(x), []
        for res, attention, down in self.downs:
            x = attention(res(x, emb))
            kept.append(x)
            x = down(x)
        x = self.mid[2](self.mid[1](self.mid[0](x, emb)), emb)
        for res, attention, up in self.ups:
            x = up(attention(res(torch.cat([x, kept.pop()], dim=1), emb)))
        return self.out(x)


net = UNet().cuda()
ema = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), lr=2e-4)
scaler = torch.amp.GradScaler("cuda")
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).cuda()
for step in range(5):
    x0 = torch.randn(16, 3, 64, 64, device="cuda")
    t = torch.randint(0, 1000, (16,), device="cuda")
    noise = torch.randn_like(x0)
    a = alphas[t][:, None, None, None]
    with torch.autocast("cuda", torch.float16):
        loss = F.mse_loss(net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    torch._foreach_lerp_(list(ema.parameters()), list(net.parameters()), 0.001)
    print(step, loss.item())
