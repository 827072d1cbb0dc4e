"""PyTorch's CUDA caching allocator (2.9 to 2.13) with segments of its ordinary kind.

The rules, as its source has them: sizes round up to 512 bytes; up to 1 MiB a block comes from the small pool, cut out
of 2 MiB segments; larger ones from the large pool, cut out of 20 MiB segments below 10 MiB and of segments of their own
size, rounded up to 2 MiB, from there on. A free block is taken by best fit, lowest address first; what is left of it
becomes a free block, unless it is too small to be worth it. Freed blocks merge with free neighbours and stay with the
process. Only when the cap refuses a new segment are the wholly free ones given back, and the request tried once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import islice
from operator import length_hint

from .blocks import ADDRESS, SMALL, SPLIT, Caps, segment_size
from .ranges import driver
from .tape import NONE_SERVES, RECORDED, Step

ONE_BYTE = 1 << SPLIT
WORTH_KEEPING = (SMALL + 1 << SPLIT, ONE_BYTE) * 3  # in each pool: the least that becomes a block of its own

# Of a tensor: its address, its end, the two as a block, its pool, and by how much it is larger than asked for.
Taken = tuple[int, int, int, int, int]
Places = tuple[list[list[int]], dict[int, int], dict[int, int], dict[str, Taken]]


class Native:
    """The bookkeeping, without the memory. One stream; a cap counts segments, as torch's does.

    Free blocks are numbers, a size above an address, so a sorted list of them is in the order of best fit.
    """

    def __init__(self, descending: int | None = None) -> None:
        self.reserved = 0
        self.caps = Caps()
        self._driver = driver(descending)
        self._pools: list[list[int]] = [[] for _ in range(6)]  # free blocks
        self._starts: dict[int, int] = {}    # where the free block ends that begins at an address
        self._ends: dict[int, int] = {}      # … and the one that ends there
        self._segments: dict[int, int] = {}  # by address
        self._segmented = 0                  # how often one was made or given back
        self._taken: dict[str, Taken] = {}

    def copy(self) -> Native:
        other = copy(self)
        other.caps, other._driver, other._segments = self.caps.copy(), self._driver.copy(), self._segments.copy()
        other._pools, other._starts, other._ends, other._taken = self.places()
        return other

    def places(self) -> Places:
        """Where every block lies, free or taken."""
        return [pool.copy() for pool in self._pools], self._starts.copy(), self._ends.copy(), self._taken.copy()

    def put_back(self, places: Places, renamed: Mapping[str, str]) -> None:
        """Every block where it was, the segments being the same; names may be others."""
        pools, starts, ends, taken = places
        self._pools, self._starts, self._ends = [pool.copy() for pool in pools], starts.copy(), ends.copy()
        self._taken = {renamed.get(name, name): block for name, block in taken.items()} if renamed else taken.copy()

    def follow(self, steps: Sequence[Step], begin: int, stop: int, cap: int | None, extra: dict[int, int],
               segments: list[tuple[int, int]], *, gives_back: bool = True) -> int | None:
        """Steps from `begin` on, to the one before `stop` (None) or to the one that the cap refuses.

        Notes those that took or gave back `extra` bytes, beyond what is asked for, and what is reserved from one on
        where that changed. One loop and no calls: this is what a plan takes its time for.
        """
        pools, starts, ends, taken = self._pools, self._starts, self._ends, self._taken
        ahead = iter(steps[begin:stop])
        for asks, cut, tensor, home, brief in ahead:
            pool = pools[home]
            if asks:
                if brief:
                    length, parts = brief
                    for wanted, less, where in parts:
                        room = pools[where]
                        at = bisect_left(room, wanted)
                        if at == len(room) or ONE_BYTE <= room[at] - less < WORTH_KEEPING[where]:
                            break
                    else:
                        for _ in islice(ahead, length):
                            pass
                        continue
                at = bisect_left(pool, asks)
                if at < len(pool):
                    block = pool[at]
                    address = block & ADDRESS
                    end = starts.pop(address)
                elif asks == NONE_SERVES:
                    self.release()
                    segments.append((stop - length_hint(ahead) - 1, self.reserved))
                    continue
                else:
                    whole, held = segment_size(asks >> SPLIT), self.reserved
                    number = stop - length_hint(ahead) - 1
                    if cap is not None and held + whole > cap:
                        if not gives_back:
                            return number
                        self.caps.refused(held + whole)
                        if home // 2 == RECORDED:  # while work is recorded, nothing is given back
                            return number
                        self.release()
                        at = len(pool)
                        if self.reserved + whole > cap:
                            self.caps.refused(self.reserved + whole)
                            return number
                    self.caps.granted(self.reserved + whole)
                    address = self._segment(whole, loading=number == len(taken))
                    block, end = whole << SPLIT | address, address + whole
                    pool.append(block)
                    if self.reserved != held:
                        segments.append((number, self.reserved))
                rest = block - cut
                if rest >= WORTH_KEEPING[home]:
                    if at and rest < pool[at - 1]:
                        del pool[at]
                        insort(pool, rest, 0, at)
                    else:
                        pool[at] = rest
                    start = rest & ADDRESS
                    starts[start], ends[end] = end, rest
                    taken[tensor] = address, start, asks | address, home, 0
                else:
                    del pool[at]
                    ends.pop(end, None)
                    more = rest >> SPLIT
                    taken[tensor] = address, end, block, home, more
                    if more:
                        extra[stop - length_hint(ahead) - 1] = more
                continue
            address, end, block, _, more = taken.pop(tensor)
            if more:
                extra[stop - length_hint(ahead) - 1] = -more
            if end in starts:
                beyond = starts.pop(end)
                after = ends[beyond]
                del pool[bisect_left(pool, after)]
                block += after - end
                end = beyond
            if address in ends:
                before = ends.pop(address)
                del pool[bisect_left(pool, before)]
                block += before - address
                address = block & ADDRESS
            starts[address], ends[end] = end, block
            insort(pool, block)
        return None

    def standing(self, pool: int) -> tuple[int, ...]:
        """What is free in a pool; no two with other segments are equal."""
        return (self._segmented, *self._pools[pool])

    def stands_as(self, places: Places, renamed: Mapping[str, str], pool: int) -> bool:
        """Whether there are the tensors that there were, under other names perhaps, and a pool's in their places."""
        then, taken = places[3], self._taken
        return len(then) == len(taken) and all(
            (now := taken.get(renamed.get(name, name))) == block or (now is not None and now[3] == block[3] != pool)
            for name, block in then.items())

    def _segment(self, nbytes: int, *, loading: bool) -> int:
        address = self._driver.place(nbytes, loading=loading)
        self._segments[address] = nbytes
        self._segmented += 1
        self.reserved += nbytes
        return address

    def release(self) -> None:
        """Gives wholly free segments back to the driver; those of recorded work stay while there is any: a replay
        writes there."""
        is_recorded = any(home // 2 == RECORDED for _, _, _, home, _ in self._taken.values())
        self._segmented += 1
        for number, pool in enumerate(self._pools):
            if number // 2 == RECORDED and is_recorded:
                continue
            whole = [block for block in pool if self._segments.get(block & ADDRESS) == block >> SPLIT]
            for block in whole:
                address, nbytes = block & ADDRESS, block >> SPLIT
                del self._starts[address], self._ends[address + nbytes], self._segments[address]
                self.reserved -= nbytes
            if whole:
                gone = set(whole)
                pool[:] = [block for block in pool if block not in gone]
