"""Replays a tape by the rules of PyTorch's CUDA caching allocator (2.9 to 2.13): what is allocated, what is reserved.

The rules, as its source has them: sizes round up to 512 bytes; up to 1 MiB a block comes from the small pool, cut out
of 2 MiB segments; larger ones from the large pool, cut out of 20 MiB segments below 10 MiB and of segments of their own
size, rounded up to 2 MiB, from there on. A free block is taken by best fit, lowest address first; what is left of it
becomes a free block, unless it is too small to be worth it. Freed blocks merge with free neighbours and stay with the
process. Only when the cap refuses a new segment are the wholly free ones given back, and the request tried once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

from ..units import MiB
from .blocks import ROUND, ROUND_SEGMENT, SMALL, Block, rounded, segment_size
from .expandable import ExpandableAllocator
from .tape import ORDINARY, RECORDED, RELEASE, Event, Tape

# Where the driver puts segments: from this size on each below the last, smaller ones one above the other. No document
# says so: recorded runs show large segments going down and others filling gaps, and replay best with all going down.
# Addresses only decide between free blocks of one size.
DESCENDING = 0
HALF_ASCENDING, ALWAYS_ASCENDING = 32 * MiB, 2**62  # other orders that a driver may have


class Pool(list[tuple[int, int, Block]]):
    """Free blocks by size, then address."""

    def __init__(self, *, recorded: bool) -> None:
        super().__init__()
        self.recorded = recorded


@dataclass(frozen=True)
class PhasePeak:
    phase: str
    allocated: int   # the most that lay in blocks while the phase lasted, as memory_allocated counts it
    reserved: int    # the most held from the driver since the run began
    event: int       # the number of the event that reached `allocated`


@dataclass(frozen=True)
class Timeline:
    """A replayed tape. `changes[i]` is what event i did to the bytes allocated; `failed` the event that was refused."""

    tape: Tape
    changes: list[int]
    segments: list[tuple[int, int]]  # (event, bytes reserved from then on)
    failed: int | None

    @cached_property
    def allocated(self) -> list[int]:
        return list(accumulate(self.changes))

    @property
    def reserved(self) -> int:
        """The most that was reserved at any time."""
        return max((held for _, held in self.segments), default=0)

    @property
    def refused(self) -> Event | None:
        return None if self.failed is None else self.tape.events[self.failed]

    def peaks(self) -> dict[str, PhasePeak]:
        """The highest point of each phase, over all of its stretches; a phase begins with what is there already."""
        found: dict[str, PhasePeak] = {}
        steps = iter([*self.segments, (len(self.changes) + 1, 0)])
        (at, held), reserved = next(steps), 0
        for phase, start, end in self.tape.spans():
            if start > len(self.changes):
                break
            end = min(end, len(self.changes))
            while at < end:
                reserved = max(reserved, held)
                at, held = next(steps)
            first = max(start - 1, 0)
            stretch = self.allocated[first:end]
            most = max(stretch, default=0)
            event = first + stretch.index(most) if stretch else first
            before = found.get(phase)
            if before is not None and before.allocated >= most:
                most, event = before.allocated, before.event
            found[phase] = PhasePeak(phase, most, reserved, event)
        return found

    def owners_at(self, event: int) -> dict[str, int]:
        """Whose the bytes are right after an event; their sum is what is allocated then."""
        owners: dict[str, int] = {}
        for entry, change in zip(self.tape.events[:event + 1], self.changes, strict=False):
            owners[entry.owner] = owners.get(entry.owner, 0) + change
        return {owner: nbytes for owner, nbytes in owners.items() if nbytes}

    def alive_at(self, event: int) -> dict[str, int]:
        """The blocks that are taken right after an event, by name."""
        alive: dict[str, int] = {}
        for entry, change in zip(self.tape.events[:event + 1], self.changes, strict=False):
            if entry.alloc:
                alive[entry.name] = change
            elif entry.name != RELEASE:
                del alive[entry.name]
        return alive


class Allocator:
    """The caching allocator's bookkeeping, without the memory. One stream; `cap` counts segments, as torch's does."""

    def __init__(self, cap: int | None = None, descending: int = DESCENDING) -> None:
        self.cap = cap
        self.reserved = 0
        self._descending = descending
        self._pools = tuple((Pool(recorded=kind == RECORDED), Pool(recorded=kind == RECORDED)) for kind in range(3))
        self._above = 0   # where the next low segment begins, and where the last high one did
        self._below = 0

    def alloc(self, nbytes: int, kind: int = ORDINARY) -> Block | None:
        """A block of at least that size, or None: out of memory."""
        size = -(-nbytes // ROUND) * ROUND or ROUND
        small = size <= SMALL
        pool = self._pools[kind][small]
        at = bisect_left(pool, (size,))  # a shorter tuple sorts before its extensions
        if at < len(pool):
            block = pool.pop(at)[2]
        else:
            wanted = segment_size(size)
            if not self._fits(wanted):
                if not pool.recorded:  # while work is recorded, nothing is given back
                    self.release()
                if not self._fits(wanted):
                    return None
            block = Block(self._address(wanted), wanted, pool)
            self.reserved += wanted
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            self._split(block, size, pool)
        block.free = False
        return block

    def free(self, block: Block) -> None:
        pool = block.home
        before, after = block.before, block.after
        if before is not None and before.free:
            del pool[bisect_left(pool, (before.size, before.address))]
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.free:
            del pool[bisect_left(pool, (after.size, after.address))]
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        block.free = True
        insort(pool, (block.size, block.address, block))

    def _fits(self, nbytes: int) -> bool:
        return self.cap is None or self.reserved + nbytes <= self.cap

    def _address(self, nbytes: int) -> int:
        """Only the order matters: it decides between free blocks of one size."""
        if nbytes < self._descending:
            self._above += nbytes
            return self._above - nbytes
        self._below -= nbytes
        return self._below

    def _split(self, block: Block, size: int, pool: Pool) -> None:
        rest = Block(block.address + size, block.size - size, pool)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        insort(pool, (rest.size, rest.address, rest))

    def releasable(self) -> int:
        return sum(size for pool in chain(*self._pools) if not pool.recorded for size, _, block in pool
                   if block.before is None and block.after is None)

    def release(self) -> None:
        """Gives wholly free segments back to the driver; those of recorded work stay, for a replay writes there."""
        for pool in chain(*self._pools):
            if pool.recorded:
                continue
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(entry[0] for entry in whole)
            pool[:] = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]


def replay(tape: Tape, cap: int | None = None, *, expandable: bool = False, descending: int = DESCENDING) -> Timeline:
    """The tape, to its end or to the event that the cap refuses."""
    allocator: Allocator | ExpandableAllocator = ExpandableAllocator(cap) if expandable else Allocator(cap, descending)
    blocks: dict[str, Block] = {}
    changes: list[int] = []
    segments: list[tuple[int, int]] = []
    held = 0
    alloc, free = allocator.alloc, allocator.free
    for number, (is_alloc, name, _, nbytes, kind) in enumerate(tape.events):
        if not is_alloc:
            if name == RELEASE:
                allocator.release()
                held = allocator.reserved
                changes.append(0)
                segments.append((number, held))
                continue
            block = blocks.pop(name)
            changes.append(-block.size)
            free(block)
            continue
        taken = alloc(nbytes, kind)
        if taken is None:
            return Timeline(tape, changes, segments, number)
        blocks[name] = taken
        changes.append(taken.size)
        if allocator.reserved != held:
            held = allocator.reserved
            segments.append((number, held))
    return Timeline(tape, changes, segments, None)


def reserved_range(tape: Tape, free_run: Timeline | None = None) -> tuple[int, int]:
    """The least and the most that is reserved over the orders in which a driver may hand out addresses.

    One block in another place can move what is reserved by gigabytes: where the two differ, no single number is sure.
    `free_run` is the replay in the usual order, where there is one already.
    """
    found = [replay(tape, descending=bound).reserved for bound in (HALF_ASCENDING, ALWAYS_ASCENDING)]
    found.append((free_run or replay(tape)).reserved)
    return min(found), max(found)


def needs(tape: Tape, *, expandable: bool = False, free_run: Timeline | None = None, above: int = 0) -> int:
    """A cap under which the tape replays to its end, segments given back on the way included, and under which, with
    2 MiB less, it does not; found by halving, above a cap that is known to be refused.

    Segments are whole multiples of 2 MiB, so caps between two of them are equal. What a successful replay reserved is
    itself such a cap, which shortens the search; not so with expandable segments, which ask for more than they map.
    `free_run` is the replay without a cap, where there is one already. Mostly all larger caps do too, and no smaller
    one: where that matters, ask `needs_under`.
    """
    free_run = free_run or replay(tape, expandable=expandable)
    never_refused = _asked_of_the_driver(free_run)  # under such a cap the run is the free one: no need to try
    hopeless = [] if expandable else _hopeless(tape)
    enough = free_run.reserved
    if expandable:
        enough += max((segment_size(rounded(event.nbytes)) for event in tape.events), default=0)
    too_little = max(free_run.allocated, default=0) // ROUND_SEGMENT * ROUND_SEGMENT - ROUND_SEGMENT
    too_little = max(too_little, above // ROUND_SEGMENT * ROUND_SEGMENT)
    while enough - too_little > ROUND_SEGMENT:
        cap = (enough + too_little) // 2 // ROUND_SEGMENT * ROUND_SEGMENT
        if any(low <= cap < high for low, high in hopeless):
            too_little = cap
            continue
        tried = free_run if cap >= never_refused else replay(tape, cap, expandable=expandable)
        if tried.failed is not None:
            too_little = cap
        else:
            enough = cap if expandable else tried.reserved
    return enough


def needs_under(limit: int, tape: Tape, usual: int, *, free_run: Timeline, expandable: bool = False) -> int:
    """What `needs` says (`usual`), made true of one limit: within it just where the tape replays to its end there.

    What is given back, and when, depends on the cap, so a little more memory can be worse. Where the run without a cap
    does not tell, one replay at the limit does; only if that contradicts is there more to try.
    """
    if limit >= _asked_of_the_driver(free_run) or limit < max(free_run.allocated, default=0):
        return usual
    enough = replay(tape, limit, expandable=expandable).failed is None
    if enough == (usual <= limit):
        return usual
    return limit if enough else needs(tape, expandable=expandable, free_run=free_run, above=limit)


def _asked_of_the_driver(free_run: Timeline) -> int:
    """The most that is reserved together with what is asked for: no cap from there on refuses anything."""
    most = before = 0
    for number, held in free_run.segments:
        event = free_run.tape.events[number]
        if event.alloc:
            most = max(most, before + segment_size(rounded(event.nbytes)))
        before = held
    return most


def _hopeless(tape: Tape) -> list[tuple[int, int]]:
    """Ranges of caps that need no trying. Up to its first refusal a run is the free one, so what it can give back then
    is known; where that is not enough, it ends there."""
    allocator, blocks, asked_before, found = Allocator(), dict[str, Block](), 0, []
    for is_alloc, name, _, nbytes, kind in tape.events:
        if name == RELEASE:
            allocator.release()
        elif not is_alloc:
            allocator.free(blocks.pop(name))
        else:
            held = allocator.reserved
            block = allocator.alloc(nbytes, kind)
            assert block is not None  # there is no cap
            blocks[name] = block
            wanted = allocator.reserved - held
            if wanted and held + wanted > asked_before:
                given_back = 0 if kind == RECORDED else allocator.releasable()
                found.append((asked_before, min(held + wanted, held - given_back + wanted)))
                asked_before = held + wanted
    return found
