"""flex_attention, for which only the compiler has a kernel: operations with the memory of that kernel.

Read in torch/_inductor/kernel/flex/flex_attention.py, not recorded on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .device import TracedGpu
from .errors import Untraceable
from .kernels import KERNELS, Call
from .monkeypatch import Patches
from .recorder import Recorder

NOT_RECORDED = ("The memory of flex_attention is read in PyTorch's source, not measured. Gradients of tensors that its "
                "score_mod captures are not included.")
library = torch.library.Library("fitgpt", "DEF")
library.define("flex_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)")
library.define("flex_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor result, "
               "Tensor logsumexp) -> (Tensor, Tensor, Tensor)")


def install(patches: Patches, device: TracedGpu, is_compiling: Callable[[], bool]) -> None:
    from torch.nn.attention import flex_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        if not is_compiling():
            raise Untraceable("flex_attention() is not compiled: on a GPU it would hold the scores of all tokens.",
                              "Call torch.compile(flex_attention), as PyTorch recommends.")
        device.recorder.notes[NOT_RECORDED] = None
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        return FlexAttention.apply(query, key, value)

    patches.set(flex_attention, "flex_attention_hop", attention)
    patches.set(flex_attention, "_validate_device", lambda *_: None)  # while it compiles, tensors are on `meta`
    patches.set(torch.compiler, "is_dynamo_compiling", is_compiling)  # else it would compile within a compilation


def copy_mask(mask: BlockMask) -> BlockMask:
    """With new tensors, and the same function."""
    made = copy.copy(mask)
    for name, value in vars(mask).items():
        if isinstance(value, Tensor):
            setattr(made, name, torch.empty_like(value))
    return made


def create_mask_compiled(device: TracedGpu, /, *args: Any, **kwargs: Any) -> BlockMask:
    """torch.compile(create_block_mask), which holds no mask of all pairs of tokens: only its result is recorded."""
    device.recorder, recorder = Recorder(), device.recorder
    try:
        mask = create_block_mask(*args, **kwargs)
    finally:
        device.recorder = recorder
    recorder.compiled = True
    return copy_mask(mask)


class FlexAttention(torch.autograd.Function):
    """query, key, value [B, H, T, D] → the result, its log-sum-exp and its largest scores [B, H, T]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
        result, logsumexp, largest = torch.ops.fitgpt.flex_attention(query, key, value)
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.mark_non_differentiable(largest)
        return result, logsumexp, largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        gradients = torch.ops.fitgpt.flex_attention_backward(gradient, *ctx.saved_tensors)
        # One key for all of a batch's queries has the sum of their gradients.
        return tuple(each if each.shape == saved.shape else each.sum(0, keepdim=True)
                     for each, saved in zip(gradients, ctx.saved_tensors, strict=False))


def _flex_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _dense_like(query, *query.shape[:3], value.shape[3]), rows, torch.empty_like(rows)


def _flex_attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor,
                             logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = query.shape[0]
    return (_dense_like(query, *query.shape), _dense_like(key, batch, *key.shape[1:]),
            _dense_like(value, batch, *value.shape[1:]))


def _dense_like(tensor: Tensor, *size: int) -> Tensor:
    """Dense, with the dimensions in the same order but the last: infer_dense_strides() in flex/common.py."""
    order = [*sorted(range(len(size) - 1), key=tensor.stride, reverse=True), len(size) - 1]
    return tensor.new_empty([size[dim] for dim in order]).permute([order.index(dim) for dim in range(len(size))])


def _record(call: Call) -> None:
    call.output(1, 2, 0)


def _record_backward(call: Call) -> None:
    """A sum per row comes first."""
    call.scratch(call.args[5].nbytes)
    call.output(0, 2, 1)


library.impl("flex_attention", _flex_attention, "Meta")
library.impl("flex_attention_backward", _flex_attention_backward, "Meta")
KERNELS[torch.ops.fitgpt.flex_attention.default] = _record
KERNELS[torch.ops.fitgpt.flex_attention_backward.default] = _record_backward
