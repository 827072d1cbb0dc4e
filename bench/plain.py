"""The baseline: a GPT trained the way nanoGPT does it. Autograd, autocast, the whole model compiled, the full logits
computed at once, returned beside the loss and kept by the caller."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fitgpt.config.architectures import GPTConfig


class PlainBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.heads = config.n_embd, config.n_head
        self.norm_1 = nn.LayerNorm(width, bias=config.bias)
        self.qkv = nn.Linear(width, 3 * width, bias=config.bias)
        self.proj = nn.Linear(width, width, bias=config.bias)
        self.norm_2 = nn.LayerNorm(width, bias=config.bias)
        self.up = nn.Linear(width, 4 * width, bias=config.bias)
        self.down = nn.Linear(4 * width, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for part in self.qkv(self.norm_1(x)).split(C, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tokens.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class PlainTrainer:
    """One step is `accumulation` micro-steps, unscaling, clipping and a fused AdamW: as nanoGPT's loop has them."""

    def __init__(self, config: GPTConfig, dtype: str, *, compiled: bool, accumulation: int) -> None:
        self.dtype, self.accumulation = getattr(torch, dtype), accumulation
        self.raw = PlainGPT(config).cuda()
        self.model = torch.compile(self.raw) if compiled else self.raw
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
        self.logits: Tensor | None = None

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=self.dtype):
            self.logits, loss = self.model(idx, targets)
        return loss

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        for idx, targets in batches:
            self.scaler.scale(self.loss(idx, targets) / self.accumulation).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.raw.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, idx: Tensor, targets: Tensor) -> float:
        self.raw.eval()
        loss = self.loss(idx, targets).item()
        self.raw.train()
        return loss


class TransformersTrainer(PlainTrainer):
    """transformers' GPT-2, through the same loop."""

    def __init__(self, config: GPTConfig, dtype: str, *, compiled: bool, accumulation: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        self.dtype, self.accumulation = getattr(torch, dtype), accumulation
        self.raw = GPT2LMHeadModel(GPT2Config(  # type: ignore[assignment]
            vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)).cuda()
        self.model = torch.compile(self.raw) if compiled else self.raw
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=self.dtype):
            logits = self.model(idx).logits
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
