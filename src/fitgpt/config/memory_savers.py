"""Ways to hold less, declared once: the engine obeys these figures and the planner reads the same ones."""

from __future__ import annotations

from typing import NamedTuple

from ..core.units import MiB


class Saver(NamedTuple):
    """A way to hold less. Exact: the same arithmetic up to rounding order. Letters: see nouns.py; P parameters."""

    flag: str       # how it is switched on, alone
    exact: bool
    saves: str      # what is not held
    costs: str
    needs: str = "" # what must hold for it to work


SAVERS = (
    Saver("--loss_chunk=1024", True, "all logits but those of 1024 tokens: the default, 0, chooses the piece",
          "smaller matrix products: not measured"),
    Saver("--recompute=products", True, "12 bytes × tokens × C in each layer against --recompute=all: the norms' and "
          "GELU's results; the default", "norms and GELU again: not measured alone"),
    Saver("--recompute=no_wide", True, "8 bytes × tokens × C in each layer: the MLP's wide product",
          "one of a block's four products again: 5 % of the speed (GPT-2 124M on an H200)"),
    Saver("--recompute=attention_projection", True, "14 bytes × tokens × C in each layer: also q, k and v",
          "two of the four products again"),
    Saver("--recompute=attention", True, "16 bytes × tokens × C in each layer: also attention's projection",
          "three of the four products again"),
    Saver("--recompute=input", True, "18 bytes × tokens × C in each layer: everything but the block's input; the "
          "same as --grad_checkpoint", "the whole forward pass again: a third more arithmetic"),
    Saver("--offload=optimizer", True, "8P: AdamW's moments live in the host's memory (16P there)",
          "a copy of gradients and weights over the bus at every step, and AdamW on the CPU",
          "optimizer=adamw, states=early"),
    Saver("--offload=gradients", True, "12P: gradients too, each leaves the card as it is made",
          "gradients over the bus at every micro-step, weights at every step, AdamW on the CPU; no recorded GPU work",
          "optimizer=adamw, gradients=freed, states=early"),
    Saver("--casts=brief", True, "2 bytes for each number of the matrices against --casts=kept: copies of them in half "
          "precision live as long as the product that needs them; the default",
          "each is made twice a micro-step instead of once a step: 0.6 % slower (124M on an H200)"),
    Saver("--gradients=freed", True, "4P while a run evaluates, against --gradients=kept: each step's gradients go "
          "once they are applied, unless recorded GPU work knows their places; the default", "nothing: not timed"),
    Saver("--states=early", True, "nothing in the end, but against --states=late no step asks for more than the first: "
          "the optimizer's state is there before it; the default", "nothing"),
    Saver("--weights=bfloat16", False, "4P: matrices and their gradients in 2 bytes, rounded by chance at every step",
          "nothing: 2 % faster (124M on an H200), 5 % with residual=bfloat16 and adam8bit",
          "optimizer=adamw or adam8bit"),
    Saver("--residual=bfloat16", False, "2 bytes × tokens × C in each layer: the stream between blocks",
          "nothing: 3 % faster (124M on an H200), 5 % with weights=bfloat16 and adam8bit"),
    Saver("--optimizer=adam8bit", False, "6P: AdamW's moments in one byte each",
          "nothing in speed alone; with bfloat16 weights and residual 5 % faster",
          "offload=none"),
    Saver("--adam8bit=bitsandbytes", False, "6P, as --optimizer=adam8bit alone: the same by bitsandbytes, which "
          "many know, and which has a kernel where there is CUDA and no Triton, as on Windows",
          "the host waits for the card once a step: 3 % slower (124M on an H200)",
          "optimizer=adam8bit, weights=float32, offload=none, step_in_backward=False"),
    Saver("--optimizer=muon", False, "4 bytes for each of the blocks' weights: one momentum instead of two moments",
          "five small products for each matrix at every step", "weights=float32, offload=none"),
    Saver("--step_in_backward", False, "nearly all gradients: each is applied as it is made",
          "no clipping, no accumulation, no skipping of a step that is not finite",
          "gradient_accumulation_steps=1, grad_clip=0, dtype other than float16, optimizer=adamw or adam8bit, "
          "offload=none, gradients=freed, states=early"),
)

# What a block keeps between the forward and the backward pass, besides its input. Nested: each level keeps less
# than the one before and computes more again. The names are those of engine/block.py.
KEEPS: dict[str, frozenset[str]] = {
    "all": frozenset({"h1", "qkv", "att", "proj", "h2", "fc", "g"}),
    "products": frozenset({"qkv", "att", "proj", "fc"}),          # matrix products and attention
    "no_wide": frozenset({"qkv", "att", "proj"}),                 # the same without the one of width 4C
    "attention_projection": frozenset({"att", "proj"}),
    "attention": frozenset({"att"}),
    "input": frozenset(),
}
LEVELS = tuple(KEEPS)


def parse_levels(text: str, layers: int) -> list[str] | str:
    """'products', or '7*no_wide, 5*products' from the first layer to the last: a level a layer, or what is wrong."""
    parts = [part.strip().rpartition("*")[::2] for part in text.split(",")]
    unknown = [name for _, name in parts if name.strip() not in KEEPS]
    if unknown or not all(count.strip().isdecimal() for count, _ in parts if count.strip() or len(parts) > 1):
        return f"must be one of {', '.join(LEVELS)}, or counts of them such as 7*no_wide,5*products"
    if len(parts) == 1 and not parts[0][0].strip():
        return [parts[0][1].strip()] * layers
    levels = [name.strip() for count, name in parts for _ in range(int(count))]
    if len(levels) != layers:
        return f"names {len(levels)} layers, and there are {layers}"
    return levels


# The loss is computed in pieces of this many bytes of logits. At GPT-2's vocabulary and in half precision that is
# 2048 tokens: less than the activations of any run in config/; other sizes have not been timed.
LOSS_PIECE_BYTES = 208 * MiB


def loss_piece_tokens(tokens: int, vocab_size: int, asked: int = 0) -> int:
    """How many of a micro-batch's tokens the loss handles at once: as asked, else the power of two that fits."""
    if asked:
        return min(asked, tokens)
    piece = 1 << max(0, (LOSS_PIECE_BYTES // (2 * vocab_size)).bit_length() - 1)
    return min(max(piece, 128), tokens)


# Optimizers that keep less.
GROUP = 256              # numbers that share a scale, as in the papers on 8-bit optimizers
SMALLEST_ROUNDED = 4096  # smaller parameters (norms, biases) keep float32 states: they weigh nothing
AT_ONCE = 2**22          # numbers updated at once where there is no fused kernel: bounds what that needs besides
MUON_ROUNDS = 5          # of Newton–Schulz
