"""One transformer block, forward and backward, written out: gradient checkpointing is a choice of what is saved between
them, the recompute policy. Matmuls are called here; everything between two of them is one function of ops.py.

Tensors in the order in which they are computed, with their bytes per token in half precision:

    x 4C (float32)  →  h1 2C  →  qkv 6C  →  att 2C  →  proj 2C  →  h2 2C  →  fc 8C  →  g 8C  →  down 2C  →  y 4C
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.memory_savers import SAVED_TENSORS
from .annotate import named
from .attention import AttentionResult, attend, attend_backward, split_heads
from .ops import EAGER, Gradients, Pointwise, column_sums


class BlockWeights(NamedTuple):
    ln_1: Tensor
    ln_1_bias: Tensor | None
    c_attn: Tensor
    c_attn_bias: Tensor | None
    attn_proj: Tensor
    attn_proj_bias: Tensor | None
    ln_2: Tensor
    ln_2_bias: Tensor | None
    c_fc: Tensor
    c_fc_bias: Tensor | None
    mlp_proj: Tensor
    mlp_proj_bias: Tensor | None


MATRICES = ("c_attn", "attn_proj", "c_fc", "mlp_proj")


@dataclass(frozen=True)
class BlockOptions:
    """How a block computes; the same for every layer."""

    heads: int
    dropout: float          # 0 outside training
    dtype: torch.dtype      # of the matmuls
    ops: Pointwise = EAGER


@dataclass
class SavedForBackward:
    """What one block saves in its forward pass for its backward pass."""

    x: Tensor                                                # its input [B, T, C]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    attended: AttentionResult | None = None
    masks: dict[str, Tensor] = field(default_factory=dict)   # of dropout, one byte each
    rng_state: Tensor | None = None                          # before attention's own dropout


class LayerCache(NamedTuple):
    """Keys and values of one layer for every position of the block, for sampling. Shape [B, H, T, C/H]."""

    keys: Tensor
    values: Tensor


def forward(x: Tensor, w: BlockWeights, options: BlockOptions, policy: str | None = None,
            cache: LayerCache | None = None) -> tuple[Tensor, SavedForBackward | None]:
    """x [B, T, C] → the same shape. With a recompute policy, also what the backward pass needs under it."""
    ops, dtype, to_save = options.ops, options.dtype, SAVED_TENSORS[policy] if policy else frozenset()
    kept, rows = SavedForBackward(named("x", x)), x.flatten(0, 1)

    def keep(name: str, tensor: Tensor) -> Tensor:
        if name in to_save:
            kept.tensors[name] = tensor
        return named(name, tensor)

    h1 = keep("h1", ops.norm(rows, w.ln_1, w.ln_1_bias, dtype))
    qkv = keep("qkv", linear(h1, w.c_attn, w.c_attn_bias))
    del h1  # freed at once unless it is saved
    if cache is not None:
        keys, values = split_heads(qkv.view(*x.shape[:2], -1), options.heads)[1:]
        cache.keys[:, :, :x.shape[1]] = keys
        cache.values[:, :, :x.shape[1]] = values
        del keys, values
    if policy and options.dropout:
        kept.rng_state = current_rng_state(x.device)
    attended = attend(qkv.view(*x.shape[:2], -1), options.heads, options.dropout)
    del qkv
    if "att" in to_save:
        kept.attended = attended
    proj = keep("proj", drop(linear(attended.out.flatten(0, 1), w.attn_proj, w.attn_proj_bias), "proj", options, kept))
    del attended
    h2 = keep("h2", ops.norm_of_sum(rows, proj, w.ln_2, w.ln_2_bias, dtype))
    fc = keep("fc", linear(h2, w.c_fc, w.c_fc_bias))
    del h2
    g = keep("g", ops.gelu(fc))
    del fc
    down = drop(linear(g, w.mlp_proj, w.mlp_proj_bias), "down", options, kept)
    del g
    return ops.add_both(rows, proj, down).view_as(x), kept if policy else None


def backward(d_y: Tensor, d_y_rounded: Tensor, kept: SavedForBackward, w: BlockWeights, parameters: BlockWeights,
             options: BlockOptions, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Turns the gradient of the block's output, in place, into that of its input. Weight gradients go to `gradients`.

    The gradient comes and goes in two precisions: the residual stream's, and rounded for the matmuls. `w` are the
    weights as used in matmuls, `parameters` the weights themselves: the same tensors unless casts are cached.
    """
    ops, dtype, rows = options.ops, options.dtype, kept.x.flatten(0, 1)
    tensors, attended, h1, qkv = kept.tensors, kept.attended, None, None
    if attended is None:  # recomputed with the RNG state of the forward pass
        h1, qkv = qkv_again(kept, w, options)
        now = current_rng_state(rows.device) if kept.rng_state is not None else None
        if kept.rng_state is not None:
            set_rng_state(kept.rng_state, rows.device)
        attended = attend(qkv.view(*kept.x.shape[:2], -1), options.heads, options.dropout)
        if now is not None:
            set_rng_state(now, rows.device)
    att = attended.out.flatten(0, 1)
    proj = tensors.pop("proj", None)
    if proj is None:
        proj = drop_again(linear(att, w.attn_proj, w.attn_proj_bias), "proj", options, kept)
    h2, fc, g = (tensors.pop(name, None) for name in ("h2", "fc", "g"))
    if fc is None:
        h2 = ops.norm_of_sum(rows, proj, w.ln_2, w.ln_2_bias, dtype) if h2 is None else h2
        fc = linear(h2, w.c_fc, w.c_fc_bias)

    d_down = drop_again(d_y_rounded, "down", options, kept)
    d_fc = d_down @ w.mlp_proj.to(dtype)
    ops.gelu_backward_(fc, d_fc)
    add_linear(gradients, parameters.mlp_proj, w.mlp_proj_bias, d_down, fc if g is None else g)
    del d_down, fc, g
    d_h2 = d_fc @ w.c_fc.to(dtype)  # before add_linear, which may update the weight (step_in_backward)
    d_proj, again, d_weight, d_bias = ops.norm_backward_(d_y, d_h2, rows, proj, w.ln_2, w.ln_2_bias, dtype, h2 is None)
    del d_h2, proj
    add_linear(gradients, parameters.c_fc, w.c_fc_bias, d_fc, cast(Tensor, again if h2 is None else h2))
    del h2, again, d_fc
    add_norm(gradients, w.ln_2, w.ln_2_bias, d_weight, d_bias)

    d_proj = drop_again(d_proj, "proj", options, kept)
    d_att = d_proj @ w.attn_proj.to(dtype)
    add_linear(gradients, parameters.attn_proj, w.attn_proj_bias, d_proj, att)
    del d_proj, att
    if qkv is None:
        h1, qkv = qkv_again(kept, w, options)
    d_qkv = attend_backward(d_att.view_as(kept.x), qkv.view(*kept.x.shape[:2], -1), attended, options.heads,
                            options.dropout).flatten(0, 1)
    del d_att, qkv, attended
    kept.attended = None
    d_h1 = d_qkv @ w.c_attn.to(dtype)
    d_x_rounded, again, d_weight, d_bias = ops.norm_backward_(d_y, d_h1, rows, None, w.ln_1, w.ln_1_bias, dtype,
                                                              h1 is None)
    del d_h1
    add_linear(gradients, parameters.c_attn, w.c_attn_bias, d_qkv, cast(Tensor, again if h1 is None else h1))
    del h1, again, d_qkv
    add_norm(gradients, w.ln_1, w.ln_1_bias, d_weight, d_bias)
    return d_y, d_x_rounded


def qkv_again(kept: SavedForBackward, w: BlockWeights, options: BlockOptions) -> tuple[Tensor | None, Tensor]:
    """(h1, qkv), saved or recomputed; h1 is None if only qkv was saved."""
    h1, qkv = kept.tensors.pop("h1", None), kept.tensors.pop("qkv", None)
    if qkv is not None:
        return h1, qkv
    h1 = options.ops.norm(kept.x.flatten(0, 1), w.ln_1, w.ln_1_bias, options.dtype)
    return h1, linear(h1, w.c_attn, w.c_attn_bias)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in the inputs' precision. The cast of the weight is freed after the matmul, unless it is cached."""
    return F.linear(inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))


def add_linear(gradients: Gradients, weight: Tensor, bias: Tensor | None, d_out: Tensor, inputs: Tensor) -> None:
    gradients.matmul(weight, d_out, inputs)
    if bias is not None:
        gradients.vector(bias, column_sums(d_out, bias.dtype))


def add_norm(gradients: Gradients, weight: Tensor, bias: Tensor | None, d_weight: Tensor,
             d_bias: Tensor | None) -> None:
    gradients.vector(weight, d_weight)
    if bias is not None:
        gradients.vector(bias, d_bias)


# ---- dropout: masks are saved, so that recomputed tensors are the same

def drop(tensor: Tensor, name: str, options: BlockOptions, kept: SavedForBackward) -> Tensor:
    if not options.dropout:
        return tensor
    dropped, mask = torch.ops.aten.native_dropout(tensor, options.dropout, True)
    kept.masks[name] = mask
    return cast(Tensor, dropped)


def drop_again(tensor: Tensor, name: str, options: BlockOptions, kept: SavedForBackward) -> Tensor:
    """Applies the mask of the forward pass: to recompute its result, or to propagate a gradient."""
    return tensor * kept.masks[name] * (1 / (1 - options.dropout)) if options.dropout else tensor


def current_rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


# ---- sampling

def next_token(x: Tensor, w: BlockWeights, heads: int, dtype: torch.dtype, cache: LayerCache,
               position: Tensor) -> Tensor:
    """The block for one more token, x [B, 1, C], at `position` [1]. Shapes do not change from token to token."""
    B, _, C = x.shape
    normed = F.layer_norm(x, (C,), w.ln_1, w.ln_1_bias).to(dtype)
    q, k, v = (part.view(B, 1, heads, C // heads).transpose(1, 2)
               for part in linear(normed, w.c_attn, w.c_attn_bias).chunk(3, dim=2))
    cache.keys.index_copy_(2, position, k)
    cache.values.index_copy_(2, position, v)
    seen = (torch.arange(cache.keys.shape[2], device=x.device) <= position).unsqueeze(0)
    mixed = F.scaled_dot_product_attention(q, cache.keys, cache.values, attn_mask=seen)
    x = x + linear(mixed.transpose(1, 2).reshape(B, 1, C), w.attn_proj, w.attn_proj_bias)
    wide = F.gelu(linear(F.layer_norm(x, (C,), w.ln_2, w.ln_2_bias).to(dtype), w.c_fc, w.c_fc_bias))
    return x + linear(wide, w.mlp_proj, w.mlp_proj_bias)
