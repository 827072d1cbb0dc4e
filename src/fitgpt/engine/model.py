"""GPT-2 as nanoGPT has it: the same parameter names, shapes, initialisation and arithmetic, written to be predicted.

Weights and the residual stream are float32. Each matrix product casts its operands to `compute_dtype` in plain
sight; autocast is never used, because on CPU, CUDA and meta it is three different programs. The block is one
pure function of tensors, so that compiling it once serves every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..nouns import GPTConfig
from ..savers import loss_piece_tokens
from .loss import head_loss, token_losses


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


class LayerCache(NamedTuple):
    """Keys and values of one layer for every position of the block, for sampling. Shape [B, H, T, C/H]."""

    keys: Tensor
    values: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal self-attention, by whichever kernel torch has for this card, dtype and head width."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def block_forward(x: Tensor, w: BlockWeights, heads: int, dropout: float, dtype: torch.dtype,
                  cache: LayerCache | None = None) -> Tensor:
    """One transformer block over whole sequences: x [B, T, C] in float32 → the same. Fills the cache's first T."""
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if cache is not None:
            cache.keys[:, :, :k.shape[2]] = k
            cache.values[:, :, :v.shape[2]] = v
        return attention(q, k, v, dropout)

    return _block(x, w, heads, dropout, dtype, attend)


def block_next(x: Tensor, w: BlockWeights, heads: int, dtype: torch.dtype, cache: LayerCache,
               position: Tensor) -> Tensor:
    """The block for one more token, x [B, 1, C], at `position` [1]: every shape stays the same from token to token."""
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.keys.index_copy_(2, position, k)
        cache.values.index_copy_(2, position, v)
        seen = torch.arange(cache.keys.shape[2], device=x.device) <= position
        return F.scaled_dot_product_attention(q, cache.keys, cache.values, attn_mask=seen.unsqueeze(0))

    return _block(x, w, heads, 0.0, dtype, attend)


def _block(x: Tensor, w: BlockWeights, heads: int, dropout: float, dtype: torch.dtype,
           attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    B, T, C = x.shape

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    qkv = linear(F.layer_norm(x, (C,), w.ln_1, w.ln_1_bias), w.c_attn, w.c_attn_bias)
    q, k, v = (part.view(B, T, heads, C // heads).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    mixed = attend(q, k, v).transpose(1, 2).reshape(B, T, C)
    x = x + F.dropout(linear(mixed, w.attn_proj, w.attn_proj_bias), dropout, dropout > 0)

    wide = F.gelu(linear(F.layer_norm(x, (C,), w.ln_2, w.ln_2_bias), w.c_fc, w.c_fc_bias))
    return x + F.dropout(linear(wide, w.mlp_proj, w.mlp_proj_bias), dropout, dropout > 0)


class Linear(nn.Module):
    """Only holds parameters, under nanoGPT's names and not yet filled: the arithmetic is in `_block`."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None


class Vector(nn.Module):
    """A layer norm's parameters."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


class Table(nn.Module):
    """An embedding's parameters."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, config.bias)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, config.bias)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = Vector(config.n_embd, config.bias)
        self.attn = Attention(config)
        self.ln_2 = Vector(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def weights(self) -> BlockWeights:
        return BlockWeights(
            self.ln_1.weight, self.ln_1.bias,
            self.attn.c_attn.weight, self.attn.c_attn.bias, self.attn.c_proj.weight, self.attn.c_proj.bias,
            self.ln_2.weight, self.ln_2.bias,
            self.mlp.c_fc.weight, self.mlp.c_fc.bias, self.mlp.c_proj.weight, self.mlp.c_proj.bias)


class Transformer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = Table(config.vocab_size, config.n_embd)
        self.wpe = Table(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = Vector(config.n_embd, config.bias)


class GPT(nn.Module):
    """`model(idx, targets)` returns (None, loss); `model(idx)` returns (logits of the last position, None).

    That is nanoGPT's way of calling, except that with targets no logits are returned: they never exist whole.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.loss_chunk = 0
        self.grad_checkpoint = config.grad_checkpoint
        self._block: Callable[..., Tensor] = block_forward
        self._block_next: Callable[..., Tensor] = block_next
        self.transformer = Transformer(config)
        self.lm_head = self.transformer.wte  # tied: one table under two names
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal(0.02), residual projections narrower by √(2L), norms one, biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                narrower = math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, mean=0.0, std=0.02 / narrower)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        if targets is not None:
            return None, self.loss(idx, targets)
        return self.next_logits(idx).unsqueeze(1), None

    def loss(self, idx: Tensor, targets: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """scale × the mean loss over the targets (those equal to −1 excepted): what training differentiates."""
        hidden = self.hidden(idx).flatten(0, 1)
        return head_loss(hidden, self.lm_head.weight, targets.reshape(-1), scale, self._piece(len(hidden)))

    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token [B, T], with no gradient: what evaluation averages."""
        hidden = self.hidden(idx).flatten(0, 1)
        losses = token_losses(hidden, self.lm_head.weight, targets.reshape(-1), self._piece(len(hidden)))
        return losses.view_as(targets)

    def next_logits(self, idx: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """Logits [B, V] in float32 for the token after the last one of `idx`; fills an empty cache on the way."""
        return self._head(self.hidden(idx, cache)[:, -1])

    def logits_after(self, token: Tensor, position: Tensor, cache: list[LayerCache]) -> Tensor:
        """Logits [B, V] after one more token [B, 1] at `position` [1], all earlier ones being in the cache."""
        x = F.embedding(token, self.transformer.wte.weight) + F.embedding(position, self.transformer.wpe.weight)
        for block, layer in zip(self.blocks(), cache, strict=True):
            x = self._block_next(x, block.weights(), self.config.n_head, self.compute_dtype, layer, position)
        return self._head(self._final_norm(x)[:, -1])

    def new_cache(self, batch: int) -> list[LayerCache]:
        config = self.config
        shape = (batch, config.n_head, config.block_size, config.n_embd // config.n_head)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=self.compute_dtype, device=self.lm_head.weight.device)

        return [LayerCache(zeros(), zeros()) for _ in range(config.n_layer)]

    def hidden(self, idx: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """Token ids [B, T] → normalised hidden states [B, T, C] in the compute dtype, ready for the head."""
        config, dropout = self.config, self.config.dropout if self.training else 0.0
        if idx.shape[1] > config.block_size:
            raise ValueError(f"{idx.shape[1]} tokens do not fit a block_size of {config.block_size}")
        x = F.embedding(idx, self.transformer.wte.weight) + self.transformer.wpe.weight[:idx.shape[1]]
        x = F.dropout(x, dropout, dropout > 0)
        recompute = self.grad_checkpoint and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks()):
            arguments = (x, block.weights(), config.n_head, dropout, self.compute_dtype)
            if cache is not None:
                x = block_forward(*arguments, cache[layer])
            elif recompute:
                x = checkpoint(self._block, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)
            else:
                x = self._block(*arguments)
        return self._final_norm(x)

    def compile_blocks(self) -> None:
        """One compiled function for all layers: it starts several times sooner than compiling the model."""
        self._block = torch.compile(block_forward, fullgraph=True, dynamic=False)
        self._block_next = torch.compile(block_next, fullgraph=True, dynamic=False)

    def gradient_checkpointing_enable(self) -> None:
        """From the next forward on, each block keeps its input only and is computed again in the backward pass."""
        self.grad_checkpoint = True

    def gradient_checkpointing_disable(self) -> None:
        self.grad_checkpoint = False

    def get_num_params(self, non_embedding: bool = True) -> int:
        """nanoGPT's count: without the position embeddings unless asked."""
        return self.config.count_params(positions=not non_embedding)

    def blocks(self) -> Iterator[Block]:
        return cast("Iterator[Block]", iter(self.transformer.h))

    def weight_tensors(self) -> dict[str, Tensor]:
        """Every weight once, under nanoGPT's names; the tied head is wte."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load_weight_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies weights in place; names and shapes were checked where they were read."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])

    def _final_norm(self, x: Tensor) -> Tensor:
        norm = self.transformer.ln_f
        return F.layer_norm(x, (self.config.n_embd,), norm.weight, norm.bias).to(self.compute_dtype)

    def _head(self, last: Tensor) -> Tensor:
        return F.linear(last, self.lm_head.weight.to(last.dtype)).float()

    def _piece(self, tokens: int) -> int:
        return loss_piece_tokens(tokens, self.config.vocab_size, self.loss_chunk)


def build_model(config: GPTConfig, device: torch.device, seed: int) -> GPT:
    """A model with fresh weights, made where it will live: no tensor exists twice."""
    torch.manual_seed(seed)
    with device:
        return GPT(config)
