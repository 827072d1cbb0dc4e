"""Follows a tape by an allocator's rules, and passes over what repeats: once a micro-batch meets the large blocks as an
earlier one did, it is known where they lie in all that come after it.

Small blocks may still move then. They are left where they are: a segment of theirs has 2 MiB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from .tape import Look, Step, Tape

LARGE, SMALL = 0, 1  # pools of ordinary work


class Allocator(Protocol):
    """Native or Expandable."""

    def places(self) -> Any: ...

    def put_back(self, places: Any) -> bool: ...

    def standing(self, pool: int, names: Iterable[str]) -> tuple[object, ...]: ...

    def follow(self, steps: Sequence[Step], begin: int, stop: int, cap: int | None, extra: dict[int, int],
               segments: list[tuple[int, int]], *, gives_back: bool = True) -> int | None: ...


class Track(NamedTuple):
    """What an allocator follows: steps, and where it may have been before, as far as one pool tells."""

    steps: Sequence[Step]
    looks: Sequence[Look]
    pool: int = LARGE


def track(tape: Tape) -> Track:
    return Track(tape.steps, tape.looks)


def track_of_one_pool(tape: Tape, pool: int) -> Track:
    """Without the steps of the other, and without what is brief in both. Unless memory is given back, neither minds
    the other."""
    numbers = [number for number, step in enumerate(tape.steps) if step[3] % 2 == pool]
    steps = [(*step[:4], None) if step[4] else step for step in (tape.steps[number] for number in numbers)]
    looks = [look._replace(at=bisect_left(numbers, look.at), end=bisect_left(numbers, look.end)) for look in tape.looks]
    return Track(steps, looks, pool)


def follow(allocator: Allocator, along: Track, begin: int, cap: int | None, extra: dict[int, int],
           segments: list[tuple[int, int]], *, gives_back: bool = True) -> int | None:
    """As the allocators' own, to the end."""
    at, met, places = begin, dict[tuple[object, ...], int](), dict[int, Any]()
    for look in along.looks:
        if look.at < at:  # passed over, or before the beginning
            continue
        refused = allocator.follow(along.steps, at, look.at, cap, extra, segments, gives_back=gives_back)
        if refused is not None:
            return refused
        at = look.at
        before = met.setdefault((look.end, look.names, *allocator.standing(along.pool, look.names)), at)
        if before == at:
            places[at] = allocator.places()
            continue
        rest = (look.end - at) % (at - before)
        at = look.end
        if rest and not allocator.put_back(places[before + rest]):
            at -= rest
        _repeat(extra, before, look.at, at)
    return allocator.follow(along.steps, at, len(along.steps), cap, extra, segments, gives_back=gives_back)


def _repeat(extra: dict[int, int], begin: int, end: int, until: int) -> None:
    """What was extra from `begin` to `end` is so again and again, until then."""
    for number, more in list(extra.items()):
        if begin <= number < end:
            extra.update(dict.fromkeys(range(number + end - begin, until, end - begin), more))
