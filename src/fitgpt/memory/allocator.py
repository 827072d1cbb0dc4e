"""PyTorch's CUDA caching allocator without the memory, as c10/cuda/CUDACachingAllocator.cpp reads from 2.9 to 2.13.

Sizes are rounded up to 512 bytes. Requests up to 1 MiB come from a small pool, larger ones from a large pool. Of the
free blocks of a pool the smallest that is large enough is taken (best fit; the lowest address among equals) and split.
A freed block merges with its free neighbours and stays cached. Only when the memory limit does not allow a new segment
does the allocator release cached blocks to the driver, and try once more.

Constants and methods have torch's names. Not modelled: several streams beyond the pools of tape.py, and the options of
PYTORCH_CUDA_ALLOC_CONF other than expandable_segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import cast

from ..core.units import MiB
from .driver_addresses import DriverAddresses, ObservedAddresses
from .tape import GRAPH_POOL

SMALL_SIZE = MiB            # the largest request of the small pool
SMALL_BUFFER = 2 * MiB      # segments of the small pool
LARGE_BUFFER = 20 * MiB     # segments of the large pool for requests below MIN_LARGE_ALLOC
MIN_LARGE_ALLOC = 10 * MiB  # from here on a request gets a segment of its own size
ROUND_LARGE = 2 * MiB       # … rounded up to this
NO_LIMIT = cast(int, inf)   # bytes; what is split from it, or merged with it, leaves it as it is


def allocation_size(size: int) -> int:
    """Rounded size of a request → size of the segment that a cache miss asks the driver for."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class MemoryBlock:
    """A part of a segment: in use, cached (`free`), or address space without memory (not `mapped`). `previous` and
    `next` are its neighbours in the segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: BlockPool, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.free, self.mapped = False, mapped
        self.previous = self.next = SEGMENT_END

    def split(self, size: int) -> MemoryBlock:
        """Shortens the block to `size` bytes and returns the remaining block."""
        remaining = MemoryBlock(self.address + size, self.size - size, self.pool, mapped=self.mapped)
        remaining.previous, remaining.next = self, self.next
        self.next.previous = self.next = remaining
        self.size = size
        return remaining

    def merge_next(self) -> None:
        self.size += self.next.size
        self.next = self.next.next
        self.next.previous = self

    @property
    def is_segment(self) -> bool:
        """Whether the block is a whole segment."""
        return self.previous is self.next

    @property
    def expandable_size(self) -> int:
        """The size to which the block can grow: with the unmapped addresses behind it."""
        return self.size if self.next.mapped else self.size + self.next.size


SEGMENT_END: MemoryBlock = object.__new__(MemoryBlock)  # stands before the first and after the last block of a segment
SEGMENT_END.free, SEGMENT_END.mapped = False, True


class BlockPool:
    """Cached blocks of one kind, sorted by size and address: the first that is large enough is the best fit."""

    def __init__(self, *, small: bool, graph: bool) -> None:
        self.graph = graph  # a CUDA graph's private pool
        self.page = SMALL_BUFFER if small else LARGE_BUFFER  # of expandable segments
        self.max_waste = 0 if small else SMALL_SIZE          # a remaining block must be larger than this
        self.blocks: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []    # of expandable segments, by address

    def insert(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        block.free = False
        del self.blocks[bisect_left(self.blocks, (block.size, block.address))]

    def insert_merged(self, block: MemoryBlock) -> MemoryBlock:
        """Merges a block with its free neighbours, caches it and returns it."""
        if block.next.free:
            self.remove(block.next)
            block.merge_next()
        if block.previous.free:
            block = block.previous
            self.remove(block)
            block.merge_next()
        self.insert(block)
        return block


class CachingAllocator:
    """With native segments, one cudaMalloc each. `limit` counts segments, as set_per_process_memory_fraction does."""

    def __init__(self, limit: int | None = None, addresses: DriverAddresses | None = None) -> None:
        self.limit = NO_LIMIT if limit is None else limit
        self.reserved = 0
        # All that the limit is ever asked is whether a total may be reserved. So everything happens in the same way
        # under every limit from the largest total granted up to, but not including, the smallest one that failed.
        self.largest_granted, self.smallest_failed = 0, NO_LIMIT
        self._graph_blocks = 0  # in use
        self._addresses, self._loading = addresses or ObservedAddresses(), True
        self._pools = [[BlockPool(small=small, graph=pool == GRAPH_POOL) for small in (False, True)]
                       for pool in range(3)]

    def malloc(self, size: int, pool_number: int) -> MemoryBlock | None:
        """A block of at least `size` bytes, which is a rounded size; None if out of memory."""
        pool = self._pools[pool_number][size <= SMALL_SIZE]
        block = self._get_free_block(pool, size)
        if block is None:
            if not self._may_reserve(allocation_size(size), pool):
                return None
            block = self._alloc_block(pool, size)
        if block.size - size > pool.max_waste:
            pool.insert(block.split(size))
        self._graph_blocks += pool.graph
        return block

    def free(self, block: MemoryBlock) -> None:
        self._loading = False
        self._graph_blocks -= block.pool.graph
        block.pool.insert_merged(block)

    def release_cached_blocks(self) -> None:
        """What empty_cache() does. A private pool is kept while its graph is: a replay writes into its blocks."""
        for pools in self._pools:
            for pool in pools:
                if not (pool.graph and self._graph_blocks):
                    self._release(pool)

    def _may_reserve(self, nbytes: int, pool: BlockPool) -> bool:
        """Whether the limit allows `nbytes` more, if necessary after releasing cached blocks."""
        if self.reserved + nbytes > self.limit:
            self.smallest_failed = min(self.smallest_failed, self.reserved + nbytes)
            if pool.graph:  # nothing is released during a capture
                return False
            self.release_cached_blocks()
        if self.reserved + nbytes > self.limit:
            self.smallest_failed = min(self.smallest_failed, self.reserved + nbytes)
            return False
        self.largest_granted = max(self.largest_granted, self.reserved + nbytes)
        return True

    def _get_free_block(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Best fit: takes the smallest cached block of at least `size` bytes out of the pool. In an expandable segment,
        a block with unmapped addresses behind it counts as large as it could grow: it comes last."""
        number = bisect_left(pool.blocks, (size,))
        if number == len(pool.blocks):
            return None
        while (number + 1 < len(pool.blocks)
               and pool.blocks[number + 1][2].expandable_size < pool.blocks[number][2].expandable_size):
            number += 1
        block = pool.blocks.pop(number)[2]
        block.free = False
        return block

    def _alloc_block(self, pool: BlockPool, size: int) -> MemoryBlock:
        """A new segment, as one block."""
        nbytes = allocation_size(size)
        self.reserved += nbytes
        return MemoryBlock(self._addresses.place(nbytes, loading=self._loading), nbytes, pool)

    def _release(self, pool: BlockPool) -> None:
        """Returns every segment that is one free block to the driver."""
        for _, _, block in pool.blocks.copy():
            if block.is_segment:
                pool.remove(block)
                self.reserved -= block.size


class ExpandableAllocator(CachingAllocator):
    """With expandable segments: each pool has one segment of endless addresses and maps pages of memory into it, 2 MiB
    in the small pool and 20 MiB in the large one. Confirmed by recorded block addresses on an H200.

    Blocks are split down to 512 bytes in both pools. The limit is asked for what a native segment would take, however
    many pages have to be mapped.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        for pools in self._pools:
            for pool in pools:
                pool.max_waste = 0
                pool.unmapped.append((0, MemoryBlock(0, NO_LIMIT, pool, mapped=False)))

    def _alloc_block(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Maps pages at the first place where free and unmapped addresses together have room for the request."""
        for _, unmapped in pool.unmapped:
            first = unmapped.previous if unmapped.previous.free else unmapped
            room, block = 0, first
            while room < size and (block.free or not block.mapped):
                room += block.size
                block = block.next
            if room >= size:
                break
        if not first.mapped:
            first = self._map(pool, first, size)
        while first.size < size:
            first = self._map(pool, first.next, size - first.size)
        pool.remove(first)
        return first

    def _map(self, pool: BlockPool, block: MemoryBlock, size: int) -> MemoryBlock:
        """Maps the first `size` bytes of an unmapped block, in whole pages. Returns the free block they are part of."""
        pool.unmapped.remove((block.address, block))
        mapped = -(-min(size, block.size) // pool.page) * pool.page
        if block.size > mapped:
            remaining = block.split(mapped)
            insort(pool.unmapped, (remaining.address, remaining))
        block.mapped = True
        self.reserved += mapped
        return pool.insert_merged(block)

    def _release(self, pool: BlockPool) -> None:
        """Unmaps every page that lies wholly within a free block."""
        for _, _, block in pool.blocks.copy():
            start = -(-block.address // pool.page) * pool.page
            end = (block.address + block.size) // pool.page * pool.page
            if end <= start:
                continue
            pool.remove(block)
            if block.address + block.size > end:
                pool.insert(block.split(end - block.address))
            if block.address < start:
                pages = block.split(start - block.address)
                pool.insert(block)
                block = pages
            block.mapped = False
            self.reserved -= block.size
            if not block.next.mapped:
                pool.unmapped.remove((block.next.address, block.next))
                block.merge_next()
            if not block.previous.mapped:
                block = block.previous
                pool.unmapped.remove((block.address, block))
                block.merge_next()
            insort(pool.unmapped, (block.address, block))
