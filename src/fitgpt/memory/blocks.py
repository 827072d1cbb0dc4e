"""What both kinds of the caching allocator share: its sizes, how a request is rounded, and a block."""

from __future__ import annotations

from typing import Any

from ..units import MiB

ROUND = 512
SMALL = MiB               # the largest request of the small pool; the large pool splits off more than that or nothing
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
OWN_SEGMENT = 10 * MiB    # from here on a request that finds no block gets a segment of its own
ROUND_SEGMENT = 2 * MiB


class Block:
    """A piece of a segment, taken or free; neighbours are of the same segment."""

    __slots__ = ("address", "after", "before", "free", "home", "mapped", "size")

    def __init__(self, address: int, size: int, home: Any) -> None:
        self.address, self.size, self.home = address, size, home  # `home`: the pool it belongs to
        self.free, self.mapped = True, True
        self.before: Block | None = None
        self.after: Block | None = None


def rounded(nbytes: int) -> int:
    return max(-(-nbytes // ROUND) * ROUND, ROUND)


def segment_size(size: int) -> int:
    """What is asked of the driver for a block that no free one can give."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
