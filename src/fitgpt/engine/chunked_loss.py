"""Cross-entropy of the head, in pieces: the full logits tensor never exists.

A piece's logits are computed, turned in place into their own gradient, multiplied into the gradients of the head and
of the hidden states, and overwritten by the next piece. So the memory of the loss is one piece of logits, instead of
the 12 bytes a logit of the plain way, and the backward pass has nothing left to do there.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .constants import IGNORED
from .device import TRITON_FROM, read_tools
from .gradient_sinks import Gradients


@torch.no_grad()
def loss_and_gradient_(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, piece: int,
                       gradients: Gradients, copy: Tensor | None = None) -> Tensor:
    """scale × the mean cross-entropy of hidden @ weight.T over the targets that are not IGNORED.

    `hidden` [N, C] becomes, in place, the gradient of that; the head's goes to `gradients`. The scale (float16's loss
    scale, and 1 / accumulation) is applied before the logits' gradients are rounded: at 1/N alone they would
    underflow float16. `copy` is the weight in the hidden states' precision, where one is kept.
    """
    head = weight.to(hidden.dtype) if copy is None else copy
    wide = _wide_dtype(hidden.dtype)
    a_token = scale.to(wide) / (targets != IGNORED).sum().clamp_(min=1)  # what one token's loss weighs in the result
    buffer = torch.empty(min(piece, len(hidden)), len(head), dtype=hidden.dtype, device=hidden.device)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    for rows in _pieces(len(hidden), piece):
        logits = torch.mm(hidden[rows], head.t(), out=buffer[:rows.stop - rows.start])
        total += cross_entropy_(logits, targets[rows], a_token).sum()
        gradients.product(weight, logits, hidden[rows])
        torch.mm(logits, head, out=hidden[rows])
    return total * a_token


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, piece: int) -> Tensor:
    """Cross-entropy of each token, in float32, with no gradient: what evaluation needs. Shape [N]."""
    head = weight.to(hidden.dtype)
    buffer = torch.empty(min(piece, len(hidden)), len(head), dtype=hidden.dtype, device=hidden.device)
    losses = torch.empty(len(hidden), dtype=_wide_dtype(hidden.dtype), device=hidden.device)
    for rows in _pieces(len(hidden), piece):
        logits = torch.mm(hidden[rows], head.t(), out=buffer[:rows.stop - rows.start])
        losses[rows] = cross_entropy_(logits, targets[rows], None)
    return losses


def cross_entropy_(logits: Tensor, targets: Tensor, a_token: Tensor | None) -> Tensor:
    """Each row's loss. With `a_token`, the logits become the gradient of a_token × the losses' sum, in place."""
    if logits.device.type == "cuda" and triton_works():
        from .kernels import fused_cross_entropy_

        return fused_cross_entropy_(logits, targets, a_token)
    return plain_cross_entropy_(logits, targets, a_token)


@lru_cache(maxsize=1)
def triton_works() -> bool:
    """Triton builds a small C library when it first runs: without a compiler the plain path must do."""
    tools = read_tools()
    return (tools.triton and tools.c_compiler and tools.python_headers
            and torch.cuda.get_device_capability() >= TRITON_FROM)


def plain_cross_entropy_(logits: Tensor, targets: Tensor, a_token: Tensor | None) -> Tensor:
    """The same in plain torch, for devices without Triton; half-precision logits cost a float32 copy of the piece."""
    wide = logits.to(_wide_dtype(logits.dtype))  # the same tensor where it is wide already
    counted, chosen = targets != IGNORED, targets.clamp(min=0).unsqueeze(-1)
    wide -= wide.amax(dim=-1, keepdim=True)
    target_logits = wide.gather(-1, chosen).squeeze(-1)
    exp_sums = wide.exp_().sum(dim=-1)
    if a_token is not None:
        weight = torch.where(counted, a_token, 0.0).unsqueeze(-1)
        wide *= weight / exp_sums.unsqueeze(-1)
        wide.scatter_add_(-1, chosen, -weight)
        if wide is not logits:
            logits.copy_(wide)
    return torch.where(counted, exp_sums.log() - target_logits, 0.0)


def _pieces(tokens: int, piece: int) -> list[slice]:
    return [slice(start, min(start + piece, tokens)) for start in range(0, tokens, piece)]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
