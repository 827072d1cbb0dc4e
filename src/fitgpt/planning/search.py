"""The fastest settings that fit, and why. Closed forms rank every candidate; the first few are replayed, exactly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, NamedTuple, TypeVar

from ..config.fields import shown
from ..config.memory_savers import LEVELS
from ..config.run_config import RunConfig, diff
from ..hardware.gpus import Card
from ..memory import gpt
from ..memory.setting import Setting
from ..nouns import Budget, Standing
from .candidates import Branch, Candidate, Field, Scanned, Stem, Told, Worth
from .changes import fits as replay_fits
from .changes import holdings
from .closed import PAGE, Mix, descent, in_words, mix_of, raised, with_usual_loss, within_usual_loss
from .folded import draft
from .forecast import settled
from .permission import COSTLESS, Way, ways
from .speed import estimate

Item = TypeVar("Item")
Aside = Callable[[Callable[[], Any]], Callable[[], Any]]  # starts work, and gives what waits for its result

FINALISTS = 4      # of different savers, micro-batches or recordings: these are replayed
LEAST_TRIES = 12   # so many of the smallest are replayed at most to say what is the least memory
LAST_TRIES = 12    # where nothing surely fits: so many of the smallest are replayed before that is said
# How much faster a candidate must be to be taken: for each thing that it changes, for a lossy saver, and for what it
# keeps in the host's memory, whose speed is assumed.
WORTH_A_CHANGE, WORTH_A_LOSS, WORTH_THE_HOST = 0.002, 0.05, 0.05
LOSSY = ("lossy", "rules")
ALIKE = 0.01       # nearer than the estimate can tell: then fewer changes and more headroom decide …
A_CHANGE = 1 / 3   # … of which one change is worth so much of the memory there is


def in_turn(work: Callable[[], Item]) -> Callable[[], Item]:
    """To be done when its result is asked for."""
    return work


class Finalist(NamedTuple):
    """A candidate whose levels were settled by replays."""

    stem: Stem
    mix: Mix
    config: RunConfig
    seconds: float

    @property
    def score(self) -> float:
        return score(self.stem.way, self.stem.changes, self.seconds)

    @property
    def changes(self) -> int:
        return self.stem.changes

    @property
    def mapped(self) -> int:
        return self.stem.shape.mapped(self.mix)


def score(way: Way, changes: int, seconds: float) -> float:
    """Seconds, and what a candidate's changes must be worth: the lowest is taken."""
    return (seconds * (1 + WORTH_A_CHANGE * changes) * (1 + WORTH_A_LOSS * (way.permission in LOSSY))
            * (1 + WORTH_THE_HOST * way.elsewhere))


def score_of(candidate: Candidate) -> float:
    return score(candidate.way, candidate.changes, candidate.seconds)


@dataclass
class Search:
    """For one shape of model. `asked` may leave to the device what it leaves to `auto`."""

    asked: RunConfig
    setting: Setting
    budget: Budget
    card: Card | None
    allow: frozenset[str]
    most_batch: int | None = None   # a micro-batch is never larger
    host_bytes: int | None = None   # of the host's memory, as far as it is known
    aside: Aside = in_turn          # who does a part of the work

    def __post_init__(self) -> None:
        self.config = settled(self.asked, self.setting)
        self.limit = self.budget.reserve_limit
        self.field = Field(self.config, self.setting, self.card, self.most_batch)
        there = gpt.host_bytes(draft(self.config, offload="optimizer"))
        self.ways = [way for way in ways(self.config, self.setting, self.allow)
                     if way.knobs["offload"] == "none" or self.host_bytes is None or there <= self.host_bytes]
        self.scanned = Scanned(within_usual_loss(self.limit, self.setting.expandable))
        self._replayed: dict[RunConfig, bool] = {}

    @property
    def replays(self) -> int:
        return len(self._replayed)

    @property
    def considered(self) -> int:
        return self.scanned.considered

    # ---- candidates

    def finalists(self) -> list[Finalist]:
        """The one to take first, then the fastest others; empty: nothing fits.

        The run as it is stays unless an exact candidate is faster, and an exact one unless a lossy one is: so what is
        allowed besides never makes the answer worse. What an exact search finds does not depend on lossy candidates.
        """
        self.scan()
        taken = self.as_asked()
        found = [taken] if taken is not None else []
        for lossy in (False, True):
            of_these = self._fastest([way for way in self.ways if (way.permission in LOSSY) == lossy])
            taken = self._taken(of_these, instead_of=taken)
            found += of_these
        if taken is None:
            return []
        others = {one.config: one for one in sorted(found, key=lambda one: one.score)
                  if one.config not in (taken.config, self.asked)}
        return [taken, *list(others.values())[:FINALISTS - 1]]

    def _taken(self, found: list[Finalist], *, instead_of: Finalist | None) -> Finalist | None:
        """Of those about as fast as the fastest, the one that changes least; only if the estimate can tell that it is
        faster than what it would be taken `instead_of`."""
        fastest = min((one.score for one in found), default=0.0)
        near = [one for one in found if one.score <= (1 + ALIKE) * fastest
                and (instead_of is None or (1 + ALIKE) * one.score < instead_of.score)]
        return min(near, key=self.bother) if near else instead_of

    def _fastest(self, of: list[Way]) -> list[Finalist]:
        """The fastest of these ways that fit, by replays."""
        ranked = sorted((one for one in self.scanned.fastest if one.way in of), key=score_of)
        alike = self._alike(ranked)
        self._foresee([*alike[:1], *islice(self._different(ranked), FINALISTS)])
        return ([*self._first_to_settle(alike, 1), *self._first_to_settle(ranked, FINALISTS)]
                or self._first_to_settle(self.small_enough(of)[:LAST_TRIES], 1))

    def bother(self, one: Candidate | Finalist) -> float:
        """What one would rather have less of: changes and memory."""
        return A_CHANGE * one.changes + one.mapped / max(self.limit, 1)

    def as_asked(self) -> Finalist | None:
        """The run with nothing changed, where that fits."""
        unchanged = next((way for way in self.ways if not way.elsewhere and all(
            getattr(self.config, knob) == value or knob in COSTLESS for knob, value in way.knobs.items())), None)
        if unchanged is None or not self.fits(self.asked):  # without a way there is no room on the host
            return None
        stem = Stem(self.config, unchanged, 0, self.field.folded.shape(self.config), self.field.cost(self.config))
        mix = mix_of(self.asked.levels)
        return Finalist(stem, mix, self.asked, stem.seconds(mix))

    def _alike(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        """Those about as fast as the first, the least bother first."""
        return sorted((one for one in ranked if score_of(one) <= (1 + ALIKE) * score_of(ranked[0])), key=self.bother)

    def _first_to_settle(self, candidates: Sequence[Candidate], how_many: int) -> list[Finalist]:
        settled_ones = (self._settle(candidate) for candidate in self._different(candidates))
        return list(islice((one for one in settled_ones if one is not None), how_many))

    def smallest(self, of: list[Way]) -> list[Candidate]:
        """Of each set of savers, with the smallest micro-batch: what holds least, the smallest first."""
        found = []
        mixes: list[Mix] = [((level, self.config.n_layer),) for level in range(len(LEVELS))]
        for branch in self.branches(of):
            for stem in self.field.stems(branch, batches=self.field.batches(branch[0])[:1]):
                mapped, mix = min((stem.shape.mapped(mix), mix) for mix in mixes)
                found.append(Candidate(stem.seconds(mix), mapped, mix, stem.config, stem.way, stem.changes))
        return sorted(found, key=lambda one: (one.mapped, one.changes))

    def small_enough(self, of: list[Way]) -> list[Candidate]:
        """The smallest of each kind that could fit."""
        found = [one for one in self.smallest(of) if self.field.stem(one).shape.could_fit(one.mix, self.limit)]
        return list(self._different(found, "cuda_graphs", "eval_batch_size"))

    def least(self) -> tuple[RunConfig, str]:
        """The config that needs least, and the permission that takes: the smallest by closed forms are replayed, until
        the next cannot need less."""
        first, *others = islice(self._different(self.smallest(self.ways), "cuda_graphs"), LEAST_TRIES)
        best, least = first, self.needs(self.config_of(first, first.mix))
        for one in others:
            if one.mapped - PAGE >= least:
                break
            if (needs := self.needs(self.config_of(one, one.mix))) < least:
                best, least = one, needs
        return self.config_of(best, best.mix), best.way.permission

    def fits(self, config: RunConfig) -> bool:
        if config not in self._replayed:
            self._replayed[config] = replay_fits(config, self.setting, self.budget)
        return self._replayed[config]

    def config_of(self, one: Stem | Candidate, mix: Mix) -> RunConfig:
        """A checked config that changes what it must of the one asked for, and nothing else."""
        asked, chosen = self.asked, one.config
        knobs: dict[str, Any] = {
            name: getattr(chosen, name) for name in ("batch_size", "gradient_accumulation_steps", "eval_batch_size",
                                                     "loss_chunk", "cuda_graphs", *one.way.knobs)}
        if chosen.compile != self.config.compile:
            knobs["compile"] = chosen.compile
        if chosen.batch_size != asked.batch_size:  # the same windows are evaluated
            knobs["eval_iters"] = -(-asked.eval_iters * asked.batch_size // chosen.batch_size)
        if mix != mix_of(asked.levels):
            knobs |= {"recompute": in_words(mix), "grad_checkpoint": False}
        return replace(asked, **knobs)

    def needs(self, config: RunConfig) -> int:
        return holdings(config, self.setting).needs

    def standing(self, config: RunConfig, permission: str, *, needs: int | None = None, at_most: int | None = None
                 ) -> Standing:
        """`needs`: if it is known; `at_most`: a bound on it, where it is not worth the replays."""
        needs = at_most if at_most is not None else needs if needs is not None else self.needs(config)
        return Standing(config, flags(self.asked, config), permission, needs, self.limit - needs,
                        estimate(config, self.card, self.setting), exact=at_most is None)

    def runner_up(self, finalist: Finalist) -> Standing:
        """It fits, so it needs no more than there is."""
        return self.standing(finalist.config, finalist.stem.way.permission,
                             at_most=min(finalist.stem.shape.needs(finalist.mix), self.limit))

    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(bytes, tokens a second), as the candidates have it."""
        tokens = self.config.tokens_per_step
        return tuple((self.with_loss(mapped), tokens / seconds) for mapped, seconds in self.scanned.frontier())

    def about(self, config: RunConfig) -> int:
        """What a config needs, as most do."""
        told = settled(config, self.setting)
        return self.with_loss(self.field.folded.shape(told).mapped(mix_of(told.levels)))

    def spends_all(self, config: RunConfig) -> bool:
        """Whether it has layers that could keep more, and would not fit if any single one of them did."""
        told = settled(config, self.setting)
        shape, higher = self.field.folded.shape(told), raised(mix_of(told.levels))
        could = [mix for mix in higher if shape.could_fit(mix, self.limit)]
        return bool(higher) and not any(
            self.fits(replace(config, recompute=in_words(mix), grad_checkpoint=False)) for mix in could)

    def with_loss(self, mapped: int) -> int:
        """And what is usually lost between blocks."""
        return with_usual_loss(mapped, self.setting.expandable)

    # ---- how

    def scan(self) -> None:
        """All candidates of the ways that need no lossy saver, and of the one that uses them all; of the others only
        what could still win."""
        in_full = [way for way in self.ways if way.permission not in LOSSY] + _most_lossy(self.ways)
        self._scan(in_full)
        best = min(map(score_of, self.scanned.fastest), default=float("inf"))
        self._scan([way for way in self.ways if way not in in_full],
                   worth=lambda *told: score(*told) < (1 + ALIKE) * best)

    def _scan(self, found: list[Way], worth: Worth | None = None) -> None:
        """Every second branch aside: that of a way whose work is not recorded, mostly."""
        def scanned(some: list[Branch]) -> tuple[Told, ...]:
            return tuple(self.field.scanned(branch, self.scanned.limit, worth) for branch in some)

        branches = self.branches(found)
        theirs = self.aside(lambda: scanned(branches[1::2]))
        ours = scanned(branches[::2])
        told = [each for both in zip_longest(ours, theirs()) for each in both if each is not None]
        for branch, each in zip(branches, told, strict=True):
            self.scanned.take(each, branch, self.field)

    def branches(self, found: list[Way]) -> list[Branch]:
        return [branch for way in found for branch in self.field.branches(way)]

    def _different(self, candidates: Sequence[Candidate], *knobs: str) -> Iterator[Candidate]:
        """The first of each kind: those that differ in savers, micro-batch, compiling, or in these knobs."""
        seen = set()
        for candidate in candidates:
            config, savers = candidate.config, tuple(candidate.way.knobs.items())
            kind = (savers, *(getattr(config, knob) for knob in ("batch_size", "compile", *knobs)))
            if kind not in seen:
                seen.add(kind)
                yield candidate

    def _foresee(self, candidates: Sequence[Candidate]) -> None:
        """Settles them all, every second one aside: from then on it is known which of their mixes fit."""
        theirs = candidates[1::2]

        def tried(one: Candidate) -> tuple[tuple[Mix, bool], ...]:
            found: dict[Mix, bool] = {}
            self._settle(one, found)
            return tuple(found.items())

        waits = self.aside(lambda: tuple(map(tried, theirs)))
        for one in candidates[::2]:
            self._settle(one)
        for one, found in zip(theirs, waits(), strict=True):
            self._replayed |= {self.config_of(one, mix): fits for mix, fits in found}

    def _settle(self, candidate: Candidate, tried: dict[Mix, bool] | None = None) -> Finalist | None:
        """As few layers recomputed as really fit: down until it fits, then up while any single layer may keep more.
        `tried` is told of every mix that was."""
        stem, way_down = self.field.stem(candidate), [candidate.mix]

        def fits(mix: Mix) -> bool:
            found = self.fits(self.config_of(stem, mix))
            if tried is not None:
                tried[mix] = found
            return found

        for mix in descent(candidate.mix):  # a level that keeps less may hold more, where little is kept at all
            if stem.shape.mapped(mix) < stem.shape.mapped(way_down[-1]):
                way_down.append(mix)
        place = first_true(way_down, fits)
        if place == len(way_down):
            return None
        mix = way_down[place]
        while higher := next(filter(fits, self._raised(stem, mix)), None):
            mix = higher
        return Finalist(stem, mix, self.config_of(stem, mix), stem.seconds(mix))

    def _raised(self, stem: Stem, mix: Mix) -> list[Mix]:
        """One layer at a level that keeps more, the fastest first; what cannot fit is not among them."""
        found = [more for more in raised(mix) if stem.shape.could_fit(more, self.limit)]
        return sorted(found, key=lambda one: sum(layers * stem.cost.layers[level] for level, layers in one))


def _most_lossy(found: list[Way]) -> list[Way]:
    """The way with the most rounding, on the card."""
    lossy = [way for way in found if way.permission in LOSSY and way.knobs["offload"] == "none"]
    return [max(lossy, key=lambda way: len(way.knobs))] if lossy else []


FIRST = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "recompute")


def flags(asked: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """What to add to a command, what matters most first."""
    changed = {key: now for key, _, now in diff(asked, config)}
    order = [*(key for key in FIRST if key in changed), *(key for key in changed if key not in FIRST)]
    return tuple(f"--{key}={changed[key] if '*' in str(changed[key]) else shown(changed[key])}" for key in order)


def first_true(items: Sequence[Item], holds: Callable[[Item], bool]) -> int:
    """Where bisect_left would find it, but looked for from the beginning on, in ever longer strides: it is near."""
    last_false, at, stride = -1, 0, 1
    while at < len(items) and not holds(items[at]):
        last_false, at, stride = at, at + stride, 2 * stride
    return bisect_left(items, True, last_false + 1, min(at, len(items)), key=holds)
