"""Keyword spotting on raw audio with differentially private SGD: per-sample gradients by torch.func.

A one-dimensional convolutional network (after M5, with group norm), float32. Every gradient is clipped on its own, the
sum gets Gaussian noise, as in Opacus but without it.
"""
import argparse
import math

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LABELS = 35
SAMPLES = 16000


class ResidualUnit(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.depthwise = nn.Conv1d(channels, channels, 9, padding=4 * dilation, dilation=dilation, groups=channels)
        self.pointwise = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        return x + self.pointwise(F.silu(self.depthwise(self.norm(x))))


class KeywordNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv1d(1, width, kernel_size=80, stride=16, padding=32)
        stages = []
        for i, channels in enumerate([width, 2 * width, 4 * width]):
            stages += [ResidualUnit(channels, dilation) for dilation in (1, 2, 4)]
            stages.append(nn.Sequential(nn.GroupNorm(8, channels),
                                        nn.Conv1d(channels, channels * 2 if i < 2 else channels, 3, padding=1),
                                        nn.MaxPool1d(4)))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(4 * width, LABELS)

    def forward(self, waveform):
        x = self.stages(F.relu(self.stem(waveform)))
        return self.classifier(x.mean(dim=-1))


def synthetic_commands(count, seed):
    """Every word is a chirp of its own plus noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(LABELS, (count,), generator=generator)
    t = torch.arange(SAMPLES) / SAMPLES
    start = 100.0 + 40.0 * labels[:, None]
    waveforms = torch.sin(2 * math.pi * (start + 300 * t) * t) * torch.rand(count, 1, generator=generator)
    waveforms += 0.1 * torch.randn(count, SAMPLES, generator=generator)
    return TensorDataset(waveforms.unsqueeze(1), labels)


def make_per_sample_grad(model):
    def loss_of_one(params, waveform, label):
        logits = functional_call(model, params, (waveform.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    return vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different")


def privatize(grads, max_norm, noise_multiplier):
    """Clips per sample, sums, adds noise; returns the mean gradient and the share of clipped samples."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    private = {}
    for name, g in grads.items():
        total = torch.einsum("n,n...->...", factor, g)
        total += noise_multiplier * max_norm * torch.randn_like(total)
        private[name] = total / len(norms)
    return private, (factor < 1).float().mean()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    logits, labels = [], []
    for waveform, label in loader:
        logits.append(model(waveform.to(device)).cpu())
        labels.append(label)
    model.train()
    return (torch.cat(logits).argmax(1) == torch.cat(labels)).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=192)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--max-steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda")
    model = KeywordNet(args.width).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    train = DataLoader(synthetic_commands(args.batch_size * args.max_steps, 1), args.batch_size, shuffle=True,
                       pin_memory=True)
    test = DataLoader(synthetic_commands(args.batch_size * 2, 2), args.batch_size)
    per_sample_grad = make_per_sample_grad(model)

    for step, (waveform, label) in enumerate(train):
        waveform, label = waveform.to(device, non_blocking=True), label.to(device, non_blocking=True)
        shift = int(torch.randint(-1600, 1600, ()))
        waveform = torch.roll(waveform, shift, dims=-1)
        params = {name: p.detach() for name, p in model.named_parameters()}
        grads, losses = per_sample_grad(params, waveform, label)
        private, clipped = privatize(grads, args.max_grad_norm, args.noise_multiplier)
        del grads
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            p.grad = private[name]
        optimizer.step()
        print(f"step {step}: loss {losses.mean().item():.3f}, {100 * clipped.item():.0f} % clipped")
    print(f"test accuracy {evaluate(model, test, device):.3f}")


if __name__ == "__main__":
    main()
