"""A tape replayed through the caching allocator: bytes allocated and reserved over time, the memory that a program
needs, and points for a chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .allocator import MIN_LARGE_ALLOC, NO_LIMIT, ROUND_LARGE, CachingAllocator, ExpandableAllocator, MemoryBlock
from .driver_addresses import DriverAddresses, MonotonicAddresses
from .tape import EMPTY_CACHE, OWNERS, Event, Tape, round_size

MAX_POINTS = 800  # of a chart: about one per pixel


class PhasePeak(NamedTuple):
    """The highest point of a phase."""

    phase: str
    allocated: int   # the most bytes in blocks during the phase, as max_memory_allocated() counts them
    reserved: int    # the most bytes reserved since the program began
    event: int       # the number of the event that reached `allocated`


@dataclass(frozen=True)
class Timeline:
    """A replayed tape: to its end, or to the allocation that failed."""

    tape: Tape
    expandable: bool                 # whether segments are
    changes: list[int]               # by event: the change of the bytes allocated
    segments: list[tuple[int, int]]  # (event, bytes reserved from then on)
    failed: int | None = None        # the number of the event that ran out of memory
    largest_granted: int = 0         # the largest total that the limit allowed to reserve
    smallest_failed: int = NO_LIMIT  # the smallest total that it did not allow

    @cached_property
    def allocated(self) -> list[int]:
        """By event: the bytes allocated after it."""
        return list(accumulate(self.changes))

    @property
    def peak(self) -> int:
        """The most bytes allocated at any time. A block can be up to 1 MiB larger than its tensor."""
        return max(self.allocated, default=0)

    @property
    def reserved(self) -> int:
        """The most bytes reserved at any time."""
        return max((nbytes for _, nbytes in self.segments), default=0)

    @property
    def failed_allocation(self) -> Event | None:
        """The allocation that ran out of memory."""
        return None if self.failed is None else self.tape.events[self.failed]

    def peaks(self) -> dict[str, PhasePeak]:
        """The highest point of each phase over all its occurrences. A phase begins with what is already allocated."""
        found: dict[str, PhasePeak] = {}
        for phase, start, end in self.tape.phases:
            if start > len(self.changes):
                break
            end = min(end, len(self.changes))
            reserved = max((nbytes for event, nbytes in self.segments if event < end), default=0)
            first = max(start - 1, 0)
            allocated = self.allocated[first:end]
            peak = max(allocated, default=0)
            event = first + allocated.index(peak) if allocated else first
            if phase in found and found[phase].allocated >= peak:
                peak, event = found[phase].allocated, found[phase].event
            found[phase] = PhasePeak(phase, peak, reserved, event)
        return found

    def owners_at(self, event: int) -> dict[str, int]:
        """Bytes per owner right after an event. Their sum is what is allocated then."""
        return owners_after(self.tape, self.changes, {event})[event]

    @cached_property
    def reserved_in_any_order(self) -> tuple[int, ...]:
        """`reserved`, and with native segments what is reserved if the driver returns addresses in other orders."""
        return self.reserved, *(() if self.expandable else reserved_in_other_orders(self.tape))

    # ---- the memory that the program needs. These answer for a replay without a limit.

    def is_same_under(self, limit: int) -> bool:
        """Whether a replay under this limit would be the same."""
        return self.largest_granted <= limit < self.smallest_failed

    def fits(self, limit: int) -> bool:
        """Whether the tape completes under a limit. This replay often answers already."""
        if limit >= self.largest_granted or limit < self.peak:
            return limit >= self.largest_granted
        return replay(self.tape, limit, expandable=self.expandable).failed is None

    def fits_in_any_order(self, limit: int) -> bool:
        """Whether the tape completes under a limit, also if the driver returns addresses in another order."""
        return self.fits(limit) and (self.expandable or limit >= max(self.reserved_in_any_order) or all(
            each.failed is None for each in replays_in_other_orders(self.tape, limit)))

    @cached_property
    def needs(self) -> int:
        """The memory limit, a multiple of 2 MiB, under which the tape completes while it fails with 2 MiB less. Never
        below the peak: the tensors must lie somewhere.

        The allocator releases cached blocks at other moments under another limit, so a few programs fail under a
        slightly larger limit, or complete under a smaller one: `needs_under` answers for one given limit.
        """
        return self._needs_above(0)

    def needs_under(self, limit: int) -> int:
        """`needs`, corrected for one limit: at most that limit if and only if the tape completes under it."""
        completes = self.fits(limit)
        if completes == (self.needs <= limit):
            return self.needs
        return limit if completes else self._needs_above(limit)

    def _needs_above(self, failing: int) -> int:
        """By bisection above a limit that is known to fail, without a second replay where an earlier one was the same
        under that limit."""
        completed, failed = self, None
        low = _round_down(max(self.peak - ROUND_LARGE, failing))  # too small
        high = _round_up(self.largest_granted)                    # large enough
        while high - low > ROUND_LARGE:
            limit = _round_down((low + high) // 2)
            if not completed.is_same_under(limit) and (failed is None or not failed.is_same_under(limit)):
                tried = replay(self.tape, limit, expandable=self.expandable)
                completed, failed = (tried, failed) if tried.failed is None else (completed, tried)
            if completed.is_same_under(limit):
                high = _round_up(completed.largest_granted)
            else:
                low = limit
        return high


def owners_after(tape: Tape, changes: Sequence[int], events: Iterable[int]) -> dict[int, dict[str, int]]:
    """Bytes per owner right after each of these events."""
    nbytes, found, start = dict.fromkeys(OWNERS, 0), dict[int, dict[str, int]](), 0
    for number in sorted(events):
        for event, change in zip(tape.events[start:number + 1], changes[start:number + 1], strict=True):
            nbytes[event.owner] += change
        found[number] = {owner: held for owner, held in nbytes.items() if held}
        start = number + 1
    return found


# ---- replay


def replay(tape: Tape, limit: int | None = None, *, expandable: bool = False,
           addresses: DriverAddresses | None = None) -> Timeline:
    """Replays a tape under a memory limit in bytes. `addresses`: of native segments, if not as observed on an H200."""
    allocator = ExpandableAllocator(limit) if expandable else CachingAllocator(limit, addresses)
    sizes = {nbytes: round_size(nbytes) for nbytes in {event.nbytes for event in tape.events}}
    blocks: dict[str, MemoryBlock] = {}
    changes: list[int] = []
    segments: list[tuple[int, int]] = []
    reserved, failed = 0, None
    for number, (alloc, name, _, nbytes, pool) in enumerate(tape.events):
        if alloc:
            block = allocator.malloc(sizes[nbytes], pool)
            if block is None:
                failed = number
                break
            blocks[name] = block
            changes.append(block.size)
        elif name == EMPTY_CACHE:
            allocator.release_cached_blocks()
            changes.append(0)
        else:
            block = blocks.pop(name)
            changes.append(-block.size)
            allocator.free(block)
        if allocator.reserved != reserved:
            reserved = allocator.reserved
            segments.append((number, reserved))
    return Timeline(tape, expandable, changes, segments, failed, allocator.largest_granted, allocator.smallest_failed)


def replays_in_other_orders(tape: Tape, limit: int | None = None) -> tuple[Timeline, ...]:
    """Replays with addresses that the driver hands out in two other orders: large segments downwards, and all upwards.
    """
    orders = MonotonicAddresses(descending_from=MIN_LARGE_ALLOC), MonotonicAddresses(descending_from=NO_LIMIT)
    return tuple(replay(tape, limit, addresses=order) for order in orders)


def reserved_in_other_orders(tape: Tape) -> tuple[int, ...]:
    """Bytes reserved in these orders.

    One block at another address can change the bytes reserved by gigabytes. Where these figures differ from those of
    the usual order, no single number is certain.
    """
    return tuple(each.reserved for each in replays_in_other_orders(tape))


# Memory is reserved in multiples of 2 MiB, so limits between two of them are equal.


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ROUND_LARGE) * ROUND_LARGE


def _round_down(nbytes: int) -> int:
    return nbytes // ROUND_LARGE * ROUND_LARGE


# ---- points for a chart


class OwnerTimeline(NamedTuple):
    """Bytes per owner along a part of a tape, reduced to the points that a chart can show."""

    owners: tuple[str, ...]
    points: tuple[tuple[int, ...], ...]   # points[i][j]: bytes of owner j at point i
    marks: tuple[tuple[int, str], ...]    # (the point at which a phase begins, its name)
    peak: int                             # the point with the highest total


def chart_points(timeline: Timeline, start: int, end: int, phases: Sequence[tuple[str, int]],
                 most: int = MAX_POINTS) -> OwnerTimeline:
    """Events from `start` to before `end`, as at most `most` points. `phases`: names, and the event each begins with.

    Of each group of neighbouring events the highest and the lowest are kept, so the peak is always among them.
    """
    end = min(end, len(timeline.changes))
    kept = _extremes(timeline.allocated[start:end], most)
    nbytes = dict.fromkeys(OWNERS, 0) | (timeline.owners_at(start - 1) if start else {})
    points, wanted = list[tuple[int, ...]](), set(kept)
    events, changes = timeline.tape.events[start:end], timeline.changes[start:end]
    for offset, (event, change) in enumerate(zip(events, changes, strict=True)):
        nbytes[event.owner] += change
        if offset in wanted:
            points.append(tuple(nbytes[owner] for owner in OWNERS))
    totals = [sum(point) for point in points]
    marks = tuple((next((point for point, offset in enumerate(kept) if offset >= first - start), len(kept) - 1), name)
                  for name, first in phases)
    return OwnerTimeline(OWNERS, tuple(points), marks, totals.index(max(totals)))


def _extremes(totals: list[int], most: int) -> list[int]:
    """Offsets to keep, in order: the first and the last, and of each group the first highest and the first lowest."""
    if len(totals) <= most:
        return list(range(len(totals)))
    group = -(-2 * len(totals) // (most - 2))
    kept = {0, len(totals) - 1}
    for start in range(0, len(totals), group):
        part = totals[start:start + group]
        kept |= {start + part.index(max(part)), start + part.index(min(part))}
    return sorted(kept)
