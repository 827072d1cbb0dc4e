"""What the forward and backward passes are made of, besides matmuls and attention: pointwise functions, the loss of the
head in chunks, and where gradients go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.architectures import IGNORE_INDEX, NORM_EPSILON
from .annotate import named
from .device import triton_works

# ---- everything between two matmuls, each a function that compiles into one kernel
#
# All work on rows [N, C]. A trailing underscore: the function overwrites its arguments. Compiled and eager functions
# allocate the same results; eager ones also allocate the temporaries that a fused kernel keeps in registers.

def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums: float32, or float64 where the tensor has that."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Layer norm in the weight's precision (at least float32), rounded to `dtype` for the next matmul."""
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, NORM_EPSILON).to(dtype)


def norm_of_sum(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return norm(x.to(weight.dtype) + added, weight, bias, dtype)


def add_both(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The residual stream after a block, rounded once to its own precision."""
    return (first.to(wide_dtype(x.dtype)) + second + x).to(x.dtype)


def gelu(fc: Tensor) -> Tensor:
    return F.gelu(fc)


def gelu_backward_(fc: Tensor, d_gelu: Tensor) -> None:
    """In place: fc becomes gelu(fc), and d_gelu becomes the gradient of gelu's input."""
    torch.ops.aten.gelu_backward.grad_input(d_gelu, fc, grad_input=d_gelu)
    torch.ops.aten.gelu_(fc)


def norm_backward_(d_x: Tensor, d_norm: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None,
                   dtype: torch.dtype, again: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Adds to d_x the gradient of norm(x + added).

    Returns d_x rounded for the next matmul (d_x itself if it has that precision), the norm's output if `again`, and the
    gradients of the norm's weight and bias.
    """
    summed = x.to(weight.dtype) if added is None else x.to(weight.dtype) + added
    normed, mean, rstd = torch.native_layer_norm(summed, weight.shape, weight, bias, NORM_EPSILON)
    output = normed.to(dtype) if again else None
    d_summed, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
        d_norm.to(summed.dtype), summed, weight.shape, mean, rstd, weight, bias, [True, True, bias is not None])
    d_x.copy_(d_x + d_summed)
    return d_x.to(dtype), output, d_weight, d_bias if bias is not None else None


class Pointwise(NamedTuple):
    norm: Callable[..., Tensor] = norm
    norm_of_sum: Callable[..., Tensor] = norm_of_sum
    add_both: Callable[..., Tensor] = add_both
    gelu: Callable[..., Tensor] = gelu
    gelu_backward_: Callable[..., None] = gelu_backward_
    norm_backward_: Callable[..., tuple[Tensor, Tensor | None, Tensor, Tensor | None]] = norm_backward_


EAGER = Pointwise()
# Autotuning would time several configurations of each kernel at its first call, which takes seconds, 60 MiB and a copy
# of what the kernel overwrites: the first step would need more memory than all later ones.
NO_AUTOTUNE: dict[str, Any] = {"triton.autotune_pointwise": False}
# Per function: a training shape needs up to three, and so does each fallback plan after running out of memory; torch's
# default limit, 8, would end such a run. Beyond this limit `fullgraph` raises: nothing falls back to eager.
RECOMPILE_LIMIT = 64


def compiled(*, fused: bool) -> Pointwise:
    """Each function compiled once per shape, and reused by every layer.

    `fused`: the backward of a norm is our Triton kernel: torch.compile needs two passes for it.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    functions: Any = [torch.compile(function, fullgraph=True, dynamic=False, options=NO_AUTOTUNE) for function in EAGER]
    ops = Pointwise(*functions)
    if not fused:
        return ops
    from . import kernels

    def norm_backward(d_x: Tensor, d_norm: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, *rest: Any) -> Any:
        function = kernels.norm_backward_ if kernels.norm_fits(x, weight) else ops.norm_backward_
        return function(d_x, d_norm, x, added, weight, *rest)

    return ops._replace(norm_backward_=norm_backward)


# ---- cross-entropy of the head, in chunks: the full logits tensor never exists
#
# A chunk's logits are computed, turned in place into their own gradient, multiplied into the gradients of the head and
# of the hidden states, and overwritten by the next chunk. So the loss needs one chunk of logits, instead of 12 bytes
# per logit, and the backward pass has nothing left to do there.

@torch.no_grad()
def loss_and_gradient_(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, chunk: int,
                       gradients: Gradients, cached: Tensor | None = None) -> Tensor:
    """scale × the mean cross-entropy of hidden @ weight.T over the targets that are not IGNORE_INDEX.

    `hidden` [N, C] becomes its gradient, in place; the head's gradient goes to `gradients`. The scale (float16's loss
    scale and 1 / accumulation) is applied before the logits' gradients are rounded: at 1/N alone they would underflow
    float16. `cached` is the weight in the hidden states' precision, if casts are cached.
    """
    head = weight.to(hidden.dtype) if cached is None else cached
    wide = wide_dtype(hidden.dtype)
    per_token = scale.to(wide) / (targets != IGNORE_INDEX).sum().clamp_(min=1)
    buffer = named("logits", torch.empty(min(chunk, len(hidden)), len(head), dtype=hidden.dtype, device=hidden.device))
    total = torch.zeros((), dtype=wide, device=hidden.device)
    for rows in chunk_slices(len(hidden), chunk):
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
    losses = torch.empty(len(hidden), dtype=wide_dtype(hidden.dtype), device=hidden.device)
    for rows in chunk_slices(len(hidden), chunk):
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
    wide = logits.to(wide_dtype(logits.dtype))  # the same tensor where it is wide already
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


def chunk_slices(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


# ---- where gradients go as the backward pass computes them: each is passed on once

class Gradients(Protocol):
    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        """Takes the gradient of a weight matrix, d_outᵀ @ inputs, as its factors [N, out] and [N, in]."""

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Takes the gradient of a norm or a bias; None if there is no such parameter."""

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        """Takes the gradient of some rows [n, C] of an embedding; an index may occur several times."""


class AccumulateIntoGrad:
    """Adds to `.grad` in the parameter's own precision: no gradient exists twice."""

    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = matmul_grad(d_out, inputs, parameter.dtype)
        else:
            add_matmul_grad_(parameter.grad, d_out, inputs)

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad += gradient

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        add_rows_(parameter.grad, indices, gradient)


class GradientDict:
    """Collects gradients in a dict instead of `.grad`."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}  # by id of the parameter

    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        self._add(parameter, matmul_grad(d_out, inputs, parameter.dtype))

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._add(parameter, gradient.to(parameter.dtype))

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        total = torch.zeros_like(parameter)
        add_rows_(total, indices, gradient)
        self._add(parameter, total)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        known = self.of.get(id(parameter))
        self.of[id(parameter)] = gradient if known is None else known.add_(gradient)


def matmul_grad(d_out: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    if _accumulates_wider(d_out, dtype):
        return torch.mm(d_out.t(), inputs, out_dtype=dtype)
    return (d_out.t() @ inputs).to(dtype)


def add_matmul_grad_(total: Tensor, d_out: Tensor, inputs: Tensor) -> None:
    """total += d_outᵀ @ inputs; on CUDA half-precision matmuls accumulate and add in float32."""
    if d_out.dtype == total.dtype:
        total.addmm_(d_out.t(), inputs)
    elif _accumulates_wider(d_out, total.dtype):
        torch.addmm(total, d_out.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total += d_out.t() @ inputs


def column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over rows [N, n], a bias's gradient. On CUDA it is a matmul with ones: `sum` would allocate 8 bytes of
    scratch per element, four times the size of the rows."""
    if rows.device.type != "cuda":
        return rows.sum(0, dtype=dtype)
    if _accumulates_wider(rows, dtype):
        return torch.mm(rows.new_ones(1, len(rows)), rows, out_dtype=dtype).view(-1)
    return rows.t().mv(rows.new_ones(len(rows)))  # float32, without TF32


def add_rows_(total: Tensor, indices: Tensor, gradient: Tensor) -> None:
    """Adds row i of `gradient` to row indices[i]. In half precision, rows of one index are summed in float32.

    index_add_ adds atomically on CUDA, in any order; embedding_dense_backward sorts, and adds in the order of i.
    """
    must_sort = total.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    if total.dtype in (torch.float32, torch.float64) and not must_sort:
        total.index_add_(0, indices, gradient.to(total.dtype))
    else:
        total += torch.ops.aten.embedding_dense_backward(gradient.to(total.dtype), indices, len(total), -1, False)


def _accumulates_wider(factor: Tensor, dtype: torch.dtype) -> bool:
    return factor.device.type == "cuda" and factor.dtype != dtype and dtype == torch.float32
