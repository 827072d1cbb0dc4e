"""Train a ConvNeXt (written out, after the original repository) on random images.

channels_last, bfloat16 autocast, stochastic depth, layer scale, mixup, gradient accumulation, an EMA of the weights.
"""
import argparse
import copy
import itertools
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def drop_path(x, p, training):
    if p == 0.0 or not training:
        return x
    mask = x.new_empty((x.size(0), 1, 1, 1)).bernoulli_(1 - p)
    return x * mask.div_(1 - p)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of (N, C, H, W)."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, dim, path_rate, layer_scale=1e-6):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))
        self.path_rate = path_rate

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = (self.gamma * x).permute(0, 3, 1, 2)
        return shortcut + drop_path(x, self.path_rate, self.training)


class ConvNeXt(nn.Module):
    def __init__(self, depths, dims, num_classes=1000, drop_path_rate=0.2):
        super().__init__()
        self.downsample = nn.ModuleList([nn.Sequential(nn.Conv2d(3, dims[0], 4, stride=4), LayerNorm2d(dims[0]))])
        for a, b in itertools.pairwise(dims):
            self.downsample.append(nn.Sequential(LayerNorm2d(a, eps=1e-6), nn.Conv2d(a, b, 2, stride=2)))
        rates = torch.linspace(0, drop_path_rate, sum(depths)).tolist()
        self.stages = nn.ModuleList()
        for depth, dim in zip(depths, dims, strict=True):
            self.stages.append(nn.Sequential(*[Block(dim, rates.pop(0)) for _ in range(depth)]))
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], num_classes)
        self.apply(self.init)

    @staticmethod
    def init(m):
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        for down, stage in zip(self.downsample, self.stages, strict=True):
            x = stage(down(x))
        return self.head(self.norm(x.mean([-2, -1])))


class ModelEma:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval(), decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        current = model.state_dict()
        for k, v in self.module.state_dict().items():
            v.mul_(self.decay).add_(current[k].detach(), alpha=1 - self.decay)


def main():
    parser = argparse.ArgumentParser("ConvNeXt")
    parser.add_argument("--batch_size", default=64, type=int)
    parser.add_argument("--input_size", default=224, type=int)
    parser.add_argument("--update_freq", default=2, type=int)
    parser.add_argument("--steps", default=4, type=int)
    parser.add_argument("--depths", default=[3, 3, 9, 3], type=int, nargs=4)
    parser.add_argument("--dims", default=[96, 192, 384, 768], type=int, nargs=4)
    parser.add_argument("--lr", default=4e-3, type=float)
    parser.add_argument("--mixup", default=0.8, type=float)
    args = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    torch.backends.cudnn.benchmark = False

    model = ConvNeXt(args.depths, args.dims).to("cuda", memory_format=torch.channels_last)
    ema = ModelEma(model, decay=0.9999)
    no_decay = [p for n, p in model.named_parameters() if p.ndim == 1]
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": no_decay, "weight_decay": 0.0}], weight_decay=0.05)
    print("parameters (M):", sum(p.numel() for p in model.parameters()) / 1e6)

    model.train()
    for step in range(args.steps):
        started, total = time.time(), 0.0
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.zero_grad()
        for _ in range(args.update_freq):
            images = torch.rand(args.batch_size, 3, args.input_size, args.input_size)
            images = images.to("cuda", non_blocking=True).contiguous(memory_format=torch.channels_last)
            labels = torch.randint(0, 1000, (args.batch_size,)).to("cuda", non_blocking=True)
            target = F.one_hot(labels, 1000).float() * 0.9 + 0.1 / 1000
            lam = float(np.random.beta(args.mixup, args.mixup))
            images = images.mul(lam).add_(images.flip(0), alpha=1 - lam)
            target = lam * target + (1 - lam) * target.flip(0)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = model(images)
                loss = torch.sum(-target * F.log_softmax(output, dim=-1), dim=-1).mean()
            (loss / args.update_freq).backward()
            total += loss.item()
        optimizer.step()
        ema.update(model)
        torch.cuda.synchronize()
        print(f"step {step}: loss {total / args.update_freq:.4f} ({time.time() - started:.2f} s)")

    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        images = torch.rand(2 * args.batch_size, 3, args.input_size, args.input_size, device="cuda")
        probabilities = ema.module(images.to(memory_format=torch.channels_last)).float().softmax(-1)
    print("EMA top-1 confidence:", probabilities.max(dim=-1).values.mean().item())


if __name__ == "__main__":
    main()
