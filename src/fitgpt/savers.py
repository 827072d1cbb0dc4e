"""Ways to hold less, declared once: the engine obeys these figures and the planner reads the same ones."""

from __future__ import annotations

from .units import MiB

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
# 2048 tokens: enough for the matrix product to run at full rate, little enough to stay under the activations.
LOSS_PIECE_BYTES = 208 * MiB


def loss_piece_tokens(tokens: int, vocab_size: int, asked: int = 0) -> int:
    """How many of a micro-batch's tokens the loss handles at once: as asked, else the power of two that fits."""
    if asked:
        return min(asked, tokens)
    piece = 1 << max(0, (LOSS_PIECE_BYTES // (2 * vocab_size)).bit_length() - 1)
    return min(max(piece, 128), tokens)
