"""What does a deep run hold at its highest, about? Told from shallow ones, in a fraction of the time that its own tape
takes to write: where layers are alike, each adds what the one before it did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from .allocator import owners_after
from .tape import Tape

SHALLOW = 3  # layers, then one more and two: the fewest that have a first one, a last one and one between
LAYER = re.compile(r"(?<![\w.])\d+(?=\.)")
BEFORE = "what is there already"

Write = Callable[[int], Tape]  # of so many layers
Place = tuple[str, int, int]  # a tensor's name, with its layer from the nearer end; which allocation of it, of how many


class Highest(NamedTuple):
    allocated: int
    owners: dict[str, int]


def drafted(layers: int, write: Write, *, reuses: bool = False) -> dict[str, Highest]:
    """By phase; mostly to the byte what the tape of the run asks for (docs/log.md says how far off it was at worst).

    `reuses`: whether a compiler reuses buffers across layers. Some places then come and go with each layer, and only
    those count that grow as much with the fifth as with the fourth.
    """
    one, two, *three = (_Shallow(SHALLOW + more, write) for more in range(3 if reuses else 2))
    more = layers - SHALLOW
    found: dict[str, tuple[int, int, int]] = {}  # what is allocated at most, and after which event of the two
    for (phase, _, _), first, second, *thirds in zip(one.tape.spans(), *(each.heights() for each in (one, two, *three)),
                                                     strict=True):
        grows = {place: second[place][0] - first[place][0] for place in first.keys() & second.keys()}
        evenly = {place for place, step in grows.items()
                  if all(place in third and third[place][0] - second[place][0] == step for third in thirds)}
        allocated, place = max((first[place][0] + more * grows[place], place) for place in evenly or grows)
        if phase not in found or allocated > found[phase][0]:
            found[phase] = allocated, first[place][1], second[place][1]
    before, after = (owners_after(each.tape, each.tape.changes, events) for each, events in zip(
        (one, two), list(zip(*found.values(), strict=True))[1:], strict=True))
    return {phase: Highest(allocated, _grown(before[at], after[then], more))
            for phase, (allocated, at, then) in found.items()}


def _grown(before: dict[str, int], after: dict[str, int], more: int) -> dict[str, int]:
    """Of each owner: with so many layers more than before, where after is one more."""
    return {owner: held for owner in before | after
            if (held := before.get(owner, 0) + more * (after.get(owner, 0) - before.get(owner, 0)))}


class _Shallow:
    def __init__(self, layers: int, write: Write) -> None:
        self.tape, self._names = write(layers), _Names(layers)  # of tensors, with their layer from the nearer end

    def heights(self) -> list[Mapping[Place, tuple[int, int]]]:
        """Of each stretch: what is allocated at a place, and the number of the event. Where nothing is trained the
        highest place is the same in all layers, and is enough."""
        return [self._in_stretch(start, end, trains=phase in ("first_train", "train"))
                for phase, start, end in self.tape.spans()]

    def _in_stretch(self, start: int, end: int, *, trains: bool) -> dict[Place, tuple[int, int]]:
        heights = self.tape.heights
        if not trains:
            at = max(range(start, end), key=heights.__getitem__, default=start - 1)
            return {("the highest", 1, 1): (heights[at], at)}
        times, found = {BEFORE: 1}, {(BEFORE, 1): (heights[start - 1], start - 1)}
        changes, events, names = self.tape.changes, self.tape.events, self._names
        for at, (change, then) in enumerate(pairwise([*changes[start:end], 0]), start):
            if change > 0 >= then:  # what is asked for after it with nothing freed between is higher
                name = names[events[at][1]]
                times[name] = time = times.get(name, 0) + 1
                found[name, time] = heights[at], at
        return {(name, time, times[name]): where for (name, time), where in found.items()}


class _Names(dict[str, str]):
    """Layers of the second half count backwards from the last, so that the name is the same in a deeper run."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._layers = layers

    def __missing__(self, name: str) -> str:
        known = self[name] = LAYER.sub(self._counted, name, count=1)
        return known

    def _counted(self, number: re.Match[str]) -> str:
        layer = int(number[0])
        return str(layer if layer < self._layers // 2 else layer - self._layers)
