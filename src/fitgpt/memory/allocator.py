"""Replays a tape by the rules of PyTorch's CUDA caching allocator: what is allocated, what is reserved, what is needed.

The rules are in native.py and expandable.py, the driver's in ranges.py, what is passed over in repeats.py; here is what
is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .blocks import ROUND_SEGMENT, Caps, rounded, segment_size
from .expandable import Expandable
from .native import Native
from .ranges import ALWAYS_ASCENDING, MOSTLY_DESCENDING
from .repeats import LARGE, SMALL, Track, follow, track, track_of_one_pool
from .tape import NONE_SERVES, OWNERS, RELEASE, Event, Tape


class PhasePeak(NamedTuple):
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
    begun: Begun | None = field(default=None, compare=False, repr=False)  # where the first cap that matters refuses

    @cached_property
    def allocated(self) -> list[int]:
        return self.tape.heights if self.changes is self.tape.changes else list(accumulate(self.changes))

    @property
    def peak(self) -> int:
        """The most that lay in blocks at any time, with what the allocator rounds up."""
        return max(self.allocated, default=0)

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
        return owners_after(self.tape, self.changes, {event})[event]

    def alive_at(self, event: int) -> dict[str, int]:
        """The blocks that are taken right after an event, by name."""
        alive: dict[str, int] = {}
        for entry, change in zip(self.tape.events[:event + 1], self.changes, strict=False):
            if entry.alloc:
                alive[entry.name] = change
            elif entry.name != RELEASE:
                del alive[entry.name]
        return alive


def owners_after(tape: Tape, changes: Sequence[int], events: Iterable[int]) -> dict[int, dict[str, int]]:
    """Whose the bytes are right after each of some events, in one pass."""
    held, found, begin = dict.fromkeys(OWNERS, 0), dict[int, dict[str, int]](), 0
    for number in sorted(events):
        end = number + 1
        for event, change in zip(tape.events[begin:end], changes[begin:end], strict=True):
            held[event[2]] += change
        found[number] = {owner: nbytes for owner, nbytes in held.items() if nbytes}
        begin = end
    return found


def replay(tape: Tape, cap: int | None = None, *, expandable: bool = False, descending: int | None = None) -> Timeline:
    """The tape, to its end or to the event that the cap refuses. `descending`: see ranges.driver."""
    allocator = Expandable() if expandable else Native(descending)
    extra: dict[int, int] = {}
    segments: list[tuple[int, int]] = []
    if cap is not None or descending is not None:
        failed = follow(allocator, track(tape), 0, cap, extra, segments)
        return Timeline(tape, _changes(tape, extra, failed), segments, failed)
    least = tape.asked_at_most // ROUND_SEGMENT * ROUND_SEGMENT
    at = follow(allocator, track(tape), 0, least, extra, segments, gives_back=False)
    begun = None
    if at is not None:
        begun = Begun(tape, allocator.copy(), at, max((held for _, held in segments), default=0))
        follow(allocator, track(tape), at, None, extra, segments)
    return Timeline(tape, _changes(tape, extra), segments, None, begun)


def _changes(tape: Tape, extra: Mapping[int, int], failed: int | None = None) -> list[int]:
    """What events did to the bytes allocated: what they asked for, and a few of them more."""
    if failed is None and not extra:
        return tape.changes
    changes = tape.changes[:failed]
    for number, more in extra.items():
        changes[number if more > 0 else tape.event_of(number)] += more
    return changes


def reserved_in_other_orders(tape: Tape) -> tuple[int, ...]:
    """What is reserved where a driver hands out addresses in other orders than the usual.

    One block in another place can move what is reserved by gigabytes: where they differ, no single number is sure.
    Small pools' segments ascend in both orders.
    """
    orders = MOSTLY_DESCENDING, ALWAYS_ASCENDING
    if any(step[0] == NONE_SERVES for step in tape.steps):
        return tuple(replay(tape, descending=order).reserved for order in orders)
    of_small = _reserved(track_of_one_pool(tape, SMALL), ALWAYS_ASCENDING)
    in_large = track_of_one_pool(tape, LARGE)
    return tuple(of_small + _reserved(in_large, order) for order in orders)


def _reserved(along: Track, descending: int) -> int:
    allocator = Native(descending)
    follow(allocator, along, 0, None, {}, [])
    return allocator.reserved


def needs(tape: Tape, *, expandable: bool = False, free_run: Timeline | None = None, above: int = 0) -> int:
    """A cap under which the tape replays to its end, segments given back on the way included, and under which, with
    2 MiB less, it does not; found by halving, above a cap that is known to be refused. One replay often answers for
    many caps: for all under which it would have been the same.

    Segments are whole multiples of 2 MiB, so caps between two of them are equal. What a successful replay reserved is
    itself such a cap, which shortens the search; not so with expandable segments, which ask for more than they map.
    `free_run` is the replay without a cap, where there is one already. Mostly all larger caps do too, and no smaller
    one: where that matters, ask `needs_under`.
    """
    free_run = free_run or replay(tape, expandable=expandable)
    will_do, will_not = Caps(_asked_of_the_driver(free_run)), Caps(below=0)  # for these caps there is no need to try
    enough = reserved = free_run.reserved
    if expandable:
        enough += max((segment_size(rounded(nbytes)) for nbytes in {event[3] for event in tape.events}), default=0)
    too_little = free_run.peak // ROUND_SEGMENT * ROUND_SEGMENT - ROUND_SEGMENT
    too_little = max(too_little, above // ROUND_SEGMENT * ROUND_SEGMENT)
    begun = begun_of(free_run, expandable)
    while enough - too_little > ROUND_SEGMENT:
        cap = (enough + too_little) // 2 // ROUND_SEGMENT * ROUND_SEGMENT
        if cap not in will_do and cap not in will_not:
            begun.go_on(too_little, gives_back=False)  # once: from then on it stands there
            tried = begun.copy()
            ended = tried.go_on(cap, gives_back=False)
            first_refusal = tried.copy()
            if ended or tried.go_on(cap):
                will_do, reserved = tried.caps, tried.reserved
            else:
                will_not, begun = tried.caps, first_refusal
        if cap in will_do:
            enough = cap if expandable else reserved
        else:
            too_little = cap
    return enough


class Begun:
    """A replay that can stop, be copied and go on. Up to its first refusal a run is the free one, so replays under one
    cap after another have their beginning in common."""

    def __init__(self, tape: Tape, allocator: Native | Expandable, at: int = 0, reserved: int = 0) -> None:
        self._tape, self._allocator = tape, allocator
        self._at = at             # the next event
        self.reserved = reserved  # the most so far

    @property
    def caps(self) -> Caps:
        return self._allocator.caps

    def copy(self) -> Begun:
        return Begun(self._tape, self._allocator.copy(), self._at, self.reserved)

    def go_on(self, cap: int, *, gives_back: bool = True) -> bool:
        """To the end, or to the event that the cap refuses; without giving anything back, to the first such event."""
        segments: list[tuple[int, int]] = []
        refused = follow(self._allocator, track(self._tape), self._at, cap, {}, segments, gives_back=gives_back)
        self.reserved = max(self.reserved, max((held for _, held in segments), default=0))
        self._at = len(self._tape.events) if refused is None else refused
        return refused is None


def begun_of(free_run: Timeline, expandable: bool) -> Begun:
    """The replay up to where a cap that could be enough may first refuse: it is the same under all of them."""
    if free_run.begun is not None:
        return free_run.begun.copy()
    return Begun(free_run.tape, Expandable() if expandable else Native())


def needs_under(limit: int, tape: Tape, usual: int, *, free_run: Timeline, expandable: bool = False) -> int:
    """What `needs` says (`usual`), made true of one limit: within it just where the tape replays to its end there.

    What is given back, and when, depends on the cap, so a little more memory can be worse. Where the run without a cap
    does not tell, one replay at the limit does; only if that contradicts is there more to try.
    """
    if limit >= _asked_of_the_driver(free_run) or limit < free_run.peak:
        return usual
    enough = begun_of(free_run, expandable).go_on(limit)
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
