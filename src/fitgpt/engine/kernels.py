"""The softmax and its gradient in one Triton kernel: logits are read twice and written once, whatever their width.

Triton comes with every CUDA build of torch. One program handles one row; the second reading mostly comes from the
card's cache, since a row is about 100 KB and few are in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .loss import IGNORED

_COLUMNS = 8192  # read at once by a program: with 16 warps, 16 numbers a thread
_WARPS = 16


def fused_cross_entropy_(logits: Tensor, targets: Tensor, a_token: Tensor | None) -> Tensor:
    """As `loss.plain_cross_entropy_`, without a temporary."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _cross_entropy[(rows,)](logits, logits.stride(0), targets, targets.stride(0), losses,
                            losses if a_token is None else a_token, width, IGNORED, a_token is not None, columns,
                            num_warps=_WARPS if columns == _COLUMNS else 4)
    return losses


@triton.jit
def _cross_entropy(logits, logits_stride, targets, targets_stride, losses, a_token, width, ignored: tl.constexpr,
                   with_gradient: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row * targets_stride)
    start = logits + row * logits_stride
    offsets = tl.arange(0, columns)

    highest = tl.full([columns], float("-inf"), tl.float32)
    total = tl.zeros([columns], tl.float32)
    for first in range(0, width, columns):  # each lane keeps its own running maximum and sum
        inside = first + offsets < width
        value = tl.load(start + first + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, value)
        shrink = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - higher))
        total = total * shrink + tl.where(inside, tl.exp(value - higher), 0.0)
        highest = higher
    top = tl.max(highest, 0)
    exp_sum = tl.sum(tl.where(highest == float("-inf"), 0.0, total * tl.exp(highest - top)), 0)
    chosen = tl.load(start + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(target == ignored, 0.0, tl.log(exp_sum) + top - chosen))

    if with_gradient:
        tl.debug_barrier()  # the row's target logit has been read by all before anything is overwritten
        weight = tl.where(target == ignored, 0.0, tl.load(a_token))
        for first in range(0, width, columns):
            column = first + offsets
            inside = column < width
            value = tl.load(start + column, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = weight * (tl.exp(value - top) / exp_sum - tl.where(column == target, 1.0, 0.0))
            tl.store(start + column, gradient, mask=inside)
