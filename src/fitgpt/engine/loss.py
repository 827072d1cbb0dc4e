"""Cross-entropy of a language-model head, in pieces: the full logits tensor never exists.

A piece's logits are computed, turned in place into their own gradient, multiplied into the gradients of the
hidden states and of the head, and overwritten by the next piece. So the backward pass has nothing left to do,
and the memory of the loss is one piece instead of 12 bytes a logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -1  # a target that counts for nothing: nanoGPT's ignore_index


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | float, piece: int) -> Tensor:
    """scale × the mean cross-entropy of hidden @ weight.T over the targets that are not IGNORED.

    `scale` (the float16 loss scale, and 1 / accumulation) is applied here, before the logits' gradients are
    rounded to half precision: at 1/N alone they would underflow float16.
    """
    return _HeadLoss.apply(hidden, weight, targets, torch.as_tensor(scale, device=hidden.device), piece)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, piece: int) -> Tensor:
    """Cross-entropy of each token, in float32, with no gradient: what evaluation needs. Shape [N]."""
    head = weight.to(hidden.dtype)
    pieces = [slice(start, start + piece) for start in range(0, len(hidden), piece)]
    return torch.cat([_softmax_(_wide(hidden[rows] @ head.t()), targets[rows])[0] for rows in pieces])


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, piece: int) -> Tensor:
        head = weight.to(hidden.dtype)
        counted = (targets != IGNORED).sum().clamp_(min=1)
        with_gradient = any(ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden) if with_gradient else None
        d_weight = torch.zeros_like(weight) if with_gradient else None
        wide = _wide_dtype(hidden.dtype)
        a_token = scale.to(wide) / counted  # what one token's loss weighs in the result
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), piece):
            rows = slice(start, start + piece)
            logits = hidden[rows] @ head.t()
            probabilities = _wide(logits)
            losses, exp_sums = _softmax_(probabilities, targets[rows])
            total += losses.sum()
            if d_hidden is not None and d_weight is not None:
                _gradient_(logits, probabilities, exp_sums, targets[rows], a_token)
                torch.mm(logits, head, out=d_hidden[rows])
                d_weight += logits.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight)
        return total * a_token

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden.mul_(grads[0]), d_weight.mul_(grads[0]), None, None, None


def _softmax_(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Turns wide logits in place into exp(logit − max); returns each row's loss and the sum of its exponentials."""
    logits -= logits.amax(dim=-1, keepdim=True)
    target_logits = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    exp_sums = logits.exp_().sum(dim=-1)
    return torch.where(targets == IGNORED, 0.0, exp_sums.log() - target_logits), exp_sums


def _gradient_(logits: Tensor, exponentials: Tensor, exp_sums: Tensor, targets: Tensor, a_token: Tensor) -> None:
    """Overwrites a piece's logits by the gradient of the loss with respect to them: weight × (softmax − one-hot)."""
    weight = torch.where(targets == IGNORED, 0.0, a_token).unsqueeze(-1)
    exponentials *= weight / exp_sums.unsqueeze(-1)
    exponentials.scatter_add_(-1, targets.clamp(min=0).unsqueeze(-1), -weight)
    if logits.data_ptr() != exponentials.data_ptr():
        logits.copy_(exponentials)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _wide(logits: Tensor) -> Tensor:
    """The logits in at least float32: the same tensor where they already are, else one copy of the piece."""
    return logits.to(_wide_dtype(logits.dtype))
