"""Triton kernels, where torch.compile needs several passes. Triton comes with every CUDA build of torch.

Softmax and its gradient: logits are read twice and written once, whatever their width. One program handles one row; the
second read mostly hits the L2 cache, since a row is about 100 KB and few are in flight. Low-precision AdamW and the
backward of a norm: each element is read once and written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config.architectures import IGNORE_INDEX, NORM_EPSILON
from ..config.optimizers import ADAMW_EPSILON, GROUP
from .annotate import named

_COLUMNS, _WARPS = 8192, 8  # of a row, read at once by a program; the fastest of seven timed on an H200
_GROUPS = 8                  # of elements that share a scale, per program: 8 elements per thread
_PROGRAMS_PER_SM = 8             # of the norm's backward: as many as fit, each with its own sums
_WIDEST_NORM = 8192          # a program holds whole rows


def fused_cross_entropy_(logits: Tensor, targets: Tensor, per_token: Tensor | None) -> Tensor:
    """As `ops.plain_cross_entropy_`, without a temporary."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _cross_entropy[(rows,)](logits, logits.stride(0), targets, targets.stride(0), losses,
                            losses if per_token is None else per_token, width, IGNORE_INDEX, per_token is not None,
                            columns, num_warps=_WARPS if columns == _COLUMNS else 4)
    return losses


@triton.jit
def _cross_entropy(logits, logits_stride, targets, targets_stride, losses, per_token, width, ignored: tl.constexpr,
                   with_gradient: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row * targets_stride)
    start = logits + row * logits_stride
    offsets = tl.arange(0, columns)
    log2_e, log_2 = 1.4426950408889634, 0.6931471805599453

    top = float("-inf")  # the largest so far, times log2(e): the GPU's exponential instruction has base 2
    total = tl.zeros([columns], tl.float32)
    for first in range(0, width, columns):
        inside = first + offsets < width
        value = tl.load(start + first + offsets, mask=inside, other=float("-inf")).to(tl.float32) * log2_e
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp2(top - higher) + tl.exp2(value - higher)
        top = higher
    exp_sum = tl.sum(total, 0)
    chosen = tl.load(start + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(target == ignored, 0.0, tl.log(exp_sum) + top * log_2 - chosen))

    if with_gradient:
        tl.debug_barrier()  # the row's target logit has been read by all before anything is overwritten
        weight = tl.where(target == ignored, 0.0, tl.load(per_token))
        share = weight / exp_sum
        for first in range(0, width, columns):
            column = first + offsets
            inside = column < width
            value = tl.load(start + column, mask=inside, other=float("-inf")).to(tl.float32) * log2_e
            gradient = share * tl.exp2(value - top) - tl.where(column == target, weight, 0.0)
            tl.store(start + column, gradient, mask=inside)


def low_precision_adamw_(parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], figures: Tensor,
                         rng_seed: Tensor, number: int, decay: float, beta1: float, beta2: float) -> None:
    """As `low_precision.update_` of a whole flat parameter: everything is read once and written once.

    `rng_seed` (int64, on the device) and the parameter's `number` seed its stochastic rounding.
    """
    eight_bit, count = "first" in state, parameter.numel()
    first, second = (state["first"], state["second"]) if eight_bit else (state["exp_avg"], state["exp_avg_sq"])
    scales = (state["first_scale"], state["second_scale"]) if eight_bit else (figures, figures)
    _low_precision_adamw[(triton.cdiv(count, _GROUPS * GROUP),)](
        parameter, gradient, first, second, *scales, figures, rng_seed, number, count, decay, beta1, beta2,
        ADAMW_EPSILON, eight_bit, parameter.dtype == torch.bfloat16, GROUP, _GROUPS, num_warps=8)


@triton.jit(do_not_specialize=["number", "decay"])
def _low_precision_adamw(parameter, gradient, firsts, seconds, first_scales, second_scales, figures, rng_seed, number,
                         count, decay, beta1, beta2, epsilon, eight_bit: tl.constexpr, stochastic: tl.constexpr,
                         group: tl.constexpr, groups: tl.constexpr):
    learning_rate, correct1, correct2 = tl.load(figures), tl.load(figures + 1), tl.load(figures + 2)
    unscale, skip = tl.load(figures + 3), tl.load(figures + 4)
    if skip > 0:
        return
    row = tl.program_id(0) * groups + tl.arange(0, groups)
    at = row[:, None] * group + tl.arange(0, group)[None, :]
    inside, row_inside = at < count, row * group < count
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * unscale
    first, second = tl.load(firsts + at, mask=inside, other=0), tl.load(seconds + at, mask=inside, other=0)
    if eight_bit:
        first_scale = tl.load(first_scales + row, mask=row_inside, other=0.0)
        second_scale = tl.load(second_scales + row, mask=row_inside, other=0.0)
        share = first.to(tl.float32) / 127
        first = share * tl.abs(share) * first_scale[:, None]
        share = second.to(tl.float32) / 255
        second = share * share * share * share * second_scale[:, None]
    first = beta1 * first + (1 - beta1) * g
    second = beta2 * second + (1 - beta2) * g * g
    weights = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
    step = first * correct1 / (tl.sqrt(second * correct2) + epsilon)
    stepped = weights - learning_rate * (step + decay * weights)
    if stochastic:
        noise, _, _, _ = tl.philox(tl.load(rng_seed), at, at * 0 + number, at * 0, at * 0)
        bits = stepped.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
        stepped = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(parameter + at, stepped.to(parameter.dtype.element_ty), mask=inside)
    if eight_bit:
        first_scale = tl.max(tl.abs(first), 1)
        share = first / tl.maximum(first_scale, 1e-30)[:, None]
        root = tl.sqrt(tl.abs(share)) * 127
        # half away from zero; torch rounds half to even, but a root is hardly ever exactly a half
        first = tl.where(share < 0, -tl.floor(root + 0.5), tl.floor(root + 0.5))
        tl.store(first_scales + row, first_scale, mask=row_inside)
        second_scale = tl.max(second, 1)
        share = second / tl.maximum(second_scale, 1e-30)[:, None]
        second = tl.where(share > 0, tl.maximum(tl.floor(tl.sqrt(tl.sqrt(share)) * 255 + 0.5), 1.0), 0.0)
        tl.store(second_scales + row, second_scale, mask=row_inside)
    tl.store(firsts + at, first.to(firsts.dtype.element_ty), mask=inside)
    tl.store(seconds + at, second.to(seconds.dtype.element_ty), mask=inside)


def norm_backward_(d_x: Tensor, d_norm: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None,
                   dtype: torch.dtype, again: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """As `ops.norm_backward_`, in one pass over the rows."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    per_turn = max(1, (2048 if x.dtype == torch.float32 else 1024) // block)
    programs = min(triton.cdiv(rows, per_turn), _PROGRAMS_PER_SM * _multiprocessors(x.device))
    vectors = 1 if bias is None else 2
    sums = named("norm sums", torch.empty(vectors, programs, width, dtype=torch.float32, device=x.device))
    rounded = d_x if d_x.dtype == dtype else torch.empty_like(d_x, dtype=dtype)
    normed = torch.empty_like(x, dtype=dtype) if again else None
    _norm_backward[(programs,)](
        d_x, d_norm, x, x if added is None else added, weight, weight if bias is None else bias, rounded,
        rounded if normed is None else normed, sums, rows, width, added is not None, bias is not None,
        rounded is not d_x, again, NORM_EPSILON, block, per_turn, num_warps=max(4, block // 512))
    totals = named("norm gradients", torch.empty(vectors, width, dtype=torch.float32, device=x.device))
    _sum_programs[(vectors, triton.cdiv(width, 32))](sums, totals, programs, width, 128, 32)
    return rounded, normed, totals[0], None if bias is None else totals[1]


def norm_fits(x: Tensor, weight: Tensor) -> bool:
    return x.dtype != torch.float64 and weight.dtype == torch.float32 and len(weight) <= _WIDEST_NORM


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _norm_backward(d_x, d_norm, x, added, weight, bias, rounded, normed, sums, rows, width, has_added: tl.constexpr,
                   has_bias: tl.constexpr, rounds: tl.constexpr, again: tl.constexpr, epsilon: tl.constexpr,
                   block: tl.constexpr, per_turn: tl.constexpr):
    column = tl.arange(0, block)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0)
    d_weight = tl.zeros([block], tl.float32)
    d_bias = tl.zeros([block], tl.float32)
    for first in range(tl.program_id(0) * per_turn, rows, tl.num_programs(0) * per_turn):
        row = first + tl.arange(0, per_turn)
        at = row[:, None].to(tl.int64) * width + column[None, :]
        here = (row < rows)[:, None] & inside[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        if has_added:
            value += tl.load(added + at, mask=here, other=0.0).to(tl.float32)
        gradient = tl.load(d_norm + at, mask=here, other=0.0).to(tl.float32)
        before = tl.load(d_x + at, mask=here, other=0.0).to(tl.float32)
        centred = tl.where(here, value - (tl.sum(value, 1) / width)[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / width + epsilon)[:, None]
        standard = centred * rstd
        d_weight += tl.sum(gradient * standard, 0)
        if has_bias:
            d_bias += tl.sum(gradient, 0)
        d_standard = gradient * w[None, :]
        along = (tl.sum(d_standard * standard, 1) / width)[:, None]
        level = (tl.sum(d_standard, 1) / width)[:, None]
        after = (before + (d_standard - standard * along - level) * rstd).to(d_x.dtype.element_ty)
        tl.store(d_x + at, after, mask=here)
        if rounds:
            tl.store(rounded + at, after.to(rounded.dtype.element_ty), mask=here)
        if again:
            output = standard * w[None, :]
            if has_bias:
                output += tl.load(bias + column, mask=inside, other=0.0)[None, :]
            tl.store(normed + at, output.to(normed.dtype.element_ty), mask=here)
    place = sums + tl.program_id(0) * width + column
    tl.store(place, d_weight, mask=inside)
    if has_bias:
        tl.store(place + tl.num_programs(0) * width, d_bias, mask=inside)


@triton.jit
def _sum_programs(sums, totals, programs, width, rows: tl.constexpr, columns: tl.constexpr):
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    start = sums + tl.program_id(0) * programs * width
    total = tl.zeros([rows, columns], tl.float32)
    for first in range(0, programs, rows):
        row = first + tl.arange(0, rows)
        here = (row < programs)[:, None] & (column < width)[None, :]
        total += tl.load(start + row[:, None] * width + column[None, :], mask=here, other=0.0)
    tl.store(totals + tl.program_id(0) * width + column, tl.sum(total, 0), mask=column < width)
