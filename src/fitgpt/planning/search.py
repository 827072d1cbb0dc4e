"""A config and a FitTarget → the fastest candidates that fit. Closed forms rank all candidates; the best are replayed.

One Search is for one shape of the model. goals.py tries other shapes and builds the answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ..config.fields import shown
from ..config.memory_savers import LEVELS
from ..config.resolve import resolve_run
from ..config.run_config import RunConfig, diff
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from ..tapes.engine import run as engine_tape
from ..tapes.engine.run import draft
from .budget import Budget
from .candidates import FREE_SETTINGS, LOSSY, Candidate, CandidateScan, Prune, SaverSet, SearchSpace, saver_sets
from .forecast import fits as run_fits
from .forecast import needs_of
from .layer_costs import (
    PAGE,
    RecomputeMix,
    describe_mix,
    lower_all,
    mix_of,
    one_layer_up,
    with_usual_loss,
    within_usual_loss,
)
from .speed import SpeedEstimate, estimate

Item = TypeVar("Item")

REPLAYED = 4          # candidates with different savers, micro-batches or modes that are replayed
SMALLEST_TRIED = 12   # candidates replayed to find the smallest memory, or before giving up
# How much faster a candidate must be to be chosen: per changed option, with a lossy saver, and with more in CPU RAM,
# whose speed is assumed.
MIN_GAIN_CHANGE, MIN_GAIN_LOSSY, MIN_GAIN_OFFLOAD = 0.002, 0.05, 0.05
TIE = 0.01            # closer than this, the estimate cannot rank: fewer changes and less memory decide …
CHANGE_WEIGHT = 1 / 3 # … where one changed option counts as much as this share of the memory limit


class ScoredConfig(NamedTuple):
    """A config, what it needs on a GPU, and how fast it should be there."""

    config: RunConfig
    flags: tuple[str, ...]        # that make it from the given config
    permission: str               # that it takes: one of candidates.PERMISSIONS
    needs: int
    headroom: int                 # what may be reserved, minus what it needs
    speed: SpeedEstimate | None   # None: the GPU's figures are not known
    measured: float | None = None # tokens per second, if it was timed
    exact: bool = True            # whether `needs` comes from replays; else it is an upper bound

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


class ReplayedCandidate(NamedTuple):
    """A candidate that fits by a replay; no single layer of it can keep more."""

    candidate: Candidate
    config: RunConfig   # checked

    @property
    def seconds(self) -> float:
        return self.candidate.seconds

    @property
    def permission(self) -> str:
        return self.candidate.savers.permission


class FitTarget(NamedTuple):
    """Where a run is fitted to."""

    platform: Platform
    budget: Budget
    card: GpuModel | None = None
    most_batch: int | None = None   # the largest micro-batch to try, where others compute on the GPU
    host_bytes: int | None = None   # CPU RAM that may be used; None: no limit

    def search(self, config: RunConfig, allow: frozenset[str] = frozenset()) -> Search:
        return Search(config, self, allow)


def score(savers: SaverSet, changes: int, seconds: float) -> float:
    """Seconds per step, raised by what the changes must gain. The lowest score is chosen."""
    return (seconds * (1 + MIN_GAIN_CHANGE * changes) * (1 + MIN_GAIN_LOSSY * (savers.permission in LOSSY))
            * (1 + MIN_GAIN_OFFLOAD * savers.more_offload))


def score_of(candidate: Candidate) -> float:
    return score(candidate.savers, candidate.changes, candidate.seconds)


@dataclass
class Search:
    """For one shape of the model. `given` may contain `auto`; `allow` is what candidates.permitted returns."""

    given: RunConfig
    target: FitTarget
    allow: frozenset[str]

    def __post_init__(self) -> None:
        self.platform, self.card, host_bytes = self.target.platform, self.target.card, self.target.host_bytes
        self.limit = self.target.budget.reserve_limit
        self.config = resolve_run(self.given, self.platform)
        self.space = SearchSpace(self.config, self.platform, self.card, self.target.most_batch)
        offloaded = engine_tape.host_bytes(draft(self.config, offload="optimizer"))
        self.saver_sets = [savers for savers in saver_sets(self.config, self.platform, self.allow)
                           if savers.options["offload"] == "none" or host_bytes is None or offloaded <= host_bytes]
        self.scanned = CandidateScan(within_usual_loss(self.limit, self.platform.expandable))
        self._replayed: dict[RunConfig, bool] = {}

    @property
    def replays(self) -> int:
        return len(self._replayed)

    @property
    def considered(self) -> int:
        return self.scanned.considered

    # ---- ranking

    def scan(self) -> None:
        """Ranks all candidates without lossy savers and with all of them; of the others only those that may win."""
        in_full = [savers for savers in self.saver_sets if savers.permission not in LOSSY]
        in_full += _most_lossy(self.saver_sets)
        self._scan(in_full)
        best = min(map(score_of, self.scanned.fastest), default=float("inf"))
        self._scan([savers for savers in self.saver_sets if savers not in in_full],
                   prune=lambda *candidate: score(*candidate) >= (1 + TIE) * best)

    def _scan(self, found: list[SaverSet], prune: Prune | None = None) -> None:
        for savers in found:
            self.space.scan(savers, self.scanned, prune)

    def best(self) -> list[ReplayedCandidate]:
        """The one to choose, then the fastest others; empty if nothing fits.

        The given run stays unless an exact candidate is faster, and an exact candidate unless a lossy one is. So more
        permissions never make the answer worse, and the exact answer does not depend on lossy candidates.
        """
        self.scan()
        chosen = self.unchanged()
        found = [chosen] if chosen is not None else []
        for lossy in (False, True):
            fastest = self._fastest([savers for savers in self.saver_sets if (savers.permission in LOSSY) == lossy])
            chosen = self._choose(fastest, instead_of=chosen)
            found += fastest
        if chosen is None:
            return []
        others = {one.config: one for one in sorted(found, key=lambda one: score_of(one.candidate))
                  if one.config not in (chosen.config, self.given)}
        return [chosen, *list(others.values())[:REPLAYED - 1]]

    def _choose(self, found: list[ReplayedCandidate], *,
                instead_of: ReplayedCandidate | None) -> ReplayedCandidate | None:
        """Among those as fast as the fastest, the one that changes least, if it is faster than `instead_of` by more
        than the estimate's error."""
        fastest = min((score_of(one.candidate) for one in found), default=0.0)
        near = [one for one in found if score_of(one.candidate) <= (1 + TIE) * fastest
                and (instead_of is None or (1 + TIE) * score_of(one.candidate) < score_of(instead_of.candidate))]
        return min(near, key=lambda one: self.change_cost(one.candidate)) if near else instead_of

    def _fastest(self, of: list[SaverSet]) -> list[ReplayedCandidate]:
        """The fastest with these savers that fit, by replays."""
        ranked = sorted((one for one in self.scanned.fastest if one.savers in of), key=score_of)
        tied = [one for one in ranked if score_of(one) <= (1 + TIE) * score_of(ranked[0])]
        return ([*self._first_that_fit(sorted(tied, key=self.change_cost), 1), *self._first_that_fit(ranked, REPLAYED)]
                or self._first_that_fit(self.smallest_candidates(of)[:SMALLEST_TRIED], 1))

    def change_cost(self, candidate: Candidate) -> float:
        """What decides between tied candidates: changed options and memory."""
        return CHANGE_WEIGHT * candidate.changes + candidate.mapped / max(self.limit, 1)

    def unchanged(self) -> ReplayedCandidate | None:
        """The given run, if it fits."""
        savers = next((savers for savers in self.saver_sets if not savers.more_offload and all(
            getattr(self.config, option) == value or option in FREE_SETTINGS
            for option, value in savers.options.items())), None)
        if savers is None or not self.fits(self.given):  # None: what is offloaded does not fit the CPU RAM
            return None
        candidate = Candidate(self.config, savers, 0, self.space.costs.cost(self.config),
                              self.space.cost(self.config), mix_of(self.given.levels))
        return ReplayedCandidate(candidate, self.given)

    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(bytes, tokens per second): the fastest candidate within each amount of memory."""
        tokens = self.config.tokens_per_step
        return tuple((self._with_fragmentation(mapped), tokens / seconds)
                     for mapped, seconds in self.scanned.frontier())

    # ---- the smallest

    def smallest(self, of: list[SaverSet]) -> list[Candidate]:
        """Candidates with the smallest micro-batch, each with the mix that needs least, the smallest first."""
        mixes: list[RecomputeMix] = [((level, self.config.n_layer),) for level in range(len(LEVELS))]
        found = [one._replace(mix=min((one.memory.mapped(mix), mix) for mix in mixes)[1]) for savers in of
                 for one in self.space.candidates(savers, batches=self.space.batches(savers)[:1])]
        return sorted(found, key=lambda one: (one.mapped, one.changes))

    def smallest_candidates(self, of: list[SaverSet]) -> list[Candidate]:
        """The smallest of each kind, as far as they may fit."""
        found = [one for one in self.smallest(of) if one.memory.may_fit(one.mix, self.limit)]
        return list(self._different(found, "cuda_graphs", "eval_batch_size"))

    def least(self) -> tuple[RunConfig, str]:
        """The config that needs least, and the permission it takes. The smallest by closed forms are replayed, until
        the next cannot need less."""
        first, *others = islice(self._different(self.smallest(self.saver_sets), "cuda_graphs"), SMALLEST_TRIED)
        best, least = first, self.needs(self.config_of(first))
        for one in others:
            if one.mapped - PAGE >= least:
                break
            if (needs := self.needs(self.config_of(one))) < least:
                best, least = one, needs
        return self.config_of(best), best.savers.permission

    # ---- replays

    def fits(self, config: RunConfig) -> bool:
        """Whether the config fits, by a replay."""
        if config not in self._replayed:
            self._replayed[config] = run_fits(resolve_run(config, self.platform), self.platform, self.limit)
        return self._replayed[config]

    def needs(self, config: RunConfig) -> int:
        return needs_of(resolve_run(config, self.platform), self.platform)

    def estimated_needs(self, config: RunConfig) -> int:
        """By closed forms, with the usual fragmentation."""
        run = resolve_run(config, self.platform)
        return self._with_fragmentation(self.space.costs.cost(run).mapped(mix_of(run.levels)))

    def _with_fragmentation(self, mapped: int) -> int:
        return with_usual_loss(mapped, self.platform.expandable)

    def is_maximal(self, config: RunConfig) -> bool:
        """Whether some layers recompute, and the run would not fit if any single one of them kept more."""
        run = resolve_run(config, self.platform)
        memory, higher = self.space.costs.cost(run), one_layer_up(mix_of(run.levels))
        may_fit = [mix for mix in higher if memory.may_fit(mix, self.limit)]
        return bool(higher) and not any(
            self.fits(replace(config, recompute=describe_mix(mix), grad_checkpoint=False)) for mix in may_fit)

    def scored(self, config: RunConfig, permission: str, *, at_most: int | None = None) -> ScoredConfig:
        """`at_most`: an upper bound on what the config needs, where the exact figure is not worth the replays."""
        needs = self.needs(config) if at_most is None else at_most
        return ScoredConfig(config, flags(self.given, config), permission, needs, self.limit - needs,
                            estimate(config, self.card, self.platform), exact=at_most is None)

    def scored_bound(self, one: ReplayedCandidate) -> ScoredConfig:
        """With an upper bound on its needs: it fits, so it needs no more than the limit."""
        bound = one.candidate.memory.needs(one.candidate.mix)
        return self.scored(one.config, one.permission, at_most=min(bound, self.limit))

    def config_of(self, candidate: Candidate) -> RunConfig:
        """A checked config that changes what it must of the given one, and nothing else."""
        given, chosen = self.given, candidate.config
        options: dict[str, Any] = {
            name: getattr(chosen, name) for name in ("batch_size", "gradient_accumulation_steps", "eval_batch_size",
                                                     "loss_chunk", "cuda_graphs", *candidate.savers.options)}
        if chosen.compile != self.config.compile:
            options["compile"] = chosen.compile
        if chosen.batch_size != given.batch_size:  # the same windows are evaluated
            options["eval_iters"] = -(-given.eval_iters * given.batch_size // chosen.batch_size)
        if candidate.mix != mix_of(given.levels):
            options |= {"recompute": describe_mix(candidate.mix), "grad_checkpoint": False}
        return replace(given, **options)

    def _different(self, candidates: Sequence[Candidate], *options: str) -> Iterator[Candidate]:
        """The first of each kind: of those that differ in savers, micro-batch, compilation, or in these options."""
        seen = set()
        for candidate in candidates:
            savers = tuple(candidate.savers.options.items())
            kind = (savers, *(getattr(candidate.config, option) for option in ("batch_size", "compile", *options)))
            if kind not in seen:
                seen.add(kind)
                yield candidate

    def _first_that_fit(self, candidates: Sequence[Candidate], how_many: int) -> list[ReplayedCandidate]:
        replayed = (self._replay(candidate) for candidate in self._different(candidates))
        return list(islice((one for one in replayed if one is not None), how_many))

    def _replay(self, candidate: Candidate) -> ReplayedCandidate | None:
        """With as few layers recomputed as fit: first fewer kept until it fits, then more while one layer more fits."""
        memory = candidate.memory

        def fits(mix: RecomputeMix) -> bool:
            return self.fits(self.config_of(candidate._replace(mix=mix)))

        smaller = [candidate.mix]
        for mix in lower_all(candidate.mix):  # a level that keeps less may need more, where little is kept at all
            if memory.mapped(mix) < memory.mapped(smaller[-1]):
                smaller.append(mix)
        place = gallop_search(smaller, fits)
        if place == len(smaller):
            return None
        mix = smaller[place]
        while higher := next(filter(fits, self._one_layer_up(candidate, mix)), None):
            mix = higher
        fitting = candidate._replace(mix=mix)
        return ReplayedCandidate(fitting, self.config_of(fitting))

    def _one_layer_up(self, candidate: Candidate, mix: RecomputeMix) -> list[RecomputeMix]:
        """The mixes in which one layer keeps more, the fastest first, as far as they may fit."""
        found = [more for more in one_layer_up(mix) if candidate.memory.may_fit(more, self.limit)]
        return sorted(found, key=lambda one: sum(layers * candidate.cost.layers[level] for level, layers in one))


def _most_lossy(found: list[SaverSet]) -> list[SaverSet]:
    """The set with most lossy savers, nothing offloaded."""
    lossy = [savers for savers in found if savers.permission in LOSSY and savers.options["offload"] == "none"]
    return [max(lossy, key=lambda savers: len(savers.options))] if lossy else []


FLAGS_FIRST = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "recompute")


def flags(given: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """What to add to a command, what matters most first."""
    changed = {key: now for key, _, now in diff(given, config)}
    order = [*(key for key in FLAGS_FIRST if key in changed), *(key for key in changed if key not in FLAGS_FIRST)]
    return tuple(f"--{key}={changed[key] if '*' in str(changed[key]) else shown(changed[key])}" for key in order)


def gallop_search(items: Sequence[Item], holds: Callable[[Item], bool]) -> int:
    """The index that bisect_left finds, with growing strides from the start, where it usually is."""
    last_false, at, stride = -1, 0, 1
    while at < len(items) and not holds(items[at]):
        last_false, at, stride = at, at + stride, 2 * stride
    return bisect_left(items, True, last_false + 1, min(at, len(items)), key=holds)
