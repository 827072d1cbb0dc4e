"""Causal self-attention, forward and backward, behind one pair of functions.

torch's kernels are called directly, because a block chooses what it saves: `out` and the kernel's small state can be
saved while q, k and v are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from .annotate import named

_aten = torch.ops.aten
HEAD_MULTIPLE = 8  # the CUDA kernels need a head size that is a multiple of this; others are padded with zeros


class AttentionResult(NamedTuple):
    out: Tensor               # [B, T, C]
    state: tuple[Any, ...]    # also needed by the kernel's backward: log-sum-exp [B, H, T], RNG seed and offset


class Kernel(NamedTuple):
    forward: Callable[..., tuple[Any, ...]]   # q, k, v [B, H, T, D], dropout, scale → (out, *state)
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def attend(qkv: Tensor, heads: int, dropout: float) -> AttentionResult:
    """qkv [B, T, 3C] → the heads' concatenated outputs [B, T, C]."""
    scale = _scale(qkv, heads)
    q, k, v = _padded(_heads(qkv, heads), qkv.device.type)
    out, *state = kernel_for(q, k, v, dropout).forward(q, k, v, dropout, scale)
    width = qkv.shape[2] // 3 // heads
    att = out[..., :width].transpose(1, 2).reshape(*qkv.shape[:2], heads * width)
    return AttentionResult(named("att", att), tuple(state))


def attend_backward(d_out: Tensor, qkv: Tensor, attended: AttentionResult, heads: int, dropout: float) -> Tensor:
    """The gradient with respect to qkv, [B, T, 3C]."""
    B, T, C = d_out.shape
    width = C // heads
    def by_head(flat: Tensor) -> Tensor:
        return flat.view(B, T, heads, width).transpose(1, 2)

    q, k, v, d, out = _padded((*_heads(qkv, heads), by_head(d_out), by_head(attended.out)), qkv.device.type)
    gradients = kernel_for(q, k, v, dropout).backward(d, q, k, v, out, attended.state, dropout, _scale(qkv, heads))
    return torch.stack([g[..., :width].transpose(1, 2) for g in gradients], dim=2).view(B, T, 3 * C)


def kernel_for(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Kernel:
    """torch's choice for this GPU, dtype and shape; the plain implementation if it has none."""
    if q.device.type == "cuda":
        return _ON_CUDA.get(torch._fused_sdp_choice(q, k, v, None, dropout, True), PLAIN)
    if q.device.type == "cpu" and dropout == 0:
        return FLASH_ON_CPU
    return PLAIN


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    B, T, width = qkv.shape
    return tuple(part.transpose(1, 2) for part in qkv.view(B, T, 3, heads, width // 3 // heads).unbind(2))


def _padded(parts: tuple[Tensor, ...], device_type: str) -> tuple[Tensor, ...]:
    missing = -parts[0].shape[-1] % HEAD_MULTIPLE if device_type == "cuda" else 0
    return tuple(F.pad(part, (0, missing)) for part in parts) if missing else parts


def _scale(qkv: Tensor, heads: int) -> float:
    return 1.0 / math.sqrt(qkv.shape[2] // 3 // heads)


# ---- torch's kernels, each with its backward

def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_flash_attention(q, k, v, dropout, True, False, scale=scale)[:8]  # type: ignore[no-any-return]


def _flash_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...], dropout: float,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    lse, cum_q, cum_k, max_q, max_k, seed, offset = state
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        d, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, True, seed, offset, scale=scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout, True, scale=scale)  # type: ignore[no-any-return]


def _efficient_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...],
                        dropout: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    lse, seed, offset = state
    return _aten._scaled_dot_product_efficient_attention_backward(  # type: ignore[no-any-return]
        d, q, k, v, None, out, lse, seed, offset, dropout, [True, True, True, False], True, scale=scale)[:3]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout, True, False, scale=scale)[:8]  # type: ignore[no-any-return]


def _cudnn_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...], dropout: float,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    lse, cum_q, cum_k, max_q, max_k, seed, offset = state
    return _aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        d, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, dropout, True, scale=scale)


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, True, scale=scale)  # type: ignore[no-any-return]


def _flash_on_cpu_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...],
                           dropout: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        d, q, k, v, out, state[0], dropout, True, scale=scale)


# ---- plain implementation, for devices without a suitable kernel (dropout on CPU, Apple's GPUs)

def _plain(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> tuple[Any, ...]:
    probabilities = _probabilities(q, k, scale)
    dropped, mask = _aten.native_dropout(probabilities, dropout, True) if dropout else (probabilities, None)
    return dropped.to(v.dtype) @ v, mask


def _plain_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...], dropout: float,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = _probabilities(q, k, scale)
    kept = state[0] / (1 - dropout) if dropout else 1.0
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


FLASH = Kernel(_flash, _flash_backward)
EFFICIENT = Kernel(_efficient, _efficient_backward)
FLASH_ON_CPU = Kernel(_flash_on_cpu, _flash_on_cpu_backward)
CUDNN = Kernel(_cudnn, _cudnn_backward)
PLAIN = Kernel(_plain, _plain_backward)
_ON_CUDA = {SDPBackend.FLASH_ATTENTION.value: FLASH, SDPBackend.EFFICIENT_ATTENTION.value: EFFICIENT,
            SDPBackend.CUDNN_ATTENTION.value: CUDNN}
