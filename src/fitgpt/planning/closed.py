"""What would a run need with other levels of recomputing? A sum for each moment at which it may peak.

A micro-step goes up the layers and down again, and layers of one level are alike: each leaves so many bytes behind and
reaches so high above its start. So the peak of any number of layers at any mix of levels is the highest of a few sums,
equal to what the tape says, to the byte. What the allocator loses between blocks is bounded, not known: a run that is
to be chosen is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, repeat
from typing import NamedTuple

from ..config.memory_savers import LEVELS
from ..core.units import MiB
from ..memory.blocks import LARGE_SEGMENT

Mix = tuple[tuple[int, int], ...]  # (the number of a level in LEVELS, layers), from the first layer to the last

# A cap is asked for what is needed, in steps of 2 MiB; what is then mapped into an expandable segment are whole pages.
PAGE = LARGE_SEGMENT


class Lost(NamedTuple):
    """What the allocator loses between blocks: bytes, tensors of a micro-batch's [N, C], shares of all that is held and
    of gradients that come and go, which end up in the holes that activations leave."""

    pages: int
    tensors: int = 0
    share: float = 0.0
    gradients: float = 0.0


# Bounds: above what any of 4,400 random runs lost with expandable segments, and any of 2,900 with plain ones.
MOST_LOST = {True: Lost(80 * MiB, 7, 0.03, 0.06), False: Lost(448 * MiB, 14, 0.11, 0.10)}
# As most runs have it: half of those lost less, half more.
USUALLY_LOST = {True: Lost(20 * MiB, share=0.01), False: Lost(20 * MiB, share=0.05)}


def mix_of(levels: tuple[str, ...]) -> Mix:
    return tuple((LEVELS.index(level), len(list(run))) for level, run in groupby(levels))


def in_words(mix: Mix) -> str:
    """As `recompute` takes it."""
    return LEVELS[mix[0][0]] if len(mix) == 1 else ",".join(f"{layers}*{LEVELS[level]}" for level, layers in mix)


def raised(mix: Mix) -> list[Mix]:
    """The mixes in which one layer keeps more."""
    counts = dict(mix)
    return [_ordered({**counts, level: counts[level] - 1, more: counts.get(more, 0) + 1})
            for level in counts for more in range(level)]


def lowered(mix: Mix) -> Mix | None:
    """One layer of those that keep most goes to the level of those that keep least, or to the next."""
    counts = dict(mix)
    most, least = min(counts), max(counts)
    less = least if least > most else least + 1
    if less == len(LEVELS):
        return None
    return _ordered({**counts, most: counts[most] - 1, less: counts.get(less, 0) + 1})


def descent(mix: Mix) -> list[Mix]:
    """From a mix, layer by layer, to the one that keeps nothing but inputs."""
    found = [mix]
    while (lower := lowered(found[-1])) is not None:
        found.append(lower)
    return found


def _ordered(counts: dict[int, int]) -> Mix:
    """The layers that keep least come first."""
    return tuple((level, layers) for level, layers in sorted(counts.items(), reverse=True) if layers)


def with_usual_loss(mapped: int, expandable: bool) -> int:
    usual = USUALLY_LOST[expandable]
    return mapped + usual.pages + int(usual.share * mapped)


def within_usual_loss(limit: int, expandable: bool) -> int:
    """What may be mapped, if the rest of a limit is for what is usually lost."""
    usual = USUALLY_LOST[expandable]
    return int((limit - usual.pages) / (1 + usual.share))


class Part(NamedTuple):
    """A stretch of a tape: the bytes that it leaves behind, and the most it holds above its start."""

    net: int
    peak: int


Line = tuple[int, int]  # its slope and its start


class MicroStep(NamedTuple):
    """One micro-step, in parts; those of a layer in the order of LEVELS."""

    recorded: bool           # whether it lies in recorded work's pool
    beside: int              # bytes elsewhere when it begins, beyond what evaluation leaves, without gradients
    again: bool              # whether all gradients are there already
    embed: Part              # with the workspaces, if products wake up in it
    up: tuple[Part, ...]     # forward, one layer
    turn: Part               # the head and the loss
    down: tuple[Part, ...]   # backward, one layer
    rest: Part               # the embedding's gradients

    @property
    def leaves(self) -> int:
        """What stays, where gradients were there before: workspaces that it woke, and its loss."""
        return self.embed.net + self.turn.net + self.rest.net

    def peak(self, mix: Mix) -> int:
        """The most it holds above its start. Along layers of one level all is linear: the ends of a run decide."""
        at, most = self.embed
        for level, layers in mix:
            net, peak = self.up[level]
            at += layers * net
            if at - net + peak > most:
                most = at - net + peak
        net, peak = self.turn
        if at + peak > most:
            most = at + peak
        at += net
        for level, layers in reversed(mix):
            net, peak = self.down[level]
            if at + peak > most:
                most = at + peak
            at += layers * net
            if at - net + peak > most:
                most = at - net + peak
        return max(most, at + self.rest.peak)

    def lines(self, few: int, many: int, layers: int) -> list[Line]:
        """The same for 0 < k < layers layers at level `few`, the others at `many`: the highest of these lines at k."""
        up, down, before, behind = self.up[few], self.down[few], self.up[many], self.down[many]
        start, full, turned = self.embed.net, layers * before.net, self.embed.net + self.turn.net
        grows, left = up.net - before.net, layers * (before.net + behind.net)
        falls = grows - behind.net  # once the layers at `many` are behind us
        return [
            (0, self.embed.peak),
            (up.net, start - up.net + up.peak),
            (grows, full + max(start - before.net + before.peak, start + self.turn.peak, turned + behind.peak)),
            (falls, turned + left + max(behind.peak - behind.net, down.peak)),
            (falls + down.net, turned + left + max(down.peak - down.net, self.rest.peak)),
        ]


class Home(NamedTuple):
    """What is there before the first batch."""

    resident: int
    loading: int       # the most while it is loaded
    step: int          # what the optimizer's step adds


class Looking(NamedTuple):
    """Evaluation: its peaks in the ordinary pool and in recorded work's, and what training finds of it. When a later
    one is recorded, the products' workspaces are there already."""

    peak: int
    recorded_peak: int
    beside: int        # bytes in the ordinary pool while it is recorded
    leaves: int
    recorded_again: int
    leaves_again: int
    places: int        # bytes of the ordinary pool that a recording reads from


@dataclass(frozen=True)
class Shape:
    """A run but for the mix of its levels."""

    home: Home
    looking: Looking
    steps: tuple[MicroStep, ...]
    gradients: int     # of all parameters, where they come and go
    places: int        # bytes of the ordinary pool that a recorded micro-step reads from
    tensor: int        # bytes of a micro-batch's [N, C] in the products' precision
    expandable: bool   # the allocator's segments

    def allocated(self, mix: Mix) -> int:
        """The most that lies in blocks at any moment: what the tape says, to the byte."""
        home, look = self.home.resident, self.looking
        beside = [home + look.leaves + step.beside + (self.gradients if step.again else 0) for step in self.steps]
        return max(self.home.loading, home + look.peak, home + look.beside + look.recorded_peak, self._later_look,
                   self._at_step + look.places + look.leaves_again + self._left,
                   *(there + step.peak(mix) for there, step in zip(beside, self.steps, strict=True)))

    def could_fit(self, mix: Mix, limit: int) -> bool:
        """False only where a replay under that cap fails for certain."""
        return self.mapped(mix) - (PAGE if self.expandable else 0) <= limit

    def mapped(self, mix: Mix) -> int:
        """What must be held from the driver if nothing is lost between blocks."""
        return max(self._floor, *(beside + step.peak(mix) for beside, step in self._beside))

    def holds_no_less_than(self, other: Shape) -> bool:
        """Whatever the mix, of a run with the same micro-steps."""
        return self._floor >= other._floor and all(
            ours >= theirs for (ours, _), (theirs, _) in zip(self._beside, other._beside, strict=True))

    def mapped_along(self, few: int, many: int, layers: int, stride: int = 1) -> list[int]:
        """The same with 1, 1 + stride … of the layers at level `few` and the others at `many`."""
        ends = [(beside + start + slope, beside + start + slope * (layers - 1), slope) for beside, step in self._beside
                for slope, start in step.lines(few, many, layers)]
        leader = max(ends)  # a line that is below another at both ends is below it all along
        ruling = [leader, *(each for each in ends if each[1] > leader[1])]
        return list(map(max, repeat(self._floor, len(range(1, layers, stride))),
                        *(count(at_first, stride * slope) for at_first, _, slope in ruling)))

    def needs(self, mix: Mix) -> int:
        """On the safe side of what a replay says."""
        mapped, most = self.mapped(mix), MOST_LOST[self.expandable]
        return (mapped + most.pages + most.tensors * self.tensor + int(most.share * mapped)
                + int(most.gradients * self.gradients))

    @cached_property
    def _floor(self) -> int:
        """What is held whatever the levels."""
        home, look = self.home.resident, self.looking
        return max(self.home.loading, home + look.peak, home + look.beside + look.recorded_peak, self._later_look,
                   self._at_step + look.places + (look.recorded_again + self._left if look.places else 0))

    @cached_property
    def _beside(self) -> tuple[tuple[int, MicroStep], ...]:
        """Each micro-step with what is held besides it. Recorded work's pool stays for good: the optimizer's step finds
        it, after a later evaluation, whose recording reads from places of its own."""
        after, look = self.home.resident + self.looking.leaves, self.looking
        return tuple((max(after + step.beside, self._at_step + look.places) if step.recorded else
                      after + step.beside + (self.gradients if step.again else 0), step) for step in self.steps)

    @property
    def _later_look(self) -> int:
        """The evaluation that is recorded after the micro-step was; the one before was forgotten."""
        look = self.looking
        return self.home.resident + look.beside + self.places + look.recorded_again + self._left if look.places else 0

    @property
    def _left(self) -> int:
        """What a recorded micro-step keeps in its pool: workspaces and its loss."""
        return sum(step.leaves for step in self.steps if step.recorded)

    @property
    def _at_step(self) -> int:
        return self.home.resident + self.looking.leaves + self.steps[-1].beside + self.gradients + self.home.step
