"""What a run allocates and frees, in order: events, the tape they are written on, and the pen that writes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from ..nouns import PHASES
from .blocks import SMALL, SPLIT, rounded

OWNERS = ("weights", "gradients", "optimizer", "casts", "activations", "logits", "workspace", "data", "other")
RELEASE = "empty the cache"  # the name of an event that gives unused memory back to the driver
ORDINARY, RECORDED, SIDE = range(3)  # pools: of the default stream, of recorded work, of the stream it is recorded on


class Event(NamedTuple):
    """One allocation, or the free of an earlier one; `nbytes` is what the tensor asked for, before any rounding."""

    alloc: bool
    name: str
    owner: str
    nbytes: int
    pool: int = ORDINARY


# Tensors that come and go with nothing between. Where there is room for them, nothing has happened: how many steps
# that leaves out, and what is asked for in each pool, cut off there, and which pool that is.
Brief = tuple[int, tuple[tuple[int, int, int], ...]]

# An event as the allocator meets it: what it asks for, what that cuts off, the tensor's name, its pool, and what is
# brief from here on. A free block is one number, its size above its address (see blocks.py): one of at least what is
# asked serves, and less what is cut off it is what remains. A free asks for nothing. A plain tuple: a named one takes
# longer to take apart.
Step = tuple[int, int, str, int, Brief | None]
NONE_SERVES = 1 << 2 * SPLIT  # what a release asks for


class Mark(NamedTuple):
    """`phase` lasts from event number `start` to the next mark."""

    phase: str
    start: int


class Copy(NamedTuple):
    """So many events from `start` on are those from `source` on, but for some names. What was written first is a copy
    of itself."""

    start: int
    length: int
    source: int
    names: tuple[str, ...]  # those that may be others here than there


@dataclass(frozen=True)
class Tape:
    """All events of a run. Names are unique among what is alive, and may come back after a free."""

    events: tuple[Event, ...]
    marks: tuple[Mark, ...]
    copies: tuple[Copy, ...] = field(default=(), compare=False, repr=False)  # how it was written, in order

    @property
    def _copied(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.start != copy.source]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Each phase with the numbers of its first event and of the one after its last."""
        ends = [mark.start for mark in self.marks[1:]] + [len(self.events)]
        for mark, end in zip(self.marks, ends, strict=True):
            yield mark.phase, mark.start, end

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All events; those of a run of frees may stand in another order (see `_part_soon`)."""
        shapes, steps, named = _Shapes(), list[Step](), dict[int, list[int]]()
        bounds = {0, len(self.events), *(at for copy in self.copies for at in (copy.start, copy.start + copy.length))}
        copies = {copy.start: copy for copy in self.copies}
        for start, end in pairwise(sorted(bounds)):
            if start < len(steps):  # within a copy
                continue
            _, length, source, names = copies.get(start, Copy(start, 0, start, ()))
            if source == start:
                steps += shapes.steps(self.events[start:end])
                continue
            copied, before = steps[source:source + length], copies[source].names
            if source not in named:
                named[source] = [at for at, step in enumerate(copied) if step[2] in before]
            renamed = dict(zip(before, names, strict=True))
            for at in named[source]:
                asks, cut, name, home, brief = copied[at]
                copied[at] = asks, cut, renamed[name], home, brief
            steps += copied
        return tuple(steps)

    def event_of(self, number: int) -> int:
        """The number of the event that a step stands for."""
        name = self.steps[number][2]
        if self.events[number].name == name:
            return number
        begin = number
        while not self.events[begin - 1].alloc:
            begin -= 1
        return next(at for at in range(begin, len(self.events)) if self.events[at].name == name)

    @cached_property
    def changes(self) -> list[int]:
        """What each event does to the bytes allocated, where a block is as large as what is asked for, rounded."""
        sizes, changes = _Sizes(), list[int]()
        for start, length, source, *_ in [*self._copied, Copy(len(self.events), 0, 0, ())]:
            changes += [sizes[event[3]] if event[0] else 0 if event[1] == RELEASE else -sizes[event[3]]
                        for event in self.events[len(changes):start]]
            changes += changes[source:source + length]
        return changes

    @cached_property
    def heights(self) -> list[int]:
        """What is allocated after each event, if so."""
        return list(accumulate(self.changes))

    @cached_property
    def asked_at_most(self) -> int:
        """The most that is asked for at one time: no cap below it can do. By parts: copies rise as their source."""
        @cache
        def rise(start: int, end: int) -> tuple[int, int]:
            heights = list(accumulate(self.changes[start:end]))
            return (heights[-1], max(heights)) if heights else (0, 0)

        asked = most = done = 0
        for start, length, source, *_ in [*self._copied, Copy(len(self.events), 0, 0, ())]:
            for part in ((done, start), (source, source + length)):
                more, at_most = rise(*part)
                most = max(most, asked + at_most)
                asked += more
            done = start + length
        return most

    @cached_property
    def chained(self) -> tuple[Copy, ...]:
        """Parts with another right before or after them: in these a replay may find that it has been there before."""
        starts = {copy.start for copy in self.copies}
        ends = {copy.start + copy.length for copy in self.copies}
        return tuple(copy for copy in self.copies if copy.start in ends or copy.start + copy.length in starts)

    def alive_at_end(self) -> dict[str, Event]:
        alive: dict[str, Event] = {}
        for event in self.events:
            if event.alloc:
                alive[event.name] = event
            elif event.name != RELEASE:
                del alive[event.name]
        return alive


class _Sizes(dict[int, int]):
    """So many bytes, rounded. A tape has few."""

    def __missing__(self, nbytes: int) -> int:
        size = self[nbytes] = rounded(nbytes)
        return size


class _Shapes(dict[int, tuple[int, int, int]]):
    """Of so many bytes: what they ask for, what that cuts off, which of a kind of work's two pools."""

    def __missing__(self, nbytes: int) -> tuple[int, int, int]:
        size = rounded(nbytes)
        shape = self[nbytes] = *_asked(size), int(size <= SMALL)
        return shape

    def steps(self, events: Sequence[Event]) -> list[Step]:
        steps: list[Step] = []
        for event in events:  # by number: to take a named tuple apart takes longer
            name, pool = event[1], event[4]
            asks, cut, home = self[event[3]]
            if not event[0]:
                asks = NONE_SERVES if name == RELEASE else 0
            steps.append((asks, cut, name, home + 2 * pool if pool else home, None))
        _part_soon(steps)
        return steps


def _asked(size: int) -> tuple[int, int]:
    """What a block of that size asks for, and what it cuts off."""
    return size << SPLIT, (size << SPLIT) - size


def _part_soon(steps: list[Step]) -> None:
    """What is allocated last before a run of frees, and freed in it, is freed first there, and marked as brief.

    The order of frees decides nothing: afterwards the same blocks are free. Small blocks are as large as asked for, so
    one that is large enough for several will do; of large ones at most one is brief at a time.
    """
    frees = [step[0] == 0 for step in steps]
    turns = [at for at, (one, next_one) in enumerate(pairwise(frees), 1) if one is not next_one]
    if frees[:1] == [True]:
        del turns[:1]
    for begin, end in zip_longest(turns[::2], turns[1::2], fillvalue=len(steps)):
        freed = {step[2]: step for step in steps[begin:end]}
        if steps[begin - 1][2] not in freed:
            continue
        soon, asked, first = list[Step](), dict[int, int](), begin
        while first:
            asks, cut, name, home, _ = steps[first - 1]
            if name not in freed or (home % 2 == 0 and home in asked):
                break
            first -= 1
            soon.append(freed.pop(name))
            asked[home] = asked.get(home, 0) + asks
            parts = tuple([(*_asked(wanted >> SPLIT), where) for where, wanted in asked.items()])
            steps[first] = asks, cut, name, home, (2 * len(soon) - 1, parts)
        steps[begin:end] = *soon, *freed.values()


@dataclass(frozen=True)
class _Part:
    """What was written once and can be copied, with what a copy has to look at: other names, and what is alive."""

    start: int
    events: list[Event]
    names: tuple[str, ...]
    frees: list[str]      # names that were alive before
    leaves: list[Event]   # what is alive afterwards

    @cached_property
    def differ(self) -> tuple[int, ...]:
        """The places of events whose names another part has others for."""
        names = frozenset(self.names)
        return tuple([at for at, event in enumerate(self.events) if event[1] in names]) if names else ()


_made = tuple.__new__  # an Event in a third of the time
_OWNERS = frozenset(OWNERS)


class Writer:
    """Writes a tape. It refuses what cannot happen: an unknown owner or phase, a second free, a name taken twice."""

    def __init__(self) -> None:
        self.pool = ORDINARY  # where allocations come from
        self._events: list[Event] = []
        self._marks: list[Mark] = []
        self._alive: dict[str, Event] = {}
        self._parts: dict[Hashable, _Part] = {}
        self._copies: list[Copy] = []

    def phase(self, name: str) -> None:
        if name not in PHASES:
            raise ValueError(f"{name!r} is not a phase: {', '.join(PHASES)}")
        self._marks.append(Mark(name, len(self._events)))

    def alloc(self, name: str, owner: str, nbytes: int) -> str:
        """Returns the name, so that a tensor can be passed on by it."""
        if name in self._alive:
            raise ValueError(f"{name!r} is already alive")
        if owner not in _OWNERS:
            raise ValueError(f"{owner!r} is not an owner: {', '.join(OWNERS)}")
        event = _made(Event, (True, name, owner, nbytes, self.pool))
        self._alive[name] = event
        self._events.append(event)
        return name

    def free(self, *names: str) -> None:
        for name in names:
            event = self._alive.pop(name, None)
            if event is None:
                raise ValueError(f"{name!r} is not alive")
            self._events.append(_made(Event, (False,) + event[1:]))  # noqa: RUF005 - sooner than to unpack

    def part(self, kind: Hashable, names: tuple[str, ...], write: Callable[[], object]) -> None:
        """A part of the tape. One of its kind that was written before is copied, but for the names that differ: to
        write takes ten times as long. The kind must say all that the events depend on."""
        if kind not in self._parts:
            start, before = len(self._events), self._alive.copy()
            write()
            after = self._alive
            frees = [name for name, event in before.items() if after.get(name) is not event]
            leaves = [event for name, event in after.items() if before.get(name) is not event]
            self._parts[kind] = _Part(start, self._events[start:], names, frees, leaves)
            self._copies.append(Copy(start, len(self._events) - start, start, names))
            return
        part = self._parts[kind]
        renamed, events = dict(zip(part.names, names, strict=True)), part.events.copy()
        for at in part.differ:
            event = events[at]
            events[at] = event._replace(name=renamed[event.name])
        for name in part.frees:
            del self._alive[renamed.get(name, name)]
        for event in part.leaves:
            name = renamed.get(event.name, event.name)
            self._alive[name] = event if name == event.name else event._replace(name=name)
        self._copies.append(Copy(len(self._events), len(events), part.start, names))
        self._events += events

    def release(self) -> None:
        self._events.append(Event(False, RELEASE, "other", 0))

    def free_if_alive(self, *names: str) -> None:
        self.free(*(name for name in names if name in self._alive))

    def events_since(self, number: int) -> list[Event]:
        return self._events[number:]

    @property
    def length(self) -> int:
        return len(self._events)

    def alive(self, name: str) -> bool:
        return name in self._alive

    @contextmanager
    def held(self, name: str, owner: str, nbytes: int) -> Iterator[str]:
        """Alive for the length of a `with`: a kernel's scratch."""
        yield self.alloc(name, owner, nbytes)
        self.free(name)

    def tape(self) -> Tape:
        if not self._marks or self._marks[0].start != 0:
            raise ValueError("a tape begins with a phase")
        return Tape(tuple(self._events), tuple(self._marks), tuple(self._copies))
