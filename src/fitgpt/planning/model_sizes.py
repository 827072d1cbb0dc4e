"""Other models and other blocks: the sizes of GPT-2 and between, a model made narrower, a block made shorter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..config.run_config import RunConfig
from ..core.units import show_count

HEAD = 64               # the width of GPT-2's heads, whatever its size
GPT2 = ((1, 1), (12, 12), (16, 24), (20, 36), (25, 48), (64, 142))  # (heads, layers): its sizes, and lines between
LARGEST_HEADS = 64      # 4,096 wide, 142 layers: 28.8 billion weights, beyond any single card
SHORTEST = 64           # tokens of a block
BLOCK_STEP = 128
LONGEST = 1 << 20


class Size(NamedTuple):
    n_layer: int
    n_head: int
    n_embd: int


def words(config: RunConfig) -> str:
    params = show_count(config.gpt_config().count_params())
    return (f"n_layer {config.n_layer}, n_head {config.n_head}, n_embd {config.n_embd}, block_size "
            f"{config.block_size}, {params} parameters")


def gpt2_sizes() -> list[Size]:
    """From the smallest up: one for each number of heads, as deep as the line between GPT-2's own sizes has it."""
    return [Size(_layers(heads), heads, HEAD * heads) for heads in range(2, LARGEST_HEADS + 1)]


def _layers(heads: int) -> int:
    low, high = next((a, b) for a, b in pairwise(GPT2) if heads <= b[0])
    return low[1] + round((heads - low[0]) * (high[1] - low[1]) / (high[0] - low[0]))


def of_size(config: RunConfig, size: Size) -> RunConfig:
    """The same run of another model: every layer keeps what it keeps by default."""
    return replace(config, **size._asdict(), recompute="products", grad_checkpoint=False)


def narrower(config: RunConfig) -> Iterator[RunConfig]:
    """Fewer heads of the same width, and fewer layers in proportion: the largest first."""
    width = config.n_embd // config.n_head
    for heads in range(config.n_head - 1, 0, -1):
        layers = max(round(config.n_layer * heads / config.n_head), 1)
        yield of_size(config, Size(layers, heads, heads * width))


def shorter(config: RunConfig) -> Iterator[RunConfig]:
    """Half the block, with twice the sequences in a step: the tokens of a step stay."""
    while config.block_size % 2 == 0 and config.block_size // 2 >= SHORTEST:
        half = config.block_size // 2
        config = replace(config, block_size=half, eval_block_size=min(config.eval_block_size, half),
                         gradient_accumulation_steps=2 * config.gradient_accumulation_steps)
        yield config


def of_block(config: RunConfig, block: int) -> RunConfig:
    """One sequence of that length at a time, as many as make a step of about as many tokens."""
    sequences = max(round(config.tokens_per_step / block), 1)
    windows = max(config.eval_iters * config.batch_size * config.block_size // block, 1)
    return replace(config, block_size=block, eval_block_size=0, eval_batch_size=0, batch_size=1, eval_iters=windows,
                   gradient_accumulation_steps=sequences)
