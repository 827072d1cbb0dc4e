"""Cross-entropy of the head, in chunks: the full logits tensor never exists.

A chunk's logits are computed, turned in place into their own gradient, multiplied into the gradients of the head and
of the hidden states, and overwritten by the next chunk. So the loss needs one chunk of logits, instead of 12 bytes per
logit, and the backward pass has nothing left to do there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config.architectures import IGNORE_INDEX
from .annotate import named
from .device import triton_works
from .gradient_sinks import Gradients


@torch.no_grad()
def loss_and_gradient_(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, chunk: int,
                       gradients: Gradients, cached: Tensor | None = None) -> Tensor:
    """scale × the mean cross-entropy of hidden @ weight.T over the targets that are not IGNORE_INDEX.

    `hidden` [N, C] becomes its gradient, in place; the head's gradient goes to `gradients`. The scale (float16's loss
    scale and 1 / accumulation) is applied before the logits' gradients are rounded: at 1/N alone they would underflow
    float16. `cached` is the weight in the hidden states' precision, if casts are cached.
    """
    head = weight.to(hidden.dtype) if cached is None else cached
    wide = _wide_dtype(hidden.dtype)
    per_token = scale.to(wide) / (targets != IGNORE_INDEX).sum().clamp_(min=1)
    buffer = named("logits", torch.empty(min(chunk, len(hidden)), len(head), dtype=hidden.dtype, device=hidden.device))
    total = torch.zeros((), dtype=wide, device=hidden.device)
    for rows in _chunks(len(hidden), chunk):
        logits = torch.mm(hidden[rows], head.t(), out=buffer[:rows.stop - rows.start])
        total += cross_entropy_(logits, targets[rows], per_token).sum()
        gradients.matmul(weight, logits, hidden[rows])
        torch.mm(logits, head, out=hidden[rows])
    return total * per_token


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Cross-entropy of each token, in float32, with no gradient: what evaluation needs. Shape [N]."""
    head = weight.to(hidden.dtype)
    buffer = named("logits", torch.empty(min(chunk, len(hidden)), len(head), dtype=hidden.dtype, device=hidden.device))
    losses = torch.empty(len(hidden), dtype=_wide_dtype(hidden.dtype), device=hidden.device)
    for rows in _chunks(len(hidden), chunk):
        logits = torch.mm(hidden[rows], head.t(), out=buffer[:rows.stop - rows.start])
        losses[rows] = cross_entropy_(logits, targets[rows], None)
    return losses


def cross_entropy_(logits: Tensor, targets: Tensor, per_token: Tensor | None) -> Tensor:
    """Each row's loss. With `per_token`, the logits become the gradient of per_token × the losses' sum, in place."""
    if logits.device.type == "cuda" and triton_works():
        from .kernels import fused_cross_entropy_

        return fused_cross_entropy_(logits, targets, per_token)
    return plain_cross_entropy_(logits, targets, per_token)


def plain_cross_entropy_(logits: Tensor, targets: Tensor, per_token: Tensor | None) -> Tensor:
    """The same in plain torch, for devices without Triton; half-precision logits need a float32 copy of the chunk."""
    wide = logits.to(_wide_dtype(logits.dtype))  # the same tensor where it is wide already
    counted, chosen = targets != IGNORE_INDEX, targets.clamp(min=0).unsqueeze(-1)
    wide -= wide.amax(dim=-1, keepdim=True)
    target_logits = wide.gather(-1, chosen).squeeze(-1)
    exp_sums = wide.exp_().sum(dim=-1)
    if per_token is not None:
        weight = torch.where(counted, per_token, 0.0).unsqueeze(-1)
        wide *= weight / exp_sums.unsqueeze(-1)
        wide.scatter_add_(-1, chosen, -weight)
        if wide is not logits:
            logits.copy_(wide)
    return torch.where(counted, exp_sums.log() - target_logits, 0.0)


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
