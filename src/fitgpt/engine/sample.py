"""Text from a model, one token at a time, with the keys and values of earlier tokens kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import GPT


@dataclass(frozen=True)
class Taste:
    """How the next token is drawn."""

    temperature: float = 0.8   # 0: always the likeliest
    top_k: int = 200           # 0: all
    top_p: float = 1.0         # 1: all


@torch.no_grad()
def generate(model: GPT, prompt: list[int], max_new_tokens: int, taste: Taste, seed: int) -> Iterator[int]:
    """Yields token ids after `prompt`. Past the block size, the window starts again from its newer half."""
    model.eval()
    device, block = model.lm_head.weight.device, model.config.block_size
    dice = torch.Generator(device=device).manual_seed(seed)
    seen = list(prompt)
    unread, cache = seen[-block:], model.new_cache(batch=1)
    for _ in range(max_new_tokens):
        if cache[0].length + len(unread) > block:
            unread, cache = seen[-(block + 1) // 2:], model.new_cache(batch=1)
        logits = model.next_logits(torch.tensor([unread], device=device), cache)[0]
        token = draw(logits, taste, dice)
        seen.append(token)
        unread = [token]
        yield token


def draw(logits: Tensor, taste: Taste, dice: torch.Generator) -> int:
    """One token from logits [V]: the top k, of these the smallest set of probability p, at a temperature."""
    if taste.temperature == 0:
        return int(logits.argmax())
    kept = min(taste.top_k or len(logits), len(logits))
    values, tokens = (logits / taste.temperature).topk(kept)
    probabilities = values.softmax(-1)
    if taste.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= taste.top_p, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=dice)])
