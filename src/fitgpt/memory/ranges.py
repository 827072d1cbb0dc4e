"""Where the driver puts a new segment: addresses decide between free blocks of one size, and so what is reserved.

No document says so. Read off every segment of 16 recorded runs of nanoGPT on an H200 (docs/log.md, 2026-11-16).
"""

from __future__ import annotations

from copy import copy

from ..core.units import MiB
from .blocks import ADDRESS, OWN_SEGMENT, ROUND

PAGE = 2 * MiB               # what places are counted in; segments are whole ones
STRIDE = PAGE + ROUND        # their addresses leave a little between, so that blocks of two segments never merge
RANGE = 32 * MiB // PAGE     # ranges of addresses are whole multiples
CONTEXT = 1 << 60            # a place that a context takes at its beginning; only what lies above and below matters
HOST = CONTEXT << 1          # where the weights lay in the host's memory: what is put there goes down from here

LEFT_BY_A_CONTEXT = CONTEXT + 74 * MiB // PAGE, 24 * MiB // PAGE  # a gap: its place, and how many pages it has
BELOW_A_CONTEXT = CONTEXT - 414 * MiB // PAGE
# Once kernels run there is a gap of 340 to 350 MiB below the context where the first weight has up to 74 MiB, and in
# most runs where it has 94 or more there is none.
LEFT_BY_KERNELS = CONTEXT - 350 * MiB // PAGE, 348 * MiB // PAGE
LARGE_WEIGHT = 90 * MiB

MOSTLY_DESCENDING, ALWAYS_ASCENDING = OWN_SEGMENT, 2**62  # other orders, as Stacked has them


class Ranges:
    """A segment goes to the newest gap that it fits into, else to a new range below all others, whose rest is a gap.

    Addresses of the GPU are the process's, too. While weights come from the host, what they leave there is soon large
    enough for a range, and such a place comes first. That is so for about every other range: weights fill 20 of its 32
    MiB. The gaps of that time are then taken for the most part by the code of kernels.
    """

    def __init__(self) -> None:
        self._gaps = [LEFT_BY_A_CONTEXT]  # the newest last
        self._below, self._above = BELOW_A_CONTEXT, HOST
        self._first = 0        # bytes of the first segment
        self._loading = True
        self._host_is_next = False

    def copy(self) -> Ranges:
        other = copy(self)
        other._gaps = self._gaps.copy()
        return other

    def place(self, nbytes: int, *, loading: bool) -> int:
        """The address of a segment; `loading` while nothing was freed yet."""
        if self._loading and not loading:
            self._loading = False
            self._gaps = [LEFT_BY_KERNELS] if self._first <= LARGE_WEIGHT else []
        pages = nbytes // PAGE
        at = next((at for at in reversed(range(len(self._gaps))) if self._gaps[at][1] >= pages), len(self._gaps))
        place, room = self._gaps.pop(at) if at < len(self._gaps) else self._range(pages)
        if room > pages:
            self._gaps.insert(at, (place + pages, room - pages))
        self._first = self._first or nbytes
        return place * STRIDE

    def _range(self, pages: int) -> tuple[int, int]:
        room = -(-pages // RANGE) * RANGE
        if self._loading and self._first:
            self._host_is_next = not self._host_is_next
            if self._host_is_next:
                self._above -= room
                return self._above, room
        self._below -= room
        return self._below, room


class Stacked:
    """Another order that a driver may have: segments from a size on each below the last, smaller ones each above."""

    def __init__(self, descending: int) -> None:
        self._descending = descending
        self._above = self._below = ADDRESS // 2  # where the next low segment begins, and where the last high one did

    def copy(self) -> Stacked:
        return copy(self)

    def place(self, nbytes: int, *, loading: bool) -> int:
        if nbytes >= self._descending:
            self._below -= nbytes + ROUND
            return self._below
        self._above += nbytes + ROUND
        return self._above - nbytes - ROUND


def driver(descending: int | None = None) -> Ranges | Stacked:
    """What was recorded; or from so many bytes on each segment below the last, and smaller ones each above."""
    return Ranges() if descending is None else Stacked(descending)
