"""A second caching allocator, to compare with: lists of blocks that are searched from end to end, nothing linked."""

from __future__ import annotations

from dataclasses import dataclass

from fitgpt.memory.allocator import LARGE_BUFFER, SMALL_BUFFER, SMALL_SIZE, allocation_size
from fitgpt.memory.driver_addresses import DriverAddresses, ObservedAddresses
from fitgpt.memory.tape import EMPTY_CACHE, GRAPH_POOL, Tape, round_size

Pool = tuple[int, bool]  # number, small
ENDLESS = 2**60 // LARGE_BUFFER * LARGE_BUFFER


@dataclass
class Piece:
    """Addresses of a segment: `used`, `free` or `unmapped`."""

    address: int
    size: int
    state: str


class ReferenceAllocator:
    """Segments of each pool, as lists of pieces in the order of their addresses."""

    def __init__(self, limit: int | None, addresses: DriverAddresses | None, *, expandable: bool) -> None:
        self.limit, self.expandable = ENDLESS if limit is None else limit, expandable
        self.addresses, self.loading = addresses or ObservedAddresses(), True
        self.segments: dict[Pool, list[list[Piece]]] = {
            (pool, small): [] for pool in range(3) for small in (True, False)}
        if expandable:
            for segments in self.segments.values():
                segments.append([Piece(0, ENDLESS, "unmapped")])

    @property
    def reserved(self) -> int:
        return sum(piece.size for segments in self.segments.values() for segment in segments for piece in segment
                   if piece.state != "unmapped")

    def malloc(self, nbytes: int, number: int) -> Piece | None:
        size = round_size(nbytes)
        pool = (number, size <= SMALL_SIZE)
        found = self._best_fit(pool, size)
        if found is None:
            wanted = allocation_size(size)
            if self.reserved + wanted > self.limit and number != GRAPH_POOL:
                self.release()
            if self.reserved + wanted > self.limit:
                return None
            if self.expandable:
                self._map(pool, size)
            else:
                address = self.addresses.place(wanted, loading=self.loading)
                self.segments[pool].append([Piece(address, wanted, "free")])
            found = self._best_fit(pool, size, grown=True)
            assert found is not None
        segment, place = found
        piece = segment[place]
        rest = piece.size - size
        if rest > (0 if pool[1] or self.expandable else SMALL_SIZE):
            segment.insert(place + 1, Piece(piece.address + size, rest, "free"))
            piece.size = size
        piece.state = "used"
        return piece

    def free(self, piece: Piece) -> None:
        self.loading = False
        piece.state = "free"
        self._merge()

    def _best_fit(self, pool: Pool, size: int, *, grown: bool = False) -> tuple[list[Piece], int] | None:
        """The smallest free piece; an expandable one that can grow comes last, unless it has just grown."""
        fitting = [(piece.size, piece.address, segment, place) for segment in self.segments[pool]
                   for place, piece in enumerate(segment) if piece.state == "free" and piece.size >= size]
        if not fitting:
            return None

        def can_grow_to(segment: list[Piece], place: int) -> int:
            after = segment[place + 1] if place + 1 < len(segment) else None
            return segment[place].size + (after.size if after and after.state == "unmapped" else 0)

        fitting.sort(key=lambda each: each[:2])
        chosen = fitting[0]
        for each in fitting[1:] if self.expandable and not grown else ():
            if can_grow_to(*each[2:]) >= can_grow_to(*chosen[2:]):
                break
            chosen = each
        return chosen[2], chosen[3]

    def _map(self, pool: Pool, size: int) -> None:
        """Maps pages where the lowest run of free and unmapped pieces that holds an unmapped one is long enough."""
        (segment,), page = self.segments[pool], SMALL_BUFFER if pool[1] else LARGE_BUFFER
        for place, piece in enumerate(segment):
            if piece.state != "unmapped":
                continue
            first = place - 1 if place and segment[place - 1].state == "free" else place
            start, room = segment[first].address, 0
            for each in segment[first:]:
                if each.state == "used":
                    break
                room += each.size
            if room >= size:
                break
        end = start + size
        pieces: list[Piece] = []
        for each in segment:
            if each.state == "unmapped" and start <= each.address < end:
                mapped = min(-(-(end - each.address) // page) * page, each.size)
                pieces.append(Piece(each.address, mapped, "free"))
                if each.size > mapped:
                    pieces.append(Piece(each.address + mapped, each.size - mapped, "unmapped"))
            else:
                pieces.append(each)
        segment[:] = pieces
        self._merge()

    def release(self) -> None:
        """What no tensor uses: whole segments, or whole pages of expandable ones."""
        in_use = any(piece.state == "used" for (number, _), segments in self.segments.items() if number == GRAPH_POOL
                     for segment in segments for piece in segment)
        for (number, small), segments in self.segments.items():
            if number == GRAPH_POOL and in_use:
                continue
            if not self.expandable:
                segments[:] = [segment for segment in segments if [piece.state for piece in segment] != ["free"]]
                continue
            page, pieces = SMALL_BUFFER if small else LARGE_BUFFER, list[Piece]()
            for each in segments[0]:
                start, end = -(-each.address // page) * page, (each.address + each.size) // page * page
                if each.state != "free" or end <= start:
                    pieces.append(each)
                    continue
                borders = [each.address, start, end, each.address + each.size]
                pieces += [Piece(low, high - low, state) for low, high, state in zip(
                    borders, borders[1:], ("free", "unmapped", "free"), strict=False) if high > low]
            segments[0][:] = pieces
        self._merge()

    def _merge(self) -> None:
        for segments in self.segments.values():
            for segment in segments:
                pieces: list[Piece] = []
                for each in segment:
                    if pieces and each.state == pieces[-1].state != "used":
                        pieces[-1] = Piece(pieces[-1].address, pieces[-1].size + each.size, each.state)
                    else:
                        pieces.append(each)
                segment[:] = pieces


def replay(tape: Tape, limit: int | None = None, *, expandable: bool = False,
           addresses: DriverAddresses | None = None) -> tuple[list[int], list[int], int | None]:
    """By event: the change of the bytes allocated, and the bytes reserved; and the event that ran out of memory."""
    allocator = ReferenceAllocator(limit, addresses, expandable=expandable)
    pieces: dict[str, Piece] = {}
    changes, reserved = list[int](), list[int]()
    for number, event in enumerate(tape.events):
        if event.name == EMPTY_CACHE:
            allocator.release()
            changes.append(0)
        elif not event.alloc:
            piece = pieces.pop(event.name)
            changes.append(-piece.size)
            allocator.free(piece)
        elif (piece := allocator.malloc(event.nbytes, event.pool)) is not None:
            pieces[event.name] = piece
            changes.append(piece.size)
        else:
            return changes, reserved, number
        reserved.append(allocator.reserved)
    return changes, reserved, None
