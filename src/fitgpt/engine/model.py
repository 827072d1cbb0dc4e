"""GPT-2 as nanoGPT has it: the same parameter names, shapes, initialisation and arithmetic, written to be predicted.

Weights and the residual stream are float32. Each matrix product rounds its operands to `compute_dtype` in plain
sight; autocast is never used, because on CPU, CUDA and meta it is three different programs. Training does not use
autograd either: forward and backward are written out (block.py, loss.py), so that what lives when is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.memory_savers import loss_piece_tokens
from ..nouns import GPTConfig
from . import block as one_block
from . import pointwise
from .block import BlockWeights, LayerCache, Manner
from .chunked_loss import loss_and_gradient_, token_losses, triton_works
from .gradient_sinks import Collected, Gradients, IntoGrad


class Linear(nn.Module):
    """Only holds parameters, under nanoGPT's names and not yet filled: the arithmetic is in block.py."""

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
    The loss can be differentiated by autograd as usual; fitgpt's own loop calls `accumulate` instead.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not a multiple of n_head={config.n_head}")
        self.config = config
        self.compute_dtype = torch.float32   # of the matrix products
        self.residual_dtype: torch.dtype | None = None  # of the stream between blocks; None: the weights' own
        self.loss_chunk = 0
        self.ops = pointwise.EAGER
        self._copies: dict[int, Tensor] = {}  # of matrices in the products' precision, by the parameter's id
        self._block_next = one_block.next_token
        self.levels: list[str] = ["products"] * config.n_layer  # what each layer keeps: see savers.KEEPS
        if config.grad_checkpoint:
            self.gradient_checkpointing_enable()
        self.transformer = Transformer(config)
        self.lm_head = self.transformer.wte  # tied: one table under two names
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal(0.02), residual projections narrower by √(2L), norms one, biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                narrower = math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 1.0
                parameter.normal_(mean=0.0, std=0.02 / narrower)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    # ---- training

    @torch.no_grad()
    def accumulate(self, idx: Tensor, targets: Tensor, scale: Tensor, gradients: Gradients | None = None) -> Tensor:
        """Adds the gradients of scale × the mean loss to `.grad` (or hands them to `gradients`); returns that loss."""
        gradients, manner = gradients or IntoGrad(), self._manner()
        x, mask = self._embed(idx, manner.dropout)
        kept: list[one_block.Kept] = []
        for layer, block in enumerate(self.blocks()):
            x, what_it_keeps = one_block.forward(x, self._multiplied(block), manner, self.levels[layer])
            kept.append(cast(one_block.Kept, what_it_keeps))
        loss, d_x, d_x_rounded = self._head_backward(x.flatten(0, 1), targets.reshape(-1), scale, gradients)
        del x, what_it_keeps  # from here on the list alone holds what the blocks kept
        for block in reversed(list(self.blocks())):
            d_x, d_x_rounded = one_block.backward(d_x, d_x_rounded, kept.pop(), self._multiplied(block),
                                                  block.weights(), manner, gradients)
        self._embed_backward(d_x, idx, mask, gradients)
        return loss

    def _embed(self, idx: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
        if idx.shape[1] > self.config.block_size:
            raise ValueError(f"{idx.shape[1]} tokens do not fit a block_size of {self.config.block_size}")
        x = F.embedding(idx, self.transformer.wte.weight) + self.transformer.wpe.weight[:idx.shape[1]]
        x = x.to(self.residual_dtype or self.transformer.ln_f.weight.dtype)
        return cast("tuple[Tensor, Tensor]", torch.ops.aten.native_dropout(x, dropout, True)) if dropout else (x, None)

    def _head_backward(self, rows: Tensor, targets: Tensor, scale: Tensor,
                       gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
        norm, dtype = self.transformer.ln_f, self.compute_dtype
        hidden = self.ops.norm(rows, norm.weight, norm.bias, dtype)
        loss = loss_and_gradient_(hidden, self.lm_head.weight, targets, scale, self._piece(len(rows)), gradients,
                                  self._copies.get(id(self.lm_head.weight)))
        d_rows = torch.zeros_like(rows)
        d_rounded, _, d_weight, d_bias = self.ops.norm_backward_(d_rows, hidden, rows, None, norm.weight, norm.bias,
                                                                 dtype, False)
        one_block.add_norm(gradients, norm.weight, norm.bias, d_weight, d_bias)
        return loss, d_rows, d_rounded

    def _embed_backward(self, d_x: Tensor, idx: Tensor, mask: Tensor | None, gradients: Gradients) -> None:
        if mask is not None:
            d_x = d_x * mask.flatten(0, 1) * (1 / (1 - self.config.dropout))
        gradients.rows(self.transformer.wte.weight, idx.reshape(-1), d_x)
        positions, wide = torch.arange(idx.shape[1], device=idx.device), self.transformer.ln_f.weight.dtype
        gradients.rows(self.transformer.wpe.weight, positions, d_x.view(*idx.shape, -1).sum(0, dtype=wide))

    # ---- as a torch module

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        if targets is None:
            return self.next_logits(idx).unsqueeze(1), None
        if torch.is_grad_enabled():
            return None, _Loss.apply(self, idx, targets, *self.parameters())  # type: ignore[no-untyped-call]
        counted = (targets != -1).sum().clamp(min=1)
        return None, self.token_losses(idx, targets).sum() / counted

    @torch.no_grad()
    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token [B, T]: what evaluation averages."""
        hidden = self.hidden(idx).flatten(0, 1)
        head = self._copies.get(id(self.lm_head.weight), self.lm_head.weight)
        losses = token_losses(hidden, head, targets.reshape(-1), self._piece(len(hidden)))
        return losses.view_as(targets)

    @torch.no_grad()
    def hidden(self, idx: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Token ids [B, T] → normalised hidden states [B, T, C] in the compute dtype, ready for the head."""
        manner = self._manner()
        x, _ = self._embed(idx, manner.dropout)
        for layer, block in enumerate(self.blocks()):
            x, _ = one_block.forward(x, self._multiplied(block), manner, cache=cache[layer] if cache else None)
        norm = self.transformer.ln_f
        return self.ops.norm(x.flatten(0, 1), norm.weight, norm.bias, self.compute_dtype).view_as(x)

    # ---- sampling

    def next_logits(self, idx: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Logits [B, V] in float32 for the token after the last one of `idx`; fills an empty cache on the way."""
        return self._head(self.hidden(idx, cache)[:, -1])

    @torch.no_grad()
    def logits_after(self, token: Tensor, position: Tensor, cache: Sequence[LayerCache]) -> Tensor:
        """Logits [B, V] after one more token [B, 1] at `position` [1], all earlier ones being in the cache."""
        x = F.embedding(token, self.transformer.wte.weight) + F.embedding(position, self.transformer.wpe.weight)
        for block, layer in zip(self.blocks(), cache, strict=True):
            x = self._block_next(x, block.weights(), self.config.n_head, self.compute_dtype, layer, position)
        norm = self.transformer.ln_f
        return self._head(pointwise.norm(x[:, -1], norm.weight, norm.bias, self.compute_dtype))

    def new_cache(self, batch: int) -> list[LayerCache]:
        config = self.config
        shape = (batch, config.n_head, config.block_size, config.n_embd // config.n_head)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=self.compute_dtype, device=self.lm_head.weight.device)

        return [LayerCache(zeros(), zeros()) for _ in range(config.n_layer)]

    # ---- how it computes

    def round_matrices(self, dtype: torch.dtype) -> None:
        """Matrices and tables in another precision; the norms' vectors stay in theirs. Before the optimizer is made."""
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                parameter.data = parameter.data.to(dtype)

    def keep_copies(self) -> None:
        """Copies of the matrices in the products' precision, once, instead of one for as long as each product takes.
        From then on whoever changes a weight has the copies renewed before they are used."""
        matrices = [getattr(block.weights(), name) for block in self.blocks() for name in one_block.MATRICES]
        self._copies = {id(matrix): matrix.detach().to(self.compute_dtype)
                        for matrix in (self.lm_head.weight, *matrices) if matrix.dtype != self.compute_dtype}

    @torch.no_grad()
    def renew_copies(self) -> None:
        """After the weights have changed; nothing to do where no copies are kept."""
        for parameter in self.parameters() if self._copies else ():
            if id(parameter) in self._copies:
                self._copies[id(parameter)].copy_(parameter)

    def compile(self, *_: Any, **__: Any) -> None:
        """Compiles what lies between matrix products: one kernel a function and shape, shared by all layers."""
        self.ops = pointwise.compiled(fused=self.lm_head.weight.device.type == "cuda" and triton_works())
        self._block_next = torch.compile(one_block.next_token, fullgraph=True, dynamic=False)

    def gradient_checkpointing_enable(self) -> None:
        """From the next step on, each block keeps its input only and is computed again in the backward pass."""
        self.levels = ["input"] * self.config.n_layer

    def gradient_checkpointing_disable(self) -> None:
        self.levels = ["products"] * self.config.n_layer

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

    def _multiplied(self, block: Block) -> BlockWeights:
        """A block's weights as products take them: the copies that are kept, or the weights themselves."""
        weights = block.weights()
        copies = {name: self._copies.get(id(getattr(weights, name))) for name in one_block.MATRICES}
        return weights._replace(**{name: copy for name, copy in copies.items() if copy is not None})

    def _manner(self) -> Manner:
        return Manner(self.config.n_head, self.config.dropout if self.training else 0.0, self.compute_dtype, self.ops)

    def _head(self, last: Tensor) -> Tensor:
        return F.linear(last, self.lm_head.weight.to(last.dtype)).float()

    def _piece(self, tokens: int) -> int:
        return loss_piece_tokens(tokens, self.config.vocab_size, self.loss_chunk)


class _Loss(torch.autograd.Function):
    """The written-out passes as autograd sees them: the loss, and a gradient for every parameter."""

    @staticmethod
    def forward(ctx: Any, model: GPT, idx: Tensor, targets: Tensor, *parameters: Tensor) -> Tensor:
        collected = Collected()
        loss = model.accumulate(idx, targets, torch.ones((), device=idx.device), collected)
        ctx.gradients = [collected.of.get(id(parameter)) for parameter in parameters]
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *(None if g is None else g * grads[0] for g in ctx.gradients))


def build_model(config: GPTConfig, device: torch.device, seed: int) -> GPT:
    """A model with fresh weights, made where it will live: no tensor exists twice."""
    torch.manual_seed(seed)
    with device:
        return GPT(config)
