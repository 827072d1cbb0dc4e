"""What both kinds of the caching allocator share: its sizes, and how a request is rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..core.units import MiB

ROUND = 512
SMALL = MiB               # the largest request of the small pool; the large pool splits off more than that or nothing
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
OWN_SEGMENT = 10 * MiB    # from here on a request that finds no block gets a segment of its own
ROUND_SEGMENT = 2 * MiB

# A free block is one number: its size above so many bits, its address below them. No run that can be asked for has
# addresses beyond.
SPLIT = 96
ADDRESS = (1 << SPLIT) - 1


def rounded(nbytes: int) -> int:
    """The next multiple of ROUND, and at least one of it: by its bits, which takes half the time."""
    return nbytes + ROUND - 1 & -ROUND or ROUND


def segment_size(size: int) -> int:
    """What is asked of the driver for a block that no free one can give."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_SEGMENT) * ROUND_SEGMENT


@dataclass
class Caps:
    """Under which caps a replay would have gone just as it did: it has asked the cap nothing but whether so many bytes
    may be reserved."""

    least: int = 0                 # what was granted at most
    below: int | float = math.inf  # what was refused at least

    def granted(self, nbytes: int) -> None:
        self.least = max(self.least, nbytes)

    def refused(self, nbytes: int) -> None:
        self.below = min(self.below, nbytes)

    def copy(self) -> Caps:
        return replace(self)

    def __contains__(self, cap: int) -> bool:
        return self.least <= cap < self.below
