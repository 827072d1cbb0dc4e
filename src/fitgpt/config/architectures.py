"""The shape of a model, and its parameters with their names and shapes: one entry in ARCHITECTURES per architecture.

Shape letters are the same everywhere: B batch, T block, C width, H heads, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

Shapes = dict[str, tuple[int, ...]]  # name of a parameter → its shape
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # per element


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, under nanoGPT's names and with nanoGPT's defaults."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    grad_checkpoint: bool = False

    def count_params(self, *, positions: bool = True) -> int:
        """Number of parameters, the tied head counted once; nanoGPT prints the count without positions."""
        outside, block = _gpt2_outside(self), _gpt2_block(self)
        total = sum(map(prod, outside.values())) + self.n_layer * sum(map(prod, block.values()))
        return total if positions else total - prod(outside[POSITIONS])


IGNORE_INDEX = -1     # targets that do not count in the loss, as in nanoGPT
NORM_EPSILON = 1e-5   # of layer norms, as in GPT-2
EMBEDDING, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"


def parameter_shapes(config: GPTConfig) -> Shapes:
    """Every parameter of the model with its shape, in the order of torch's `named_parameters()`.

    The output head is tied to the token embedding and is not listed. Weight matrices have two dimensions (outputs,
    inputs), as torch.nn.Linear stores them; biases and norms have one.
    """
    return ARCHITECTURES["gpt2"](config)


def _gpt2(config: GPTConfig) -> Shapes:
    outside = _gpt2_outside(config)
    first = {name: outside.pop(name) for name in (EMBEDDING, POSITIONS)}
    blocks = {f"transformer.h.{layer}.{name}": shape
              for layer in range(config.n_layer) for name, shape in _gpt2_block(config).items()}
    return first | blocks | outside


def _gpt2_outside(config: GPTConfig) -> Shapes:
    """Parameters outside the blocks: embeddings and the last norm."""
    c = config.n_embd
    return {EMBEDDING: (config.vocab_size, c), POSITIONS: (config.block_size, c),
            **_with_bias(config, "transformer.ln_f", c)}


def _gpt2_block(config: GPTConfig) -> Shapes:
    """Parameters of one block."""
    c = config.n_embd
    return {**_with_bias(config, "ln_1", c),
            **_with_bias(config, "attn.c_attn", 3 * c, c), **_with_bias(config, "attn.c_proj", c, c),
            **_with_bias(config, "ln_2", c),
            **_with_bias(config, "mlp.c_fc", 4 * c, c), **_with_bias(config, "mlp.c_proj", c, 4 * c)}


def _with_bias(config: GPTConfig, name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if config.bias else {})


# What has to be known of an architecture before torch is loaded: the shapes of its parameters.
ARCHITECTURES: dict[str, Callable[[GPTConfig], Shapes]] = {
    "gpt2": _gpt2,  # as nanoGPT's model.py has it
}
