"""Generates text token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import GPT


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is drawn."""

    temperature: float = 0.8   # 0: greedy
    top_k: int = 200           # 0: all
    top_p: float = 1.0         # 1: all


@torch.no_grad()
def generate(model: GPT, prompt: list[int], max_new_tokens: int, options: SamplingOptions, seed: int,
             vocab_size: int | None = None) -> Iterator[int]:
    """Yields token ids after `prompt`, below `vocab_size` (a model's own may be padded).

    When the block is full, the cache is filled again from the newer half of the window.
    """
    model.eval()
    device, block = model.lm_head.weight.device, model.config.block_size
    generator = torch.Generator(device=device).manual_seed(seed)
    seen, cache, length = list(prompt), model.new_cache(batch=1), 0  # `length`: positions in the cache
    for _ in range(max_new_tokens):
        if length in (0, block):
            window = seen[-block:] if length == 0 else seen[-((block + 1) // 2):]
            logits, length = model.next_logits(torch.tensor([window], device=device), cache), len(window)
        else:
            newest = torch.tensor([[seen[-1]]], device=device)
            logits = model.logits_after(newest, torch.tensor([length], device=device), cache)
            length += 1
        seen.append(draw(logits[0, :vocab_size], options, generator))
        yield seen[-1]


def draw(logits: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    """Draws one token from logits [V]: temperature, top-k, then top-p."""
    if options.temperature == 0:
        return int(logits.argmax())
    kept = min(options.top_k or len(logits), len(logits))
    values, tokens = (logits / options.temperature).topk(kept)
    probabilities = values.softmax(-1)
    if options.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= options.top_p, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
