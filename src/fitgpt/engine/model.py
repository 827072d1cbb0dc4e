"""GPT-2 as nanoGPT has it: the same parameter names, shapes, initialisation and arithmetic, written to be predicted.

Weights and the residual stream are float32. Each matrix product casts its operands to `compute_dtype` in plain
sight; autocast is never used, because on CPU, CUDA and meta it is three different programs. The block is one
pure function of tensors, so that compiling it once serves every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

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


class LayerCache:
    """Keys and values of one layer for the tokens seen so far, for sampling. Shape [B, H, T, C/H]."""

    def __init__(self, batch: int, heads: int, block: int, head_width: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.keys = torch.empty(batch, heads, block, head_width, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length:end] = keys
        self.values[:, :, self.length:end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal self-attention, by whichever kernel torch has for this card, dtype and head width."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=q.shape[2] > 1)


def block_forward(x: Tensor, w: BlockWeights, heads: int, dropout: float, dtype: torch.dtype,
                  cache: LayerCache | None = None) -> Tensor:
    """One transformer block: x [B, T, C] in float32 → the same."""
    B, T, C = x.shape

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    qkv = linear(F.layer_norm(x, (C,), w.ln_1, w.ln_1_bias), w.c_attn, w.c_attn_bias)
    q, k, v = (part.view(B, T, heads, C // heads).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    if cache is not None:
        k, v = cache.extend(k, v)
    mixed = attention(q, k, v, dropout).transpose(1, 2).reshape(B, T, C)
    x = x + F.dropout(linear(mixed, w.attn_proj, w.attn_proj_bias), dropout, dropout > 0)

    wide = F.gelu(linear(F.layer_norm(x, (C,), w.ln_2, w.ln_2_bias), w.c_fc, w.c_fc_bias))
    return x + F.dropout(linear(wide, w.mlp_proj, w.mlp_proj_bias), dropout, dropout > 0)


class LayerNorm(nn.Module):
    """Only holds the parameters, under nanoGPT's names: the arithmetic is in `block_forward`."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def weights(self) -> BlockWeights:
        return BlockWeights(
            self.ln_1.weight, self.ln_1.bias,
            self.attn.c_attn.weight, self.attn.c_attn.bias, self.attn.c_proj.weight, self.attn.c_proj.bias,
            self.ln_2.weight, self.ln_2.bias,
            self.mlp.c_fc.weight, self.mlp.c_fc.bias, self.mlp.c_proj.weight, self.mlp.c_proj.bias)


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
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": LayerNorm(config.n_embd, config.bias),
        })
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self._embedding("wte").weight
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
        """Logits [B, V] in float32 for the token after the last one of `idx`."""
        last = self.hidden(idx, cache)[:, -1]
        return F.linear(last, self.lm_head.weight.to(last.dtype)).float()

    def hidden(self, idx: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """Token ids [B, T] → normalised hidden states [B, T, C] in the compute dtype, ready for the head."""
        config, dropout = self.config, self.config.dropout if self.training else 0.0
        first = cache[0].length if cache else 0
        if first + idx.shape[1] > config.block_size:
            raise ValueError(f"{first + idx.shape[1]} tokens do not fit a block_size of {config.block_size}")
        positions = self._embedding("wpe").weight[first:first + idx.shape[1]]
        x = F.dropout(self._embedding("wte")(idx) + positions, dropout, dropout > 0)
        recompute = self.grad_checkpoint and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks()):
            arguments = (x, block.weights(), config.n_head, dropout, self.compute_dtype)
            if cache is not None:
                x = block_forward(*arguments, cache[layer])
            elif recompute:
                x = checkpoint(self._block, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)
            else:
                x = self._block(*arguments)
        final = cast(LayerNorm, self.transformer["ln_f"])
        return F.layer_norm(x, (config.n_embd,), final.weight, final.bias).to(self.compute_dtype)

    def new_cache(self, batch: int) -> list[LayerCache]:
        config, weight = self.config, self.lm_head.weight
        return [LayerCache(batch, config.n_head, config.block_size, config.n_embd // config.n_head,
                           self.compute_dtype, weight.device) for _ in range(config.n_layer)]

    def compile_blocks(self) -> None:
        """One compiled function for all layers: it starts several times sooner than compiling the model."""
        self._block = torch.compile(block_forward, fullgraph=True, dynamic=False)

    def gradient_checkpointing_enable(self) -> None:
        """From the next forward on, each block keeps its input only and is computed again in the backward pass."""
        self.grad_checkpoint = True

    def gradient_checkpointing_disable(self) -> None:
        self.grad_checkpoint = False

    def get_num_params(self, non_embedding: bool = True) -> int:
        """nanoGPT's count: without the position embeddings unless asked."""
        return self.config.count_params(positions=not non_embedding)

    def blocks(self) -> Iterator[Block]:
        return iter(cast(Any, self.transformer["h"]))

    def weight_tensors(self) -> dict[str, Tensor]:
        """Every weight once, under nanoGPT's names; the tied head is wte."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load_weight_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copies weights in place; names and shapes were checked where they were read."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])

    def _embedding(self, name: str) -> nn.Embedding:
        return cast(nn.Embedding, self.transformer[name])

    def _piece(self, tokens: int) -> int:
        return loss_piece_tokens(tokens, self.config.vocab_size, self.loss_chunk)
