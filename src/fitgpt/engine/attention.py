"""Causal self-attention, forward and backward, behind one pair of functions.

torch's kernels are called directly, because a block chooses what it saves: `out` and the kernel's small state can be
saved while q, k and v are recomputed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from .annotate import named

_aten = torch.ops.aten
HEAD_MULTIPLE = 8  # the CUDA kernels need a head size that is a multiple of this; others are padded with zeros
_ON_CUDA = {SDPBackend.FLASH_ATTENTION.value: "flash", SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
            SDPBackend.CUDNN_ATTENTION.value: "cudnn"}


class AttentionResult(NamedTuple):
    out: Tensor               # [B, T, C]
    state: tuple[Any, ...]    # also needed by the kernel's backward: log-sum-exp [B, H, T], RNG seed and offset


def attend(qkv: Tensor, heads: int, dropout: float) -> AttentionResult:
    """qkv [B, T, 3C] → the heads' concatenated outputs [B, T, C]."""
    width = qkv.shape[2] // 3 // heads
    q, k, v = _padded(split_heads(qkv, heads), qkv.device.type)
    out, *state = _forward(kernel_for(q, k, v, dropout), q, k, v, dropout, 1.0 / math.sqrt(width))
    att = out[..., :width].transpose(1, 2).reshape(*qkv.shape[:2], heads * width)
    return AttentionResult(named("att", att), tuple(state))


def attend_backward(d_out: Tensor, qkv: Tensor, attended: AttentionResult, heads: int, dropout: float) -> Tensor:
    """The gradient with respect to qkv, [B, T, 3C]."""
    B, T, C = d_out.shape
    width = C // heads

    def by_head(flat: Tensor) -> Tensor:
        return flat.view(B, T, heads, width).transpose(1, 2)

    q, k, v, d, out = _padded((*split_heads(qkv, heads), by_head(d_out), by_head(attended.out)), qkv.device.type)
    gradients = _backward(kernel_for(q, k, v, dropout), d, q, k, v, out, attended.state, dropout,
                          1.0 / math.sqrt(width))
    return torch.stack([g[..., :width].transpose(1, 2) for g in gradients], dim=2).view(B, T, 3 * C)


def kernel_for(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> str:
    """torch's choice for this GPU, dtype and shape; "math", the plain implementation below, if it has none."""
    if q.device.type == "cuda":
        return _ON_CUDA.get(torch._fused_sdp_choice(q, k, v, None, dropout, True), "math")
    return "flash on CPU" if q.device.type == "cpu" and dropout == 0 else "math"


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """qkv [B, T, 3C] → q, k and v, each a view [B, H, T, C/H]."""
    B, T, width = qkv.shape
    return tuple(part.transpose(1, 2) for part in qkv.view(B, T, 3, heads, width // 3 // heads).unbind(2))


def _padded(parts: tuple[Tensor, ...], device_type: str) -> tuple[Tensor, ...]:
    missing = -parts[0].shape[-1] % HEAD_MULTIPLE if device_type == "cuda" else 0
    return tuple(F.pad(part, (0, missing)) for part in parts) if missing else parts


# ---- torch's kernels, and a plain implementation for devices without one (dropout on CPU, Apple's GPUs)

def _forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> tuple[Any, ...]:
    """q, k, v [B, H, T, D] → (out, *state)."""
    result: tuple[Any, ...]
    if kernel == "flash":
        result = _aten._scaled_dot_product_flash_attention(q, k, v, dropout, True, False, scale=scale)[:8]
    elif kernel == "cudnn":
        result = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout, True, False, scale=scale)[:8]
    elif kernel == "efficient":
        result = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout, True, scale=scale)
    elif kernel == "flash on CPU":
        result = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, True, scale=scale)
    else:
        probabilities = _probabilities(q, k, scale)
        dropped, mask = _aten.native_dropout(probabilities, dropout, True) if dropout else (probabilities, None)
        result = dropped.to(v.dtype) @ v, mask
    return result


def _backward(kernel: str, d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...],
              dropout: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of `out`."""
    gradients: tuple[Tensor, Tensor, Tensor]
    if kernel == "flash":
        *lengths, seed, offset = state
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            d, q, k, v, out, *lengths, dropout, True, seed, offset, scale=scale)
    elif kernel == "cudnn":
        lse, *lengths, seed, offset = state
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            d, q, k, v, out, lse, seed, offset, None, *lengths, dropout, True, scale=scale)
    elif kernel == "efficient":
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            d, q, k, v, None, out, *state, dropout, [True, True, True, False], True, scale=scale)[:3]
    elif kernel == "flash on CPU":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d, q, k, v, out, state[0], dropout, True, scale=scale)
    else:
        gradients = _plain_backward(d, q, k, v, state[0], dropout, scale)
    return gradients


def _plain_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = _probabilities(q, k, scale)
    kept = mask / (1 - dropout) if mask is not None else 1.0
    d_v = (probabilities * kept).to(d.dtype).transpose(-1, -2) @ d
    d_probabilities = (d @ v.transpose(-1, -2)).to(probabilities.dtype) * kept
    d_scores = probabilities * (d_probabilities - (d_probabilities * probabilities).sum(-1, keepdim=True))
    d_scores = (d_scores * scale).to(q.dtype)
    return d_scores @ k, d_scores.transpose(-1, -2) @ q, d_v


def _probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    T = q.shape[2]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) * scale
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return wide.masked_fill(future, -math.inf).softmax(-1)
