"""Decisions that torch takes by looking for a CUDA device, taken as on the GPU: dropout and attention's kernel.

Both are composite operations in C++; on `meta` tensors they would run unfused. A kernel in Python on the AutogradMeta
key replaces them: it calls the operations that CUDA would call, so autograd saves what it saves there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..memory.platform import Platform

ops = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
MASK_ALIGNMENT = 8  # preprocess_mask() in attention.cpp


def install(platform: Platform) -> Any:
    """Returns the library that holds the kernels: they last until its _destroy()."""
    library = torch.library.Library("aten", "IMPL")
    attention = AttentionSteering(platform)
    library.impl("dropout", dropout, "AutogradMeta")
    library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
    return library


def dropout(source: Tensor, p: float, train: bool) -> Tensor:
    """is_fused_kernel_acceptable() in ATen/native/Dropout.cpp."""
    if p == 0 or not train or source.numel() == 0:
        return source
    if p == 1:
        return source.mul(torch.zeros((), dtype=source.dtype))
    return ops.native_dropout(source, p, train)[0]  # type: ignore[no-any-return]


class AttentionSteering:
    """scaled_dot_product_attention() of ATen/native/transformers/attention.cpp, with the kernel a GPU would choose."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                 dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
                 enable_gqa: bool = False) -> Tensor:
        kernel = self.choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            least = torch.full((), -65504.0 if kernel == "cudnn" else -math.inf, dtype=query.dtype,
                               device=attn_mask.device)
            attn_mask = torch.where(attn_mask, 0.0, least)
        grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if kernel == "cudnn":
            return ops._scaled_dot_product_cudnn_attention(query, key, value, attn_mask, grad, dropout_p,  # type: ignore[no-any-return]
                                                           is_causal, False, scale=scale)[0]
        if kernel == "flash":
            head = query.shape[-1]
            scale = 1 / math.sqrt(head) if scale is None else scale
            query, key, value = (pad(each, (0, -each.shape[-1] % 8)) if each.shape[-1] % 8 else each
                                 for each in (query, key, value))
            out = ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return out if out.shape[-1] == head else out[..., :head]  # type: ignore[no-any-return]
        if kernel == "efficient":
            if attn_mask is not None:
                if attn_mask.stride(-1) != 1 or any(stride % MASK_ALIGNMENT for stride in attn_mask.stride()[:-1]):
                    width = attn_mask.shape[-1]
                    attn_mask = pad(attn_mask, (0, MASK_ALIGNMENT - width % MASK_ALIGNMENT))[..., :width]
                attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
            return ops._scaled_dot_product_efficient_attention(query, key, value, attn_mask, grad, dropout_p,  # type: ignore[no-any-return]
                                                               is_causal, scale=scale)[0]
        return ops._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, None,  # type: ignore[no-any-return]
                                                      scale=scale, enable_gqa=enable_gqa)[0]

    def choose(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
               enable_gqa: bool) -> str:
        """select_sdp_backend() in ATen/native/transformers/cuda/sdp_utils.cpp."""
        if query.dim() != 4:
            return "math"
        return self.platform.attention(query.shape[-1], str(query.dtype)[6:])
