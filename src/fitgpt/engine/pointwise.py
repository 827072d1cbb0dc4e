"""Everything between two matrix products, each a function that compiles into one kernel.

All work on rows [N, C]. A trailing underscore: the function writes its result over its arguments. Compiled or not,
they allocate the same results; eager ones also make the temporaries that a fused kernel keeps in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .constants import NORM_EPSILON


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Layer norm in the weight's precision (at least float32), rounded to the matrix products'."""
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, NORM_EPSILON).to(dtype)


def norm_of_sum(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return norm(x.to(weight.dtype) + added, weight, bias, dtype)


def add_both(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The residual stream after a block, rounded once to its own precision."""
    return (first.to(_wide(x)) + second + x).to(x.dtype)


def gelu(fc: Tensor) -> Tensor:
    return F.gelu(fc)


def gelu_backward_(fc: Tensor, d_gelu: Tensor) -> None:
    """fc becomes gelu(fc), and the gradient of gelu's output becomes that of its input: no byte is added."""
    torch.ops.aten.gelu_backward.grad_input(d_gelu, fc, grad_input=d_gelu)
    torch.ops.aten.gelu_(fc)


def norm_backward_(d_x: Tensor, d_norm: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None,
                   dtype: torch.dtype, again: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Adds to d_x the gradient that comes back through norm(x + added).

    Returns d_x rounded for the next matrix product (d_x itself where that is its precision), the norm's output if it
    is wanted `again`, and the gradients of the norm's weight and bias.
    """
    summed = x.to(weight.dtype) if added is None else x.to(weight.dtype) + added
    normed, mean, steepness = torch.native_layer_norm(summed, weight.shape, weight, bias, NORM_EPSILON)
    output = normed.to(dtype) if again else None
    d_summed, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
        d_norm.to(summed.dtype), summed, weight.shape, mean, steepness, weight, bias, [True, True, bias is not None])
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
# The compiler would time several shapes of each kernel at its first call, which takes seconds, 60 MiB and a copy of
# whatever the kernel overwrites: a first step that needs more memory than all later ones.
NOT_TIMED: dict[str, Any] = {"triton.autotune_pointwise": False}
# Of one function: a training shape has up to three, and so has each smaller plan that a run steps down to when memory
# runs out; torch's own limit, 8, would end such a run. Beyond this one `fullgraph` raises: nothing falls back to eager.
MOST_GRAPHS = 64


def compiled(*, fused: bool) -> Pointwise:
    """Each function compiled once for each shape it meets, and reused by every layer.

    `fused`: on a card, the way back through a norm is a kernel of ours: the compiler makes two passes of it.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    functions: Any = [torch.compile(function, fullgraph=True, dynamic=False, options=NOT_TIMED) for function in EAGER]
    ops = Pointwise(*functions)
    return ops._replace(norm_backward_=_norm_backward_in_one_pass(ops.norm_backward_)) if fused else ops


def _norm_backward_in_one_pass(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    from . import kernels

    def norm_backward_(d_x: Tensor, d_norm: Tensor, x: Tensor, added: Tensor | None, weight: Tensor, *rest: Any) -> Any:
        function = kernels.norm_backward_ if kernels.norm_fits(x, weight) else otherwise
        return function(d_x, d_norm, x, added, weight, *rest)

    return norm_backward_
