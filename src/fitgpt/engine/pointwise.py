"""Everything between two matmuls, each a function that compiles into one kernel.

All work on rows [N, C]. A trailing underscore: the function overwrites its arguments. Compiled and eager functions
allocate the same results; eager ones also allocate the temporaries that a fused kernel keeps in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.architectures import NORM_EPSILON


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Layer norm in the weight's precision (at least float32), rounded to `dtype` for the next matmul."""
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, NORM_EPSILON).to(dtype)


def norm_of_sum(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return norm(x.to(weight.dtype) + added, weight, bias, dtype)


def add_both(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The residual stream after a block, rounded once to its own precision."""
    return (first.to(_wide(x)) + second + x).to(x.dtype)


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


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.float32


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
    return ops._replace(norm_backward_=_fused_norm_backward(ops.norm_backward_)) if fused else ops


def _fused_norm_backward(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    from . import kernels

    def norm_backward_(d_x: Tensor, d_norm: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, *rest: Any) -> Any:
        function = kernels.norm_backward_ if kernels.norm_fits(x, weight) else otherwise
        return function(d_x, d_norm, x, added, weight, *rest)

    return norm_backward_
