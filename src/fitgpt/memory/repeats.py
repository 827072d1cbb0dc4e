"""Follows a tape by an allocator's rules, and passes over what repeats: a part that meets the large blocks as it met
them before leaves them as it left them then.

Small blocks may lie elsewhere. They are put where they lay when it first came out so: a segment of theirs has 2 MiB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .tape import Copy, Step, Tape

LARGE, SMALL = 0, 1  # pools of ordinary work
SHORT = 25_000       # steps that are all followed: that is soon done, and small segments are right, too


class Allocator(Protocol):
    """Native or Expandable."""

    def places(self) -> Any: ...

    def put_back(self, places: Any, renamed: Mapping[str, str]) -> None: ...

    def standing(self, pool: int) -> tuple[int, ...]: ...

    def stands_as(self, places: Any, renamed: Mapping[str, str], pool: int) -> bool: ...

    def follow(self, steps: Sequence[Step], begin: int, stop: int, cap: int | None, extra: dict[int, int],
               segments: list[tuple[int, int]], *, gives_back: bool = True) -> int | None: ...


class Track(NamedTuple):
    """What an allocator follows: steps, and those parts of them that may meet what they met before, as far as one pool
    tells."""

    steps: Sequence[Step]
    parts: Sequence[Copy]
    pool: int = LARGE


def track(tape: Tape) -> Track:
    return Track(tape.steps, tape.chained if len(tape.steps) > SHORT else ())


def track_of_one_pool(tape: Tape, pool: int) -> Track:
    """Without the steps of the other, and without what is brief in both. Unless memory is given back, neither minds
    the other."""
    numbers = [number for number, step in enumerate(tape.steps) if step[3] % 2 == pool]
    steps = [(*step[:4], None) if step[4] else step for step in (tape.steps[number] for number in numbers)]
    parts = []
    for part in track(tape).parts:
        start, end, source = (bisect_left(numbers, at) for at in (part.start, part.start + part.length, part.source))
        parts.append(part._replace(start=start, length=end - start, source=source))
    return Track(steps, parts, pool)


class States:
    """Where blocks lay after parts. Two are one where all tensors of one pool lie alike."""

    def __init__(self, allocator: Allocator, pool: int) -> None:
        self._allocator, self._pool = allocator, pool
        self._places: list[tuple[Any, Copy]] = []  # and the part before it
        self._numbers: dict[tuple[int, ...], list[int]] = {}  # by what is free

    def now(self, part: Copy) -> int:
        """The number of the one that the allocator is in after a part."""
        numbers = self._numbers.setdefault(self._allocator.standing(self._pool), [])
        for number in numbers:
            places, before = self._places[number]
            if self._allocator.stands_as(places, _renamed(before, part), self._pool):
                return number
        self._places.append((self._allocator.places(), part))
        numbers.append(len(self._places) - 1)
        return numbers[-1]

    def go_back(self, number: int, part: Copy) -> None:
        """As if the allocator had come to a state by this part."""
        places, before = self._places[number]
        self._allocator.put_back(places, _renamed(before, part))


def _renamed(then: Copy, now: Copy) -> dict[str, str]:
    """What has another name after another part. In both, the same name stands in the same place."""
    return {old: new for old, new in zip(then.names, now.names, strict=False) if old != new}


def follow(allocator: Allocator, along: Track, begin: int, cap: int | None, extra: dict[int, int],
           segments: list[tuple[int, int]], *, gives_back: bool = True) -> int | None:
    """As the allocators' own, to the end."""
    states = States(allocator, along.pool)
    known: dict[tuple[int | None, int], tuple[dict[int, int], int]] = {}  # (state, source of a part): extra, state
    at = begin
    here: int | None = None     # the state, after a part
    passed: Copy | None = None  # the last part that was passed over, until the allocator is put behind it

    def go_to(end: int, extra: dict[int, int]) -> int | None:
        nonlocal at, passed
        if passed and here is not None:
            states.go_back(here, passed)
        begin, at, passed = at, end, None
        return allocator.follow(along.steps, begin, end, cap, extra, segments, gives_back=gives_back)

    for part in along.parts:
        end = part.start + part.length
        if end <= at:
            continue
        if at == part.start and (here, part.source) in known:
            own, here = known[here, part.source]
            extra.update({number + at: more for number, more in own.items()})
            at, passed = end, part
            continue
        if at < part.start:
            refused = go_to(part.start, extra)
            if refused is not None:
                return refused
            here = None
        own = {}
        refused = go_to(end, own)
        extra.update(own)
        if refused is not None:
            return refused
        before, here = here, states.now(part)
        known[before, part.source] = {number - part.start: more for number, more in own.items()}, here
    return go_to(len(along.steps), extra)
