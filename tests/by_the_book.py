"""The caching allocator by the book: blocks that know their neighbours, a method for each thing that it does.

Slower than memory/native.py and memory/expandable.py, which must do the same to the byte, and of use where a test wants
to look at single blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fitgpt.memory.blocks import LARGE_SEGMENT, ROUND, SMALL, SMALL_SEGMENT, rounded, segment_size
from fitgpt.memory.ranges import driver
from fitgpt.memory.tape import ORDINARY, RECORDED, RELEASE, Tape


class Block:
    """A piece of a segment, taken or free; neighbours are of the same segment."""

    __slots__ = ("address", "after", "before", "free", "home", "mapped", "size")

    def __init__(self, address: int, size: int, home: Any) -> None:
        self.address, self.size, self.home = address, size, home  # `home`: the pool it belongs to
        self.free, self.mapped = True, True
        self.before: Block | None = None
        self.after: Block | None = None


class Pool(list[tuple[int, int, Block]]):
    """Free blocks by size, then address."""

    def __init__(self, *, recorded: bool) -> None:
        super().__init__()
        self.recorded = recorded


class Allocator:
    """The caching allocator's bookkeeping, without the memory. One stream; `cap` counts segments, as torch's does."""

    def __init__(self, cap: int | None = None, descending: int | None = None) -> None:
        self.cap = cap
        self.reserved = 0
        self._recorded = 0  # blocks of recorded work that are taken
        self._driver, self._loading = driver(descending), True
        self._pools = tuple((Pool(recorded=kind == RECORDED), Pool(recorded=kind == RECORDED)) for kind in range(3))

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
            block = Block(self._driver.place(wanted, loading=self._loading), wanted, pool)
            self.reserved += wanted
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            self._split(block, size, pool)
        block.free = False
        self._recorded += pool.recorded
        return block

    def free(self, block: Block) -> None:
        pool, self._loading = block.home, False
        self._recorded -= pool.recorded
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

    def _split(self, block: Block, size: int, pool: Pool) -> None:
        rest = Block(block.address + size, block.size - size, pool)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        insort(pool, (rest.size, rest.address, rest))

    def release(self) -> None:
        """Gives wholly free segments back to the driver; those of recorded work stay, for a replay writes there, until
        nothing of it is left."""
        for pool in chain(*self._pools):
            if pool.recorded and self._recorded:
                continue
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(entry[0] for entry in whole)
            pool[:] = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]


# ---- expandable segments

ENDLESS = 2**60


@dataclass
class Range:
    """A pool: its free mapped blocks by size and address, its unmapped ones by address."""

    page: int
    recorded: bool  # of recorded work, whose pages stay mapped: a replay will write there
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)


class ExpandableAllocator:
    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap
        self.reserved = 0
        self._recorded = 0  # blocks of recorded work that are taken
        self._ranges = {(kind, small): self._new_range(kind, small) for kind in range(3) for small in (False, True)}

    def _new_range(self, kind: int, small: bool) -> Range:
        pool = Range(SMALL_SEGMENT if small else LARGE_SEGMENT, kind == RECORDED)
        block = Block(0, ENDLESS // LARGE_SEGMENT * LARGE_SEGMENT, pool)
        block.mapped = False
        pool.unmapped.append((0, block))
        return pool

    def alloc(self, nbytes: int, kind: int = ORDINARY) -> Block | None:
        size = rounded(nbytes)
        pool = self._ranges[kind, size <= SMALL]
        at = bisect_left(pool.free, (size,))
        if at < len(pool.free):
            while at + 1 < len(pool.free) and _could_grow_to(pool.free[at + 1][2]) < _could_grow_to(pool.free[at][2]):
                at += 1
            block = pool.free.pop(at)[2]
        else:
            wanted = segment_size(size)
            if not self._fits(wanted):
                if not pool.recorded:  # while work is recorded, nothing is given back
                    self.release()
                if not self._fits(wanted):
                    return None
            block = self._map(pool, size)
        if block.size - size >= ROUND:
            rest = _cut(block, size)
            insort(pool.free, (rest.size, rest.address, rest))
        block.free = False
        self._recorded += pool.recorded
        return block

    def free(self, block: Block) -> None:
        block.free = True
        self._recorded -= block.home.recorded
        self._keep(block.home, block)

    def _fits(self, nbytes: int) -> bool:
        return self.cap is None or self.reserved + nbytes <= self.cap

    def _map(self, pool: Range, size: int) -> Block:
        """Maps pages after the first free block that ends where unmapped addresses begin and has room behind it."""
        for _, unmapped in pool.unmapped:
            first = unmapped
            if first.before is not None and first.before.free:
                first = first.before
            room, block = 0, first
            while room < size and block is not None and block.free:
                room, block = room + block.size, block.after  # type: ignore[assignment]
            if room >= size:
                break
        if not first.mapped:
            first = self._map_block(pool, first, size)
        while first.size < size:
            assert first.after is not None  # there is room
            first = self._map_block(pool, first.after, size - first.size)
        _take(pool.free, first)
        return first

    def _map_block(self, pool: Range, block: Block, size: int) -> Block:
        """Maps the first `size` bytes of an unmapped block, whole pages, and joins them to free neighbours."""
        del pool.unmapped[bisect_left(pool.unmapped, (block.address,))]
        pages = -(-min(size, block.size) // pool.page) * pool.page
        if block.size > pages:
            rest = _cut(block, pages)
            rest.mapped = False
            insort(pool.unmapped, (rest.address, rest))
        block.mapped = True
        self.reserved += pages
        return self._keep(pool, block)

    def _keep(self, pool: Range, block: Block) -> Block:
        """Joins a free mapped block to its free mapped neighbours and puts it where the next request looks."""
        if (before := block.before) is not None and before.free and before.mapped:
            _take(pool.free, before)
            _join(before, block)
            block = before
        if (after := block.after) is not None and after.free and after.mapped:
            _take(pool.free, after)
            _join(block, after)
        insort(pool.free, (block.size, block.address, block))
        return block

    def release(self) -> None:
        """Unmaps every page that no block uses; recorded work's when nothing of it is left."""
        for pool in self._ranges.values():
            if pool.recorded and self._recorded:
                continue
            for _, _, block in list(pool.free):
                begin = -(-block.address // pool.page) * pool.page
                end = (block.address + block.size) // pool.page * pool.page
                if end <= begin:
                    continue
                _take(pool.free, block)
                if begin > block.address:
                    middle = _cut(block, begin - block.address)
                    insort(pool.free, (block.size, block.address, block))
                    block = middle
                if block.address + block.size > end:
                    rest = _cut(block, end - begin)
                    insort(pool.free, (rest.size, rest.address, rest))
                self.reserved -= block.size
                block.mapped = False
                for neighbour in (block.before, block.after):
                    if neighbour is not None and not neighbour.mapped:
                        del pool.unmapped[bisect_left(pool.unmapped, (neighbour.address,))]
                        low, high = sorted((block, neighbour), key=lambda each: each.address)
                        _join(low, high)
                        block = low
                insort(pool.unmapped, (block.address, block))


def _could_grow_to(block: Block) -> int:
    """A block that unmapped addresses follow counts as large as it could grow: it is taken last."""
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


def _cut(block: Block, size: int) -> Block:
    """Shortens a block to `size` and returns the rest, free and as mapped as it was."""
    rest = Block(block.address + size, block.size - size, block.home)
    rest.mapped = block.mapped
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.size, block.after = size, rest
    return rest


def _join(block: Block, after: Block) -> None:
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block


def _take(free: list[tuple[int, int, Block]], block: Block) -> None:
    del free[bisect_left(free, (block.size, block.address))]


def replay(tape: Tape, cap: int | None = None, *, expandable: bool = False,
           descending: int | None = None) -> tuple[list[int], list[tuple[int, int]], int | None]:
    """What each event did to the bytes allocated, what was reserved from which event on, and the event refused."""
    allocator: Allocator | ExpandableAllocator = ExpandableAllocator(cap) if expandable else Allocator(cap, descending)
    blocks: dict[str, Block] = {}
    changes: list[int] = []
    segments: list[tuple[int, int]] = []
    for number, event in enumerate(tape.events):
        held = allocator.reserved
        if event.name == RELEASE:
            allocator.release()
            changes.append(0)
            segments.append((number, allocator.reserved))
        elif not event.alloc:
            block = blocks.pop(event.name)
            changes.append(-block.size)
            allocator.free(block)
        elif (taken := allocator.alloc(event.nbytes, event.pool)) is not None:
            blocks[event.name] = taken
            changes.append(taken.size)
            if allocator.reserved != held:
                segments.append((number, allocator.reserved))
        else:
            return changes, segments, number
    return changes, segments, None
