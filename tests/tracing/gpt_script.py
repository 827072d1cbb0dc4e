"""A training loop that allocates as nanoGPT's train.py does, line by line where memory depends on it: the model's
operations, what stays alive in variables, and when batches arrive."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fitgpt.config.run_config import RunConfig


class Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class SelfAttention(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        heads = self.config.n_head
        q, k, v = self.c_attn(x).split(width, dim=2)
        k = k.view(batch, tokens, heads, width // heads).transpose(1, 2)
        q = q.view(batch, tokens, heads, width // heads).transpose(1, 2)
        v = v.view(batch, tokens, heads, width // heads).transpose(1, 2)
        p = self.config.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, tokens, width)
        y = self.resid_dropout(self.c_proj(y))
        return y


class FeedForward(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(config.n_embd, config.bias), SelfAttention(config)
        self.ln_2, self.mlp = Norm(config.n_embd, config.bias), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class SmallGPT(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.ln_f = Norm(config.n_embd, config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        device = tokens.device
        pos = torch.arange(0, tokens.size(1), dtype=torch.long, device=device)
        tok_emb = self.wte(tokens)
        pos_emb = self.wpe(pos)
        x = self.drop(tok_emb + pos_emb)
        for layer in self.h:
            x = layer(x)
        x = self.ln_f(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def train(config: RunConfig, iterations: int, eval_iters: int) -> None:
    """Evaluation, iterations, evaluation: what tapes/nanogpt.py writes."""
    shape = config.batch_size, config.block_size

    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        for _ in range(2 * eval_iters):
            X, Y = get_batch()
            with context():
                logits, loss = model(X, Y)  # noqa: RUF059 (alive, as in train.py)
            loss.item()
        model.train()

    def context() -> Any:
        if config.dtype == "float32":
            return nullcontext()
        return torch.amp.autocast(device_type="cuda", dtype=getattr(torch, config.dtype))

    model = SmallGPT(config)
    model.to("cuda")
    scaler = torch.amp.GradScaler("cuda", enabled=config.dtype == "float16")
    parameters = [each for each in model.parameters()]
    optimizer = torch.optim.AdamW([{"params": [each for each in parameters if each.dim() >= 2]},
                                   {"params": [each for each in parameters if each.dim() < 2]}], fused=True)
    X, Y = get_batch()
    evaluate()
    for _ in range(iterations):
        for _ in range(config.gradient_accumulation_steps):
            with context():
                logits, loss = model(X, Y)  # noqa: RUF059
                loss = loss / config.gradient_accumulation_steps
            X, Y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    evaluate()
