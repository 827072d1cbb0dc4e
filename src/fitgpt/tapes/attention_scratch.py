"""What torch's attention kernels allocate beside their results, in bytes. Both trainers' tapes use it.

Read off recorded runs in which the kernels were forced one by one (tests/recorded/engine/attention_kernels.json). The
scratch of a backward pass is known from blocks of 500 and 512 tokens and heads of 48, 64 and 80 elements.
"""

from __future__ import annotations

RNG = 8               # a seed and an offset, 8 bytes each, are kept with and without dropout
CUDNN_SCRATCH = 256
FLASH_TOKENS, FLASH_HEAD = 128, 32          # multiples to which flash attention's backward rounds its scratch
EFFICIENT_TOKENS, EFFICIENT_HEADS = 64, (32, 64, 128)
EFFICIENT_COUNTERS = 16                     # bytes per head and EFFICIENT_TOKENS tokens


def up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def cudnn_backward(batch: int, heads: int, tokens: int, head: int) -> int:
    return 4 * batch * heads * tokens * (head + 1) + CUDNN_SCRATCH


def flash_backward(batch: int, heads: int, tokens: int, head: int) -> tuple[int, int]:
    """Row sums, and the queries' gradient in float32."""
    rows = 4 * batch * heads * up_to(tokens, FLASH_TOKENS)
    return rows, rows * up_to(head, FLASH_HEAD)


def efficient_backward(batch: int, heads: int, tokens: int, head: int) -> int:
    """The queries' gradient in float32, tile by tile, with a counter per tile."""
    width = next((each for each in EFFICIENT_HEADS if head <= each), head)
    tiles = batch * heads * -(-tokens // EFFICIENT_TOKENS)
    return tiles * (4 * EFFICIENT_TOKENS * width + EFFICIENT_COUNTERS)
