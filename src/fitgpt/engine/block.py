"""One transformer block, forward and backward, written out: what is kept between the two is chosen, not left to
chance. Matrix products stand in plain sight; everything between two of them is one function of pointwise.py.

Names, in the order in which they are made, with their bytes a token in half precision:

    x 4C (float32)  →  h1 2C  →  qkv 6C  →  att 2C  →  proj 2C  →  h2 2C  →  fc 8C  →  g 8C  →  down 2C  →  y 4C
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.memory_savers import KEEPS
from .attention import Attended, attend, attend_backward
from .gradient_sinks import Gradients, column_sums
from .pointwise import EAGER, Pointwise


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
class Manner:
    """How a block computes; the same for every layer."""

    heads: int
    dropout: float          # 0 outside training
    dtype: torch.dtype      # of the matrix products
    ops: Pointwise = EAGER


@dataclass
class Kept:
    """What one block holds from its forward to its backward pass."""

    x: Tensor                                                # its input [B, T, C]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    attended: Attended | None = None
    masks: dict[str, Tensor] = field(default_factory=dict)   # of dropout, one byte each
    dice: Tensor | None = None                               # the generator's state before attention's own dropout


class LayerCache(NamedTuple):
    """Keys and values of one layer for every position of the block, for sampling. Shape [B, H, T, C/H]."""

    keys: Tensor
    values: Tensor


def forward(x: Tensor, w: BlockWeights, manner: Manner, level: str | None = None,
            cache: LayerCache | None = None) -> tuple[Tensor, Kept | None]:
    """x [B, T, C] → the same shape. With a level, also what the backward pass needs at that level."""
    ops, dtype, keeps = manner.ops, manner.dtype, KEEPS[level] if level else frozenset()
    kept, rows = Kept(x), x.flatten(0, 1)

    def keep(name: str, tensor: Tensor) -> Tensor:
        if name in keeps:
            kept.tensors[name] = tensor
        return tensor

    h1 = keep("h1", ops.norm(rows, w.ln_1, w.ln_1_bias, dtype))
    qkv = keep("qkv", linear(h1, w.c_attn, w.c_attn_bias))
    del h1  # freed at once where it is not kept
    if cache is not None:
        fill(cache, qkv.view(*x.shape[:2], -1), manner.heads)
    if level and manner.dropout:
        kept.dice = dice_state(x.device)
    attended = attend(qkv.view(*x.shape[:2], -1), manner.heads, manner.dropout)
    del qkv
    if "att" in keeps:
        kept.attended = attended
    proj = keep("proj", drop(linear(attended.out.flatten(0, 1), w.attn_proj, w.attn_proj_bias), "proj", manner, kept))
    del attended
    h2 = keep("h2", ops.norm_of_sum(rows, proj, w.ln_2, w.ln_2_bias, dtype))
    fc = keep("fc", linear(h2, w.c_fc, w.c_fc_bias))
    del h2
    g = keep("g", ops.gelu(fc))
    del fc
    down = drop(linear(g, w.mlp_proj, w.mlp_proj_bias), "down", manner, kept)
    del g
    return ops.add_both(rows, proj, down).view_as(x), kept if level else None


def backward(d_y: Tensor, d_y_rounded: Tensor, kept: Kept, w: BlockWeights, parameters: BlockWeights, manner: Manner,
             gradients: Gradients) -> tuple[Tensor, Tensor]:
    """The gradient of the block's output becomes, in place, that of its input. Weights' gradients go to `gradients`.

    Both come in two precisions: the residual stream's, and rounded for the matrix products. `w` are the weights as they
    are multiplied, `parameters` those that the gradients are of: the same, where no copies are kept.
    """
    ops, dtype, rows = manner.ops, manner.dtype, kept.x.flatten(0, 1)
    tensors, attended, h1, qkv = kept.tensors, kept.attended, None, None
    if attended is None:  # computed again, with the dice of the first time
        h1, qkv = again_qkv(kept, w, manner)
        with same_dice(kept, rows.device):
            attended = attend(qkv.view(*kept.x.shape[:2], -1), manner.heads, manner.dropout)
    att = attended.out.flatten(0, 1)
    proj = tensors.pop("proj", None)
    if proj is None:
        proj = drop_again(linear(att, w.attn_proj, w.attn_proj_bias), "proj", manner, kept)
    h2, fc, g = (tensors.pop(name, None) for name in ("h2", "fc", "g"))
    if fc is None:
        h2 = ops.norm_of_sum(rows, proj, w.ln_2, w.ln_2_bias, dtype) if h2 is None else h2
        fc = linear(h2, w.c_fc, w.c_fc_bias)

    d_down = drop_again(d_y_rounded, "down", manner, kept)
    d_fc = d_down @ w.mlp_proj.to(dtype)
    ops.gelu_backward_(fc, d_fc)
    add_linear(gradients, parameters.mlp_proj, w.mlp_proj_bias, d_down, fc if g is None else g)
    del d_down, fc, g
    d_h2 = d_fc @ w.c_fc.to(dtype)  # before its gradient is handed over: whoever takes it may change the weight
    d_proj, again, d_weight, d_bias = ops.norm_backward_(d_y, d_h2, rows, proj, w.ln_2, w.ln_2_bias, dtype, h2 is None)
    del d_h2, proj
    add_linear(gradients, parameters.c_fc, w.c_fc_bias, d_fc, cast(Tensor, again if h2 is None else h2))
    del h2, again, d_fc
    add_norm(gradients, w.ln_2, w.ln_2_bias, d_weight, d_bias)

    d_proj = drop_again(d_proj, "proj", manner, kept)
    d_att = d_proj @ w.attn_proj.to(dtype)
    add_linear(gradients, parameters.attn_proj, w.attn_proj_bias, d_proj, att)
    del d_proj, att
    if qkv is None:
        h1, qkv = again_qkv(kept, w, manner)
    d_qkv = attend_backward(d_att.view_as(kept.x), qkv.view(*kept.x.shape[:2], -1), attended, manner.heads,
                            manner.dropout).flatten(0, 1)
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


def again_qkv(kept: Kept, w: BlockWeights, manner: Manner) -> tuple[Tensor | None, Tensor]:
    """(h1, qkv), as kept or computed again; h1 is None where only qkv was kept."""
    h1, qkv = kept.tensors.pop("h1", None), kept.tensors.pop("qkv", None)
    if qkv is not None:
        return h1, qkv
    h1 = manner.ops.norm(kept.x.flatten(0, 1), w.ln_1, w.ln_1_bias, manner.dtype)
    return h1, linear(h1, w.c_attn, w.c_attn_bias)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weight is rounded to the inputs' precision here, and the copy lives no longer than the product; unless it is
    a copy already, of those that are kept."""
    return F.linear(inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))


def add_linear(gradients: Gradients, weight: Tensor, bias: Tensor | None, d_out: Tensor, inputs: Tensor) -> None:
    gradients.product(weight, d_out, inputs)
    if bias is not None:
        gradients.vector(bias, column_sums(d_out, bias.dtype))


def add_norm(gradients: Gradients, weight: Tensor, bias: Tensor | None, d_weight: Tensor,
             d_bias: Tensor | None) -> None:
    gradients.vector(weight, d_weight)
    if bias is not None:
        gradients.vector(bias, d_bias)


# ---- dropout: the masks are kept, so that what is computed again is the same

def drop(tensor: Tensor, name: str, manner: Manner, kept: Kept) -> Tensor:
    if not manner.dropout:
        return tensor
    dropped, mask = torch.ops.aten.native_dropout(tensor, manner.dropout, True)
    kept.masks[name] = mask
    return cast(Tensor, dropped)


def drop_again(tensor: Tensor, name: str, manner: Manner, kept: Kept) -> Tensor:
    """By the mask of the forward pass: to compute its result again, or to send a gradient back through it."""
    return tensor * kept.masks[name] * (1 / (1 - manner.dropout)) if manner.dropout else tensor


def dice_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class same_dice:
    """Attention's kernels roll their own dice: inside, they roll as they did in the forward pass."""

    def __init__(self, kept: Kept, device: torch.device) -> None:
        self._then, self._device = kept.dice, device

    def __enter__(self) -> None:
        if self._then is not None:
            self._now = dice_state(self._device)
            self._set(self._then)

    def __exit__(self, *_: object) -> None:
        if self._then is not None:
            self._set(self._now)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


# ---- sampling

def fill(cache: LayerCache, qkv: Tensor, heads: int) -> None:
    B, T, width = qkv.shape
    _, k, v = (part.transpose(1, 2) for part in qkv.view(B, T, 3, heads, width // 3 // heads).unbind(2))
    cache.keys[:, :, :T] = k
    cache.values[:, :, :T] = v


def next_token(x: Tensor, w: BlockWeights, heads: int, dtype: torch.dtype, cache: LayerCache,
               position: Tensor) -> Tensor:
    """The block for one more token, x [B, 1, C], at `position` [1]: every shape stays the same from token to token."""
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
