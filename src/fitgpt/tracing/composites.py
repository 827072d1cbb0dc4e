"""Decisions that torch takes by looking for a CUDA device, taken as on the GPU: dropout and attention's kernel.

Both are composite operations in C++; on `meta` tensors they would run unfused. A kernel in Python on the AutogradMeta
key replaces them: it calls the operations that CUDA would call, so autograd saves what it saves there.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..memory.platform import MAX_FLASH_HEAD, Platform
from .device import TracedGpu
from .errors import Untraceable
from .kernels import partial_sums

ops = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
NARROW_FLASH = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))  # no training with some head sizes above 192
MASK_ALIGNMENT = 8  # preprocess_mask() in attention.cpp


def install(platform: Platform) -> Any:
    """Returns the library that holds the kernels: they last until its _destroy()."""
    library = torch.library.Library("aten", "IMPL")
    attention = AttentionSteering(platform)
    library.impl("dropout", dropout, "AutogradMeta")
    library.impl("linear", linear, "AutogradMeta")
    library.impl("one_hot", one_hot, "AutogradMeta")
    library.impl("softmax.int", partial(softmax, ops._softmax, ops.softmax.int), "AutogradMeta")
    library.impl("log_softmax.int", partial(softmax, ops._log_softmax, ops.log_softmax.int), "AutogradMeta")
    library.impl("rms_norm", partial(rms_norm, platform), "AutogradMeta")
    library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
    return library


def dropout(source: Tensor, p: float, train: bool) -> Tensor:
    """is_fused_kernel_acceptable() in ATen/native/Dropout.cpp."""
    if p == 0 or not train or source.numel() == 0:
        return source
    if p == 1:
        return source.mul(torch.zeros((), dtype=source.dtype))
    return ops.native_dropout(source, p, train)[0]  # type: ignore[no-any-return]


def linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear() in ATen/native/Linear.cpp, which adds the bias in place only without dispatch modes. In
    nn.MultiheadAttention the source is not contiguous."""
    if bias is None or source.dim() == 2 or source.is_contiguous():
        return ops.linear.default.decompose(source, weight, bias)  # type: ignore[no-any-return]
    return torch.matmul(source, weight.t()).add_(bias)


def one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
    """one_hot() in ATen/native/Onehot.cpp, which compares with every class on `meta`."""
    if num_classes == -1:
        known = TracedGpu.active.values.evaluate(ops.max.default, (classes,), {}, assume=False) if TracedGpu.active \
            else None
        if known is None:
            raise Untraceable("one_hot() takes the number of classes from values, which a trace does not have.",
                              "Pass num_classes.")
        num_classes = int(known) + 1
    result = torch.zeros((*classes.shape, num_classes), dtype=classes.dtype, device=classes.device)
    return result.scatter_(-1, classes.unsqueeze(-1), 1)


def softmax(kernel: Any, composite: Any, source: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """CUDA's kernel reads float16 and writes float32: softmax() in ATen/native/SoftMax.cpp. Not recorded."""
    if source.dtype == torch.float16 and dtype == torch.float32:
        return kernel(source, dim, True)  # type: ignore[no-any-return]
    return composite.decompose(source, dim, dtype)  # type: ignore[no-any-return]


def rms_norm(platform: Platform, source: Tensor, normalized_shape: list[int], weight: Tensor | None = None,
             eps: float | None = None) -> Tensor:
    """rms_norm_symint() in ATen/native/layer_norm.cpp: one kernel, unless the weight has another dtype. A compiler
    makes kernels of its own."""
    if torch.compiler.is_compiling() or (weight is not None and weight.dtype != source.dtype):
        return ops.rms_norm.default.decompose(source, normalized_shape, weight, eps)  # type: ignore[no-any-return]
    return FusedRMSNorm.apply(source, weight, len(normalized_shape), platform)  # type: ignore[no-any-return]


class FusedRMSNorm(torch.autograd.Function):
    """_fused_rms_norm and its backward, which only CUDA has: the memory of layer_norm_kernel.cu."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor | None, dims: int, platform: Platform) -> Tensor:
        ctx.platform = platform
        copy = source.contiguous()
        result = torch.empty_like(copy)
        rows = source.shape[:source.dim() - dims]
        ctx.save_for_backward(source, weight, torch.empty((*rows, *[1] * dims), dtype=torch.float32,
                                                          device=source.device))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        source, weight, _ = ctx.saved_tensors
        gradient, source = gradient.contiguous(), source.contiguous()
        of_source = torch.empty_like(source) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        if of_weight is not None and (rows := partial_sums(source, weight.numel(), ctx.platform)):
            of_weight = torch.empty((rows, *weight.shape), dtype=weight.dtype, device=weight.device).sum(0)
        return of_source, of_weight, None, None


def math_attention(query_: Tensor, key_: Tensor, value_: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
                   scale: float | None, enable_gqa: bool) -> Tensor:
    """_scaled_dot_product_attention_math() in attention.cpp, which adds the mask in place only without dispatch modes.
    Its variables live until it returns, as there."""
    wide = query_.dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    query_wide, key_wide, value_wide = (each.to(torch.float32) if wide else each for each in (query_, key_, value_))
    factor = math.sqrt(1 / math.sqrt(query_.shape[-1]) if scale is None else abs(scale))
    query = query_wide * factor
    if is_causal:
        mask = torch.ones(query.shape[-2], key_.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.where(mask, 0.0, torch.full((), -math.inf, dtype=query.dtype, device=query.device))
    key, value = key_wide, value_wide
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = ops._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    _returned = weights.to(query_.dtype)  # the second result, which GCC evaluates first; the caller drops it
    return torch.matmul(weights, value).to(query_.dtype)


class AttentionSteering:
    """scaled_dot_product_attention() of ATen/native/transformers/attention.cpp, with the kernel a GPU would choose."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                 dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
                 enable_gqa: bool = False) -> Tensor:
        kernel = self.choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.full(
                (), -65504.0 if kernel == "cudnn" else -math.inf, dtype=query.dtype, device=attn_mask.device))
        grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if kernel == "cudnn":
            return ops._scaled_dot_product_cudnn_attention(query, key, value, attn_mask, grad, dropout_p,  # type: ignore[no-any-return]
                                                           is_causal, False, scale=scale)[0]
        if kernel == "flash":
            head = query.shape[-1]
            scale = 1 / math.sqrt(head) if scale is None else scale
            query, key, value = (pad(each, (0, -each.shape[-1] % 8)) if each.shape[-1] % 8 else each
                                 for each in (query, key, value))
            out = ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return out if out.shape[-1] == head else out[..., :head]  # type: ignore[no-any-return]
        if kernel == "efficient":
            if attn_mask is not None:
                if attn_mask.stride(-1) != 1 or any(stride % MASK_ALIGNMENT for stride in attn_mask.stride()[:-1]):
                    width = attn_mask.shape[-1]
                    attn_mask = pad(attn_mask, (0, MASK_ALIGNMENT - width % MASK_ALIGNMENT))[..., :width]
                attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
            return ops._scaled_dot_product_efficient_attention(query, key, value, attn_mask, grad, dropout_p,  # type: ignore[no-any-return]
                                                               is_causal, scale=scale)[0]
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def choose(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
               enable_gqa: bool) -> str:
        """select_sdp_backend() in ATen/native/transformers/cuda/sdp_utils.cpp: cudnn, flash, efficient or math."""
        tensors, backends = (query, key, value), torch.backends.cuda
        capability, head = self.platform.capability, query.shape[-1]
        grad = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        if any(each.dim() != 4 for each in tensors) or any(each.shape[0] != query.shape[0] for each in tensors) \
                or 0 in query.shape or 0 in key.shape or any(each.stride(-1) != 1 for each in tensors):
            return "math"
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():  # recorded: T5's position bias
            return "math"
        if mask is not None and mask.stride(-1) != 1:  # an expanded one: check_last_dim_stride_equals_1_dense()
            return "math"
        same_heads = query.shape[1] == key.shape[1] == value.shape[1]
        grouped = enable_gqa and query.shape[1] % key.shape[1] == 0 and query.shape[1] % value.shape[1] == 0
        half = query.dtype in (HALF if capability >= (8, 0) else HALF[:1])
        can_share, same_size = same_heads or grouped, head == key.shape[-1] == value.shape[-1]
        if self.platform.attention(head, str(query.dtype)[6:]) == "cudnn" and half and can_share and key.shape[2] > 1 \
                and value.shape[-1] % 8 == 0 and not torch.are_deterministic_algorithms_enabled() \
                and not (query.shape[2] == 1 and dropout_p) and getattr(backends, "cudnn_sdp_enabled", lambda: True)():
            return "cudnn"
        narrow = head <= 192 or (head > 224 and not dropout_p)
        if backends.flash_sdp_enabled() and half and mask is None and same_size and head <= MAX_FLASH_HEAD \
                and capability >= (8, 0) and can_share and not (is_causal and query.shape[2] != key.shape[2]) \
                and (not grad or capability not in NARROW_FLASH or narrow):
            return "flash"
        alignment = (8 if half else 4) if capability >= (8, 0) else 8 if half and capability >= (7, 0) else 1
        if backends.mem_efficient_sdp_enabled() and same_heads and head % alignment == 0 \
                and value.shape[-1] % alignment == 0 and capability >= (5, 0) \
                and (half or query.dtype == torch.float32):
            return "efficient"
        return "math"
