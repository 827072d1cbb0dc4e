"""GPT speedrun in the style of modded-nanogpt: Muon, QK norm, relu^2, value embeddings, multi-token prediction."""
import os
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Hyperparameters:
    vocab_size: int = int(os.environ.get("VOCAB", 32768))
    num_layers: int = int(os.environ.get("LAYERS", 10))
    model_dim: int = int(os.environ.get("DIM", 768))
    head_dim: int = 128
    seq_len: int = int(os.environ.get("SEQ", 2048))
    batch: int = 2
    mtp_heads: int = 3
    mtp_weights: tuple = (1.0, 0.5, 0.25)
    iterations: int = 5
    cooldown_frac: float = 0.4


args = Hyperparameters()


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def zeropower_via_newtonschulz5(G, steps=5):
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(-2) > G.size(-1):
        X = X.mT
    return X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.01, ns_steps=5):
        params = list(params)
        shapes = {p.shape for p in params}
        groups = [dict(params=[p for p in params if p.shape == s]) for s in sorted(shapes)]
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, ns_steps=ns_steps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = []
            for p in params:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buf = state["momentum_buffer"]
                buf.lerp_(p.grad, 1 - group["momentum"])
                grads.append(p.grad.lerp_(buf, group["momentum"]))
            # one batched Newton-Schulz for all the matrices of this shape
            updates = zeropower_via_newtonschulz5(torch.stack(grads), group["ns_steps"])
            scale = max(1, params[0].size(-2) / params[0].size(-1)) ** 0.5
            for p, u in zip(params, updates.unbind(0)):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(u.to(p.dtype), alpha=-group["lr"] * scale)


class CastedLinear(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self):
        bound = (3 ** 0.5) * 0.5 * self.in_features ** -0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    def __init__(self, dim, max_seq_len):
        super().__init__()
        angular_freq = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4, dtype=torch.float32)
        angular_freq = torch.cat([angular_freq, angular_freq.new_zeros(dim // 4)])
        theta = torch.einsum("i,j->ij", torch.arange(max_seq_len, dtype=torch.float32), angular_freq)
        self.cos = nn.Buffer(theta.cos(), persistent=False)
        self.sin = nn.Buffer(theta.sin(), persistent=False)

    def forward(self, x):
        cos, sin = self.cos[None, :x.size(1), None, :], self.sin[None, :x.size(1), None, :]
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x1 * -sin + x2 * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, head_dim, max_seq_len):
        super().__init__()
        self.num_heads, self.head_dim = dim // head_dim, head_dim
        self.qkv_w = nn.Parameter(torch.empty(3, dim, dim).uniform_(-(3 ** 0.5) * 0.5 * dim ** -0.5,
                                                                    (3 ** 0.5) * 0.5 * dim ** -0.5))
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.rotary = Rotary(head_dim, max_seq_len)
        self.c_proj = CastedLinear(dim, dim)
        self.c_proj.weight.detach().zero_()

    def forward(self, x, ve):
        B, T = x.shape[:2]
        q, k, v = F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x)).view(
            B, T, 3 * self.num_heads, self.head_dim).chunk(3, dim=-2)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        lambdas = self.lambdas.type_as(v)
        if ve is not None:
            v = lambdas[0] * v + lambdas[1] * ve.view_as(v)
        else:
            v = lambdas[0] * v
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           is_causal=True, scale=0.12)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.c_fc = CastedLinear(dim, 4 * dim)
        self.c_proj = CastedLinear(4 * dim, dim)
        self.c_proj.weight.detach().zero_()

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, dim, head_dim, max_seq_len):
        super().__init__()
        self.attn, self.mlp = Attention(dim, head_dim, max_seq_len), MLP(dim)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, ve, x0):
        lam = self.lambdas.type_as(x)
        x = lam[0] * x + lam[1] * x0
        x = x + self.attn(norm(x), ve)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embed = nn.Embedding(a.vocab_size, a.model_dim)
        self.value_embeds = nn.ModuleList(nn.Embedding(a.vocab_size, a.model_dim) for _ in range(3))
        self.blocks = nn.ModuleList(Block(a.model_dim, a.head_dim, a.seq_len) for _ in range(a.num_layers))
        self.skip_weights = nn.Parameter(torch.ones(a.num_layers // 2))
        self.mtp_proj = nn.ModuleList(CastedLinear(a.model_dim, a.model_dim) for _ in range(a.mtp_heads - 1))
        self.lm_head = CastedLinear(a.model_dim, a.vocab_size)
        self.lm_head.weight.detach().zero_()

    def forward(self, tokens, targets):
        ve = [emb(tokens) for emb in self.value_embeds]
        n = len(self.blocks)
        ve = ve + [None] * (n - 6) + ve
        x = x0 = norm(self.embed(tokens))
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= n - n // 2:
                x = x + self.skip_weights[i - (n - n // 2)].type_as(x) * skips.pop()
            x = block(x, ve[i], x0)
            if i < n // 2:
                skips.append(x)
        x = norm(x)
        losses = []
        for k in range(args.mtp_heads):
            h = x if k == 0 else norm(x + self.mtp_proj[k - 1](x))
            h, y = (h, targets) if k == 0 else (h[:, :-k], targets[:, k:])
            logits = self.lm_head(h).float()
            logits = 30 * torch.sigmoid(logits / 7.5)
            losses.append(F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1)))
        if not self.training:
            return losses[0]
        return sum(w * l for w, l in zip(args.mtp_weights, losses)), losses[0].detach()


def get_lr(step):
    x = step / args.iterations
    return 1.0 if x < 1 - args.cooldown_frac else max(0.1, (1 - x) / args.cooldown_frac)


torch.manual_seed(0)
model = GPT(args).cuda()
for m in model.modules():
    if isinstance(m, nn.Embedding):
        m.bfloat16()
hidden = [p for p in model.blocks.parameters() if p.ndim >= 2] + list(model.mtp_proj.parameters())
embeds = [*model.embed.parameters(), *model.value_embeds.parameters()]
scalars = [p for p in model.parameters() if p.ndim < 2]
adam = torch.optim.AdamW([dict(params=[model.lm_head.weight], lr=0.0037), dict(params=embeds, lr=0.05),
                          dict(params=scalars, lr=0.015)], betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
muon = Muon(hidden, lr=0.025, momentum=0.95)
optimizers = [adam, muon]
for opt in optimizers:
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, "
      f"{sum(p.numel() for p in hidden) / 1e6:.1f}M with Muon")

t0 = time.perf_counter()
for step in range(args.iterations + 1):
    if step == args.iterations or step == 3:
        model.eval()
        with torch.no_grad():
            seqs = torch.randint(args.vocab_size, (2 * args.batch, args.seq_len + 1)).to("cuda", torch.int32)
            val = sum(model(s[None, :-1], s[None, 1:].long()) for s in seqs) / len(seqs)
        print(f"step {step}/{args.iterations} val_loss:{val.item():.4f}")
        model.train()
        if step == args.iterations:
            break
    seq = torch.randint(args.vocab_size, (args.batch, args.seq_len + 1)).to("cuda", torch.int32, non_blocking=True)
    loss, first = model(seq[:, :-1], seq[:, 1:].long())
    loss.backward()
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * get_lr(step)
    for group in muon.param_groups:
        group["momentum"] = (1 - min(step / 300, 1)) * 0.85 + min(step / 300, 1) * 0.95
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(f"step {step + 1}/{args.iterations} train_loss:{first.item():.4f} {(time.perf_counter() - t0) * 1e3:.0f}ms")
print(f"peak memory allocated: {torch.cuda.max_memory_allocated() // 1024 // 1024} MiB "
      f"reserved: {torch.cuda.max_memory_reserved() // 1024 // 1024} MiB")
