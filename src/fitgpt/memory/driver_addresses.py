"""Where the CUDA driver puts a new segment. Of free blocks of equal size the allocator takes the one with the lowest
address, so these addresses decide how much a program reserves in the end.

No document states the driver's rules. They were read off every segment address of 16 recorded runs of nanoGPT on an
H200 (docs/log.md, 2026-11-16).
"""

from __future__ import annotations

from typing import Protocol

from ..core.units import MiB

PAGE = 2 * MiB                # segments are whole pages; addresses below are counted in pages
STRIDE = PAGE + 512           # bytes per page: the extra bytes keep blocks of adjacent segments from looking adjacent
RANGE_PAGES = 32 * MiB // PAGE  # the driver reserves address ranges in multiples of 32 MiB
CONTEXT = 1 << 60             # the page at which the CUDA context lies; only what is above and below it matters
HOST = CONTEXT << 1           # above all others: addresses of CPU RAM that the weights were copied from

CONTEXT_GAP = CONTEXT + 74 * MiB // PAGE, 24 * MiB // PAGE  # a gap that the context leaves: first page, pages
BELOW_CONTEXT = CONTEXT - 414 * MiB // PAGE
# Once kernels run, there is a gap of 340 to 350 MiB below the context if the first weight has at most 74 MiB. If it has
# 94 MiB or more, 0 to 384 MiB are free there for whole ranges: of 128 MiB, the forecasts are nearest to recorded runs.
KERNEL_GAP = CONTEXT - 350 * MiB // PAGE, 348 * MiB // PAGE
LARGE_FIRST_WEIGHT = 82 * MiB
FREE_BELOW_CONTEXT = 128 * MiB // PAGE


class DriverAddresses(Protocol):
    """Hands out the addresses of segments."""

    def place(self, nbytes: int, *, loading: bool) -> int:
        """Size of a new segment → its address. `loading` is true as long as the program has freed nothing."""


class ObservedAddresses:
    """As observed: a segment goes into the newest gap that is large enough, else into a new range below all others.
    The rest of a range is a gap.

    GPU and CPU share one address space. While weights are copied from CPU RAM, about every other new range lies where a
    freed weight lay before. When kernels are loaded, their code fills most gaps of that time.
    """

    def __init__(self) -> None:
        self._gaps = [CONTEXT_GAP]  # the newest last
        self._lowest, self._lowest_on_host = BELOW_CONTEXT, HOST
        self._free_below_context = 0
        self._first_segment = 0
        self._loading = True
        self._last_on_host = False

    def place(self, nbytes: int, *, loading: bool) -> int:
        if self._loading and not loading:
            self._loading = False
            if self._first_segment <= LARGE_FIRST_WEIGHT:
                self._gaps = [KERNEL_GAP]
            else:
                self._gaps, self._free_below_context = [], FREE_BELOW_CONTEXT
        pages = nbytes // PAGE
        number = next((number for number in reversed(range(len(self._gaps))) if self._gaps[number][1] >= pages),
                      len(self._gaps))
        first, available = self._gaps.pop(number) if number < len(self._gaps) else self._new_range(pages)
        if available > pages:
            self._gaps.insert(number, (first + pages, available - pages))
        self._first_segment = self._first_segment or nbytes
        return first * STRIDE

    def _new_range(self, pages: int) -> tuple[int, int]:
        """Its first page, and its number of pages."""
        available = -(-pages // RANGE_PAGES) * RANGE_PAGES
        if self._loading and self._first_segment:
            self._last_on_host = not self._last_on_host
            if self._last_on_host:
                self._lowest_on_host -= available
                return self._lowest_on_host, available
        if self._free_below_context >= available:
            self._free_below_context -= available
            return CONTEXT - FREE_BELOW_CONTEXT + self._free_below_context, available
        self._lowest -= available
        return self._lowest, available


class MonotonicAddresses:
    """An order that another driver might have: each segment of at least `descending_from` bytes lies below the last
    one, each smaller segment above the last one."""

    def __init__(self, descending_from: int) -> None:
        self._descending_from = descending_from
        self._above = self._below = CONTEXT * STRIDE

    def place(self, nbytes: int, *, loading: bool) -> int:
        length = nbytes // PAGE * STRIDE
        if nbytes >= self._descending_from:
            self._below -= length
            return self._below
        self._above += length
        return self._above - length
