"""Trains an image model: a ViT or ConvNeXt of transformers, ResNet-50, or a U-Net that predicts noise."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet50", choices=["resnet50", "unet", "vit", "convnext", "timm-vit"])
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--precision", default="bf16-autocast", choices=["fp32", "bf16-autocast", "fp16-autocast"])
parser.add_argument("--channels_last", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--device", default="cuda")
args = parser.parse_args()


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inside != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False),
                                            nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + shortcut)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                               nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU(),
                         nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip((3, *widths[:-2]), widths[:-1], strict=True))
        self.middle = DoubleConv(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths[-2::-1], widths[:0:-1],
                                                                               strict=True))
        self.merge = nn.ModuleList(DoubleConv(2 * a, a) for a in widths[-2::-1])
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((kept.pop(), up(x)), dim=1))
        return self.out(x)


def build() -> nn.Module:
    if args.model == "resnet50":
        return resnet50()
    if args.model == "unet":
        return UNet()
    if args.model == "timm-vit":
        import timm

        return timm.create_model("vit_small_patch16_224", num_classes=1000)
    import transformers

    if args.model == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=6, num_labels=1000))
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=1000))


torch.manual_seed(0)
model = build().to(args.device).train()
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
optimizer = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
             if args.model == "resnet50" else torch.optim.AdamW(model.parameters(), lr=1e-4))
scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16-autocast")
dtype = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}.get(args.precision)
forward = torch.compile(model) if args.compile else model
for step in range(args.steps):
    images = torch.randn(args.batch, 3, args.size, args.size).to(args.device)
    if args.channels_last:
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (args.batch,)).to(args.device)
    with torch.autocast(args.device, dtype) if dtype else nullcontext():
        out = forward(images + torch.randn_like(images) if args.model == "unet" else images)
        out = getattr(out, "logits", out)
        loss = F.mse_loss(out, images) if args.model == "unet" else F.cross_entropy(out, labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: loss {loss.item():.3f}")
