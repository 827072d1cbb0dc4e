"""Semantic segmentation with a classic U-Net: cross entropy + soft Dice, fp16 AMP."""
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, n_classes, base=64, depth=4):
        super().__init__()
        chans = [base * 2 ** i for i in range(depth + 1)]
        self.stem = DoubleConv(3, chans[0])
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(a, b)) for a, b in zip(chans[:-1], chans[1:]))
        rev = chans[::-1]
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in zip(rev[:-1], rev[1:]))
        self.convs = nn.ModuleList(DoubleConv(a, b) for a, b in zip(rev[:-1], rev[1:]))
        self.head = nn.Conv2d(base, n_classes, 1)

    def forward(self, x):
        feats = [self.stem(x)]
        for down in self.downs:
            feats.append(down(feats[-1]))
        x = feats.pop()
        for up, conv in zip(self.ups, self.convs):
            x = conv(torch.cat([feats.pop(), up(x)], dim=1))
        return self.head(x)


def dice_loss(logits, target, n_classes, ignore_index=255, eps=1e-6):
    valid = (target != ignore_index).unsqueeze(1)
    onehot = F.one_hot(target.clamp(max=n_classes - 1), n_classes).permute(0, 3, 1, 2).float() * valid
    probs = torch.softmax(logits.float(), dim=1) * valid
    inter = (probs * onehot).sum(dim=(0, 2, 3))
    union = probs.sum(dim=(0, 2, 3)) + onehot.sum(dim=(0, 2, 3))
    return 1 - ((2 * inter + eps) / (union + eps)).mean()


class Shapes(Dataset):
    """Random rectangles; a border of ignored pixels."""

    def __init__(self, n, size, n_classes):
        self.n, self.size, self.n_classes = n, size, n_classes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        mask = np.zeros((self.size, self.size), dtype=np.int64)
        for _ in range(6):
            y, x = rng.integers(0, self.size // 2, 2)
            h, w = rng.integers(16, self.size // 2, 2)
            mask[y:y + h, x:x + w] = rng.integers(1, self.n_classes)
        img = rng.standard_normal((3, self.size, self.size), dtype=np.float32) + mask / self.n_classes
        mask[:4] = mask[-4:] = 255
        return torch.from_numpy(img.astype(np.float32)), torch.from_numpy(mask)


@torch.no_grad()
def mean_iou(logits, target, n_classes):
    pred = logits.argmax(1)
    ious = []
    for c in range(n_classes):
        p, t = pred == c, target == c
        union = (p | t).sum()
        ious.append(((p & t).sum() + 1e-6) / (union + 1e-6))
    return torch.stack(ious).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=6)
    ap.add_argument("--size", type=int, default=384)
    ap.add_argument("--classes", type=int, default=21)
    ap.add_argument("--base", type=int, default=64)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--lr", type=float, default=1e-4)
    args = ap.parse_args()
    torch.manual_seed(3)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet(args.classes, args.base).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr, weight_decay=1e-8, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda")
    ce = nn.CrossEntropyLoss(ignore_index=255)
    loader = DataLoader(Shapes(args.batch_size * args.steps, args.size, args.classes),
                        batch_size=args.batch_size, shuffle=True, pin_memory=True)

    model.train()
    for step, (images, masks) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        masks = masks.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.float16):
            logits = model(images)
            loss = ce(logits, masks) + dice_loss(logits, masks, args.classes)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        miou = mean_iou(logits, masks, args.classes)
        print(f"step {step}: loss {loss.item():.4f}, mIoU {miou.item():.4f}")
    if device.type == "cuda":
        print(f"max reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
