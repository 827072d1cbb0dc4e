"""GPT-2 as in nanoGPT: the same parameter names, shapes, initialisation and arithmetic, with predictable memory.

Weights and the residual stream are float32. Each matmul casts its operands to `compute_dtype` explicitly; autocast is
not used, because it behaves differently on CPU, CUDA and meta. Training does not use autograd either: forward and
backward are written out (block.py, ops.py), so that the lifetime of every tensor is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.architectures import GPTConfig
from ..config.memory_savers import loss_chunk_tokens
from ..config.run_config import RunConfig
from . import block as one_block
from . import ops
from .annotate import named, span
from .block import BlockOptions, BlockWeights, LayerCache
from .device import triton_works
from .ops import AccumulateIntoGrad, GradientDict, Gradients

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Params(nn.Module):
    """An uninitialised weight and its bias, under nanoGPT's names. The arithmetic is in block.py."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = Params(3 * config.n_embd, config.n_embd, bias=config.bias)
        self.c_proj = Params(config.n_embd, config.n_embd, bias=config.bias)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Params(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.c_proj = Params(config.n_embd, 4 * config.n_embd, bias=config.bias)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = Params(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = Params(config.n_embd, bias=config.bias)
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
        self.wte = Params(config.vocab_size, config.n_embd)
        self.wpe = Params(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = Params(config.n_embd, bias=config.bias)


class GPT(nn.Module):
    """`model(idx, targets)` returns (None, loss); `model(idx)` returns (logits of the last position, None).

    As in nanoGPT, except that with targets no logits are returned: they are computed in chunks and never exist whole.
    autograd can differentiate the loss as usual; fitgpt's own loop calls `accumulate` instead.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not a multiple of n_head={config.n_head}")
        self.config = config
        self.compute_dtype = torch.float32   # of the matmuls
        self.residual_dtype: torch.dtype | None = None  # of the residual stream; None: the weights' own
        self.loss_chunk = 0
        self.ops = ops.EAGER
        self._casts: dict[int, Tensor] = {}  # weights cast to compute_dtype, by the parameter's id
        self._block_next = one_block.next_token
        self.recompute_policies = ["matmuls"] * config.n_layer  # of each layer: see memory_savers.SAVED_TENSORS
        if config.grad_checkpoint:
            self.gradient_checkpointing_enable()
        self.transformer = Transformer(config)
        self.lm_head = self.transformer.wte  # tied: one parameter under two names
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal(0.02), residual projections divided by √(2L), norms one, biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                divisor = math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 1.0
                parameter.normal_(mean=0.0, std=0.02 / divisor)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    # ---- training

    @torch.no_grad()
    def accumulate(self, idx: Tensor, targets: Tensor, scale: Tensor, gradients: Gradients | None = None) -> Tensor:
        """Adds the gradients of scale × mean loss to `.grad`, or passes them to `gradients`; returns that loss."""
        gradients, options = gradients or AccumulateIntoGrad(), self._block_options()
        with span("embedding"):
            x, mask = self._embed(idx, options.dropout)
        saved: list[one_block.SavedForBackward] = []
        for layer, block in enumerate(self.blocks()):
            with span("forward", layer):
                x, saved_by_block = one_block.forward(x, self._cast_weights(block), options,
                                                      self.recompute_policies[layer])
                saved.append(cast(one_block.SavedForBackward, saved_by_block))
                del saved_by_block
        with span("head"):
            rows = named("x", x).flatten(0, 1)
            loss, d_x, d_x_rounded = self._head_backward(rows, targets.reshape(-1), scale, gradients)
            del x, rows  # from here on only the list refers to saved tensors
        for layer, block in reversed(list(enumerate(self.blocks()))):
            with span("backward", layer):
                d_x, d_x_rounded = one_block.backward(d_x, d_x_rounded, saved.pop(), self._cast_weights(block),
                                                      block.weights(), options, gradients)
        with span("embedding backward"):
            self._embed_backward(d_x, idx, mask, gradients)
            del d_x, d_x_rounded, mask
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
        loss = ops.loss_and_gradient_(hidden, self.lm_head.weight, targets, scale, self._chunk(len(rows)), gradients,
                                      self._casts.get(id(self.lm_head.weight)))
        d_rows = torch.zeros_like(rows)
        d_rounded, _, d_weight, d_bias = self.ops.norm_backward_(d_rows, hidden, rows, None, norm.weight, norm.bias,
                                                                 dtype, False)
        one_block.add_norm(gradients, norm.weight, norm.bias, d_weight, d_bias)
        return loss, d_rows, d_rounded

    def _embed_backward(self, d_x: Tensor, idx: Tensor, mask: Tensor | None, gradients: Gradients) -> None:
        if mask is not None:
            d_x = d_x * mask.flatten(0, 1) * (1 / (1 - self.config.dropout))
        gradients.embedding(self.transformer.wte.weight, idx.reshape(-1), d_x)
        wpe, wide = self.transformer.wpe.weight, self.transformer.ln_f.weight.dtype
        if torch.are_deterministic_algorithms_enabled() and idx.shape[1] == len(wpe):  # every row once, in order
            gradients.vector(wpe, d_x.view(*idx.shape, -1).sum(0, dtype=wide))
            return
        positions = torch.arange(idx.shape[1], device=idx.device)
        gradients.embedding(wpe, positions, d_x.view(*idx.shape, -1).sum(0, dtype=wide))

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
        head = self._casts.get(id(self.lm_head.weight), self.lm_head.weight)
        losses = ops.token_losses(hidden, head, targets.reshape(-1), self._chunk(len(hidden)))
        return losses.view_as(targets)

    @torch.no_grad()
    def hidden(self, idx: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Token ids [B, T] → normalised hidden states [B, T, C] in the compute dtype, ready for the head."""
        options = self._block_options()
        x, _ = self._embed(idx, options.dropout)
        for layer, block in enumerate(self.blocks()):
            with span("forward", layer):
                x, _ = one_block.forward(x, self._cast_weights(block), options, cache=cache[layer] if cache else None)
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
        return self._head(ops.norm(x[:, -1], norm.weight, norm.bias, self.compute_dtype))

    def new_cache(self, batch: int) -> list[LayerCache]:
        config = self.config
        shape = (batch, config.n_head, config.block_size, config.n_embd // config.n_head)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=self.compute_dtype, device=self.lm_head.weight.device)

        return [LayerCache(zeros(), zeros()) for _ in range(config.n_layer)]

    # ---- precision, compilation, recomputation

    def round_matrices(self, dtype: torch.dtype) -> None:
        """Casts matrices and embeddings; norms and biases keep their precision. Call before the optimizer is made."""
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                parameter.data = parameter.data.to(dtype)

    def cache_casts(self) -> None:
        """Keeps one cast of each weight matrix, instead of casting for every matmul. From then on call `refresh_casts`
        after weights change."""
        matrices = [getattr(block.weights(), name) for block in self.blocks() for name in one_block.MATRICES]
        self._casts = {id(matrix): matrix.detach().to(self.compute_dtype)
                        for matrix in (self.lm_head.weight, *matrices) if matrix.dtype != self.compute_dtype}

    @torch.no_grad()
    def refresh_casts(self) -> None:
        """Casts again after the weights have changed; nothing to do without cached casts."""
        for parameter in self.parameters() if self._casts else ():
            if id(parameter) in self._casts:
                self._casts[id(parameter)].copy_(parameter)

    def compile(self, *_: Any, **__: Any) -> None:
        """Compiles everything between two matmuls: one kernel per function and shape, shared by all layers."""
        self.ops = ops.compiled(fused=self.lm_head.weight.device.type == "cuda" and triton_works())
        self._block_next = torch.compile(one_block.next_token, fullgraph=True, dynamic=False)

    def gradient_checkpointing_enable(self) -> None:
        """From the next step on each block saves only its input and is recomputed in the backward pass."""
        self.recompute_policies = ["input"] * self.config.n_layer

    def gradient_checkpointing_disable(self) -> None:
        self.recompute_policies = ["matmuls"] * self.config.n_layer

    def get_num_params(self, non_embedding: bool = True) -> int:
        """nanoGPT's count: without position embeddings by default."""
        return self.config.count_params(positions=not non_embedding)

    def blocks(self) -> Iterator[Block]:
        return cast("Iterator[Block]", iter(self.transformer.h))

    def weight_tensors(self) -> dict[str, Tensor]:
        """Every weight once, under nanoGPT's names; the tied head is wte."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load_weight_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies weights in place. Names and shapes must have been checked: see weights.fill."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])

    def _cast_weights(self, block: Block) -> BlockWeights:
        """A block's weights for matmuls: cached casts, or the weights themselves."""
        weights = block.weights()
        casts = {name: self._casts.get(id(getattr(weights, name))) for name in one_block.MATRICES}
        return weights._replace(**{name: cast for name, cast in casts.items() if cast is not None})

    def _block_options(self) -> BlockOptions:
        dropout = self.config.dropout if self.training else 0.0
        return BlockOptions(self.config.n_head, dropout, self.compute_dtype, self.ops)

    def _head(self, last: Tensor) -> Tensor:
        return named("logits", F.linear(last, self.lm_head.weight.to(last.dtype))).float()

    def _chunk(self, tokens: int) -> int:
        return loss_chunk_tokens(tokens, self.config.vocab_size, self.loss_chunk)


class _Loss(torch.autograd.Function):
    """The written-out passes as an autograd function: the loss, and a gradient per parameter."""

    @staticmethod
    def forward(ctx: Any, model: GPT, idx: Tensor, targets: Tensor, *parameters: Tensor) -> Tensor:
        gradients_by_id = GradientDict()
        loss = model.accumulate(idx, targets, torch.ones((), device=idx.device), gradients_by_id)
        ctx.gradients = [gradients_by_id.of.get(id(parameter)) for parameter in parameters]
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *(None if g is None else g * grads[0] for g in ctx.gradients))


def build_model(config: GPTConfig, device: torch.device, seed: int) -> GPT:
    """A newly initialised model, created on the device: no tensor exists twice."""
    torch.manual_seed(seed)
    with device:
        return GPT(config)


def make_model(config: RunConfig, device: torch.device, *, dtype: str, compiled: bool) -> GPT:
    """A newly initialised model with the precision, recompute policies and casts of a run."""
    model = build_model(config.gpt_config(), device, config.seed)
    model.compute_dtype, model.residual_dtype = DTYPES[dtype], DTYPES[config.residual]
    model.loss_chunk, model.recompute_policies = config.loss_chunk, list(config.policies)
    if compiled:
        model.compile()
    model.round_matrices(DTYPES[config.weights])
    if config.casts == "kept":
        model.cache_casts()
    return model
