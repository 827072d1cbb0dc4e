"""Vision transformer with soft mixture-of-experts layers (Puigcerver et al. 2023), trained with Lion."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = exp_avg.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class SoftMoE(nn.Module):
    def __init__(self, dim, num_experts, slots_per_expert, mult=4, dropout=0.0):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(dim, num_experts, slots_per_expert) * dim ** -0.5)
        self.scale = nn.Parameter(torch.ones(()))
        hidden = dim * mult
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim ** -0.5)
        self.b1 = nn.Parameter(torch.zeros(num_experts, 1, hidden))
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden ** -0.5)
        self.b2 = nn.Parameter(torch.zeros(num_experts, 1, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        phi = self.scale * F.normalize(self.phi, dim=0)
        logits = torch.einsum("btd,des->btes", F.normalize(x, dim=-1), phi)
        dispatch = logits.softmax(dim=1)
        b, t, e, s = logits.shape
        combine = logits.reshape(b, t, e * s).softmax(dim=-1).reshape(b, t, e, s)
        slots = torch.einsum("btd,btes->besd", x, dispatch)
        h = torch.einsum("besd,edh->besh", slots, self.w1) + self.b1
        h = self.dropout(F.gelu(h))
        out = torch.einsum("besh,ehd->besd", h, self.w2) + self.b2
        return torch.einsum("besd,btes->btd", out, combine)


class Mlp(nn.Sequential):
    def __init__(self, dim, mult=4, dropout=0.0):
        super().__init__(nn.Linear(dim, dim * mult), nn.GELU(), nn.Dropout(dropout), nn.Linear(dim * mult, dim))


class Block(nn.Module):
    def __init__(self, dim, heads, moe, experts, slots, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True, dropout=dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.ff = SoftMoE(dim, experts, slots, dropout=dropout) if moe else Mlp(dim, dropout=dropout)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop(self.ff(self.norm2(x)))


class SoftMoEViT(nn.Module):
    def __init__(self, image=224, patch=16, dim=512, depth=8, heads=8, experts=16, slots=12, classes=1000, dropout=0.1):
        super().__init__()
        self.patch = patch
        n = (image // patch) ** 2
        self.embed = nn.Linear(3 * patch * patch, dim)
        self.pos = nn.Parameter(torch.randn(1, n, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, i >= depth // 2, experts, slots, dropout) for i in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def patchify(self, x):
        b, c, h, w = x.shape
        p = self.patch
        x = x.reshape(b, c, h // p, p, w // p, p)
        return torch.einsum("bchpwq->bhwpqc", x).reshape(b, (h // p) * (w // p), p * p * c)

    def forward(self, img):
        x = self.embed(self.patchify(img)) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x).mean(dim=1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch_size", type=int, default=64)
    ap.add_argument("--dim", type=int, default=512)
    ap.add_argument("--depth", type=int, default=8)
    ap.add_argument("--experts", type=int, default=16)
    ap.add_argument("--slots", type=int, default=12)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--mixup", type=float, default=0.2)
    args = ap.parse_args()

    torch.manual_seed(42)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = SoftMoEViT(dim=args.dim, depth=args.depth, experts=args.experts, slots=args.slots).to(device)
    expert_params = sum(p.numel() for n, p in model.named_parameters() if ".w1" in n or ".w2" in n)
    print(f"params {sum(p.numel() for p in model.parameters()):,} of which experts {expert_params:,}")
    opt = Lion(model.parameters(), lr=args.lr, weight_decay=1.0)
    beta = torch.distributions.Beta(args.mixup, args.mixup)

    for step in range(args.steps):
        images = torch.randn(args.batch_size, 3, 224, 224).to(device)
        labels = torch.randint(0, 1000, (args.batch_size,)).to(device)
        lam = beta.sample().item()
        perm = torch.randperm(args.batch_size, device=device)
        images = lam * images + (1 - lam) * images[perm]
        logits = model(images)
        loss = lam * F.cross_entropy(logits, labels) + (1 - lam) * F.cross_entropy(logits, labels[perm])
        loss.backward()
        opt.step()
        opt.zero_grad()
        acc = (logits.argmax(-1) == labels).float().mean()
        print(f"step {step}: loss {loss.item():.4f} acc {acc.item():.3f}")

    model.eval()
    correct = total = 0
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(args.batch_size * 2, 3, 224, 224, device=device)
            y = torch.randint(0, 1000, (args.batch_size * 2,), device=device)
            correct += (model(x).argmax(-1) == y).sum().item()
            total += y.numel()
    print(f"val acc {correct / total:.4f}")


if __name__ == "__main__":
    main()
