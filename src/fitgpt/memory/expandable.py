"""The caching allocator with expandable segments, as PyTorch's source has it and recorded addresses confirm.

Each pool has one range of addresses, so long that it never ends, and maps memory into it page by page: 2 MiB a page in
the small pool, 20 MiB in the large. Blocks split down to 512 bytes in both, and the one that could grow into unmapped
addresses is taken last. When the cap refuses more, the pages that are wholly free are unmapped, wherever they lie, and
the request is tried once more. The cap is asked for what a segment of the plain kind would take, whatever has to be
mapped.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import islice
from operator import length_hint

from .blocks import ADDRESS, LARGE_SEGMENT, SMALL_SEGMENT, SPLIT, Caps, segment_size
from .tape import NONE_SERVES, RECORDED, Step

Places = tuple[list["Range"], dict[str, tuple[int, int, int]]]
ENDLESS = 2**90 // LARGE_SEGMENT * LARGE_SEGMENT


class Range:
    """A pool. Its free mapped blocks are as in native.py: numbers, a size above an address."""

    __slots__ = ("ends", "free", "page", "starts", "unmapped")

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: list[int] = []
        self.starts: dict[int, int] = {}       # where the free mapped block ends that begins at an address
        self.ends: dict[int, int] = {}         # … and where the one begins that ends there
        self.unmapped = {0: ENDLESS}           # sizes by address, the lowest first

    def copy(self) -> Range:
        other = Range(self.page)
        other.free, other.starts, other.ends = self.free.copy(), self.starts.copy(), self.ends.copy()
        other.unmapped = self.unmapped.copy()
        return other

    def take(self, address: int) -> int:
        """Out of the free blocks; its size."""
        end = self.starts.pop(address)
        del self.ends[end]
        del self.free[bisect_left(self.free, end - address << SPLIT | address)]
        return end - address

    def keep(self, address: int, size: int) -> int:
        """Among the free blocks, joined to its free neighbours; where it then begins."""
        if address + size in self.starts:
            size += self.take(address + size)
        if address in self.ends:
            before = self.ends[address]
            size += self.take(before)
            address = before
        self.put(address, size)
        return address

    def put(self, address: int, size: int) -> None:
        self.starts[address] = address + size
        self.ends[address + size] = address
        insort(self.free, size << SPLIT | address)

    def could_grow_to(self, block: int) -> int:
        """A block that unmapped addresses follow counts as large as it could grow: it is taken last."""
        size = block >> SPLIT
        return size + self.unmapped.get((block & ADDRESS) + size, 0)

    def passing_over(self, at: int) -> int:
        """Of the free blocks that are large enough, from the one at that place on, the one to take."""
        free = self.free
        while at + 1 < len(free) and self.could_grow_to(free[at + 1]) < self.could_grow_to(free[at]):
            at += 1
        return at

    def map(self, size: int) -> tuple[int, int]:
        """Maps pages after the first free block that ends where unmapped addresses begin and has room behind it. The
        free block that is then large enough, and how much was mapped for it."""
        for first in self.unmapped:
            first = self.ends.get(first, first)
            if self._room(first, size) >= size:
                break
        mapped = 0
        if first in self.unmapped:
            mapped = self._map_at(first, size)
            first = self.keep(first, mapped)
        while (end := self.starts[first]) - first < size:
            more = self._map_at(end, first + size - end)
            self.keep(end, more)
            mapped += more
        return first, mapped

    def _room(self, address: int, enough: int) -> int:
        """Of free addresses, mapped or not, from one on."""
        end = address
        while end - address < enough:
            if end in self.starts:
                end = self.starts[end]
            elif end in self.unmapped:
                end += self.unmapped[end]
            else:
                break
        return end - address

    def _map_at(self, address: int, size: int) -> int:
        """Whole pages at the beginning of an unmapped block: how much that is."""
        there = self.unmapped.pop(address)
        pages = -(-min(size, there) // self.page) * self.page
        if there > pages:
            self.unmapped[address + pages] = there - pages
            self._in_order()
        return pages

    def unmap(self) -> int:
        """Every page that no block uses; how much that is."""
        given_back = 0
        for block in self.free.copy():
            address, end = block & ADDRESS, (block & ADDRESS) + (block >> SPLIT)
            begin, stop = -(-address // self.page) * self.page, end // self.page * self.page
            if stop <= begin:
                continue
            self.take(address)
            if begin > address:
                self.put(address, begin - address)
            if end > stop:
                self.put(stop, end - stop)
            self.unmapped[begin] = stop - begin
            given_back += stop - begin
        if given_back:
            self._join_unmapped()
        return given_back

    def _join_unmapped(self) -> None:
        joined: dict[int, int] = {}
        begin = end = -1
        for address, size in sorted(self.unmapped.items()):
            if address != end:
                begin, joined[address] = address, 0
            joined[begin] += size
            end = address + size
        self.unmapped = joined

    def _in_order(self) -> None:
        if len(self.unmapped) > 1:
            self.unmapped = dict(sorted(self.unmapped.items()))


class Expandable:
    """The bookkeeping, without the memory. One stream; a cap counts what is mapped, as torch's does."""

    def __init__(self) -> None:
        self.reserved = 0
        self.caps = Caps()
        self._ranges = [Range(page) for _ in range(3) for page in (LARGE_SEGMENT, SMALL_SEGMENT)]  # two for each kind
        self._mapped = 0  # how often pages were mapped or unmapped
        self._taken: dict[str, tuple[int, int, int]] = {}  # by tensor: address, end, range

    def copy(self) -> Expandable:
        other = copy(self)
        other.caps = self.caps.copy()
        other._ranges, other._taken = self.places()
        return other

    def places(self) -> Places:
        """As Native.places."""
        return [each.copy() for each in self._ranges], self._taken.copy()

    def put_back(self, places: Places, renamed: Mapping[str, str]) -> None:
        """As Native.put_back."""
        ranges, taken = places
        self._ranges = [each.copy() for each in ranges]
        self._taken = {renamed.get(name, name): block for name, block in taken.items()}

    def follow(self, steps: Sequence[Step], begin: int, stop: int, cap: int | None, extra: dict[int, int],
               segments: list[tuple[int, int]], *, gives_back: bool = True) -> int | None:
        """As Native.follow; but no block is larger than what is asked for."""
        ranges, taken = self._ranges, self._taken
        ahead = iter(steps[begin:stop])
        for asks, cut, tensor, home, brief in ahead:
            if brief:
                length, parts = brief
                for wanted, _, where in parts:
                    room = ranges[where].free
                    if not room or room[-1] < wanted:
                        break
                else:
                    for _ in islice(ahead, length):
                        pass
                    continue
            pool = ranges[home]
            free, starts, ends = pool.free, pool.starts, pool.ends
            if asks:
                at = bisect_left(free, asks)
                if at < len(free):
                    block = free[at]
                    address = block & ADDRESS
                    if starts[address] in pool.unmapped:
                        at = pool.passing_over(at)
                        block = free[at]
                        address = block & ADDRESS
                    del free[at]
                    end = starts.pop(address)
                elif asks == NONE_SERVES:
                    self.release()
                    segments.append((stop - length_hint(ahead) - 1, self.reserved))
                    continue
                else:
                    size, held = asks >> SPLIT, self.reserved
                    wanted, number = segment_size(size), stop - length_hint(ahead) - 1
                    if cap is not None and held + wanted > cap:
                        if not gives_back:
                            return number
                        self.caps.refused(held + wanted)
                        if home // 2 == RECORDED:  # while work is recorded, nothing is given back
                            return number
                        self.release()
                        if self.reserved + wanted > cap:
                            self.caps.refused(self.reserved + wanted)
                            return number
                    self.caps.granted(self.reserved + wanted)
                    address, mapped = pool.map(size)
                    self._mapped += 1
                    self.reserved += mapped
                    if self.reserved != held:
                        segments.append((number, self.reserved))
                    end = starts.pop(address)
                    block = end - address << SPLIT | address
                    at = bisect_left(free, block)
                    del free[at]
                rest = block - cut
                if rest >> SPLIT:
                    ends[end] = start = rest & ADDRESS
                    starts[start] = end
                    insort(free, rest, 0, at)
                    end = start
                else:
                    del ends[end]
                taken[tensor] = address, end, home
                continue
            address, end, _ = taken.pop(tensor)
            if end in starts:
                after = starts.pop(end)
                del free[bisect_left(free, after - end << SPLIT | end)]
                end = after
            if address in ends:
                before = ends.pop(address)
                del free[bisect_left(free, address - before << SPLIT | before)]
                address = before
            starts[address] = end
            ends[end] = address
            insort(free, end - address << SPLIT | address)
        return None

    def standing(self, pool: int) -> tuple[int, ...]:
        """As Native.standing."""
        return (self._mapped, *self._ranges[pool].free)

    def stands_as(self, places: Places, renamed: Mapping[str, str], pool: int) -> bool:
        """As Native.stands_as."""
        then, taken = places[1], self._taken
        return len(then) == len(taken) and all(
            (now := taken.get(renamed.get(name, name))) == block or (now is not None and now[2] == block[2] != pool)
            for name, block in then.items())

    def release(self) -> None:
        """Unmaps every page that no block uses; recorded work's stay while there is any: a replay writes there."""
        self._mapped += 1
        is_recorded = any(home // 2 == RECORDED for _, _, home in self._taken.values())
        for number, each in enumerate(self._ranges):
            if number // 2 != RECORDED or not is_recorded:
                self.reserved -= each.unmap()
