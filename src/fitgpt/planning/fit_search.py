"""A config and a FitTarget → the fastest settings that fit: permitted memory savers, candidates, their ranking.

Candidates differ in savers, compilation, CUDA graphs, micro-batch, chunk of the loss, evaluation batch, and what each
layer recomputes. They all train on the same tokens per step, in the same order. Memory and speed come from closed forms
(layer_costs.py, speed.py), so that thousands can be ranked; the best of them are replayed.

One Search is for one shape of the model. fit_goals.py tries other shapes and builds the answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any, NamedTuple

from ..config.fields import nearest, option_specs, shown
from ..config.memory_savers import LEVELS, LOSSY_SAVERS, OTHER_RULES, SAVERS, loss_chunk_tokens
from ..config.resolve import resolve_run
from ..config.run_config import RunConfig, diff, gpt2_shapes
from ..core.errors import UsageError
from ..core.units import MiB
from ..hardware import gpus
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from ..tapes.engine import host_bytes, uses_cuda_graphs
from .budget import Budget
from .forecast import fits, needs_of
from .layer_costs import (
    PAGE,
    CostCache,
    RecomputeMix,
    RunCost,
    describe_mix,
    lower_all,
    mix_of,
    one_layer_up,
    with_usual_loss,
    within_usual_loss,
)
from .speed import SpeedEstimate, StepCost, estimate, has_figures, likely_efficiency, step_cost

# ---- permissions

# What a change may take, from what nobody minds to what only the user may allow.
PERMISSIONS = ("free", "places", "lossy", "rules", "context", "model")
LOSSY = ("lossy", "rules")  # permissions of changes after which losses differ
NAMED_SAVERS = {**LOSSY_SAVERS, **OTHER_RULES}
ALLOWABLE = ("lossy", "context", "model", *NAMED_SAVERS)
OFFLOAD = option_specs(RunConfig)["offload"].choices  # the fastest first
# Settings that offloading requires. They cost nothing, so candidates always have them.
FREE_SETTINGS: dict[str, Any] = {option: value for saver in SAVERS if saver.option == "offload"
                                 for option, value in saver.settings.items() if option != "offload"}


def parse_allow(text: str) -> frozenset[str]:
    """'lossy' or 'adam8bit,context' → the names of what is allowed; "lossy" stands for every lossy saver."""
    words = [word for word in text.replace(" ", ",").split(",") if word]
    for word in words:
        if word not in ALLOWABLE:
            near = nearest(word, ALLOWABLE)
            raise UsageError(f"--allow {text}: {word!r} is none of {', '.join(ALLOWABLE)}.",
                             f"Did you mean --allow {near[0]}?" if near else "--allow lossy")
    return frozenset({*words, *(LOSSY_SAVERS if "lossy" in words else ())} - {"lossy"})


def describe_allow(allow: frozenset[str]) -> str:
    """The inverse of `parse_allow`: what to type after --allow."""
    if "lossy" in allow or allow >= set(LOSSY_SAVERS):
        allow = allow - set(LOSSY_SAVERS) | {"lossy"}
    return ",".join(word for word in ALLOWABLE if word in allow)


def permitted(config: RunConfig, allow: frozenset[str]) -> frozenset[str]:
    """What is allowed and possible: a model that exists already keeps its shape, a resumed run also its optimizer."""
    if config.init_from == "resume":
        return frozenset()
    return allow - {"model"} if config.init_from != "scratch" else allow


def permission_notes(config: RunConfig, allow: frozenset[str]) -> tuple[str, ...]:
    """A sentence on what was allowed and is not possible."""
    ignored = allow - permitted(config, allow)
    if not ignored:
        return ()
    if config.init_from == "resume":
        return (f"A resumed run cannot change its model or optimizer: --allow {','.join(sorted(ignored))} is ignored.",)
    weights = config.init_from if config.init_from in gpt2_shapes else "its weights"
    return (f"The model has the shape of {weights}: --allow model is ignored.",)


class SaverSet(NamedTuple):
    """Memory savers to use together, and the permission they take."""

    permission: str
    options: dict[str, Any]
    more_offload: bool  # whether more lives in CPU RAM than in the given run


def saver_sets(config: RunConfig, platform: Platform, allow: frozenset[str]) -> list[SaverSet]:
    """Every permitted set of savers that work together, the least permission first."""
    may, found = permitted(config, allow), list[SaverSet]()
    usable = [name for name, options in NAMED_SAVERS.items() if name in may
              and any(getattr(config, option) != value for option, value in options.items())
              and (platform.has_bf16 or "bfloat16" not in options.values())]
    free = {option: value for option, value in FREE_SETTINGS.items() if getattr(config, option) != value}
    for names in (each for count in range(len(usable) + 1) for each in combinations(usable, count)):
        settings = {item for name in names for item in NAMED_SAVERS[name].items()}
        if len(settings) > len({option for option, _ in settings}):
            continue  # two savers set one option to different values
        savers = {option: value for name in names for option, value in NAMED_SAVERS[name].items()}
        for place in OFFLOAD:
            options = {**savers, **free, "offload": place}
            if options.get("gradient_accumulation_steps") == 1:  # then one micro-batch has all sequences of a step
                options["batch_size"] = config.batch_size * config.gradient_accumulation_steps
            try:
                replace(config, **options)
            except UsageError:
                continue  # they exclude each other
            more_offload = OFFLOAD.index(place) > OFFLOAD.index(config.offload)
            permission = ("rules" if set(names) & set(OTHER_RULES) else "lossy" if names else
                          "places" if more_offload else "free")
            found.append(SaverSet(permission, options, more_offload))
    return sorted(found, key=lambda savers: PERMISSIONS.index(savers.permission))


def _most_lossy(found: list[SaverSet]) -> list[SaverSet]:
    """The set with most lossy savers, nothing offloaded."""
    lossy = [savers for savers in found if savers.permission in LOSSY and savers.options["offload"] == "none"]
    return [max(lossy, key=lambda savers: len(savers.options))] if lossy else []


# ---- candidates

CHUNKS = (256, 512, 1024, 2048, 4096, 8192)  # tokens per chunk of the loss …
MOST_CHUNKS = 64                             # … and chunks per micro-batch
EVAL_TOKENS = 4096                           # tokens that keep a GPU busy in an evaluation
MOST_MIXES = 24                              # mixes of two recompute levels that are tried
MOST_SEQUENCES = 4096                        # of a micro-batch: larger ones are no faster
BIN = 32 * MiB                               # of the frontier
PAIRS = tuple((few, many) for few in range(len(LEVELS)) for many in range(few))
STAND_IN = "RTX 4070"                        # ranks candidates for a GPU whose figures are not known
REPLAYED = 4          # candidates with different savers, micro-batches or modes that are replayed
SMALLEST_TRIED = 12   # candidates replayed to find the smallest memory, or before giving up
# How much faster a candidate must be to be chosen: per changed option, with a lossy saver, and with more in CPU RAM,
# whose speed is assumed.
MIN_GAIN_CHANGE, MIN_GAIN_LOSSY, MIN_GAIN_OFFLOAD = 0.002, 0.05, 0.05
TIE = 0.01            # closer than this, the estimate cannot rank: fewer changes and less memory decide …
CHANGE_WEIGHT = 1 / 3 # … where one changed option counts as much as this share of the memory limit
# Whether to skip candidates: given the savers, the number of changes, and the seconds per step without recomputing.
Prune = Callable[[SaverSet, int, float], bool]


def score(savers: SaverSet, changes: int, seconds: float) -> float:
    """Seconds per step, raised by what the changes must gain. The lowest score is chosen."""
    return (seconds * (1 + MIN_GAIN_CHANGE * changes) * (1 + MIN_GAIN_LOSSY * (savers.permission in LOSSY))
            * (1 + MIN_GAIN_OFFLOAD * savers.more_offload))


class Candidate(NamedTuple):
    """Settings that may be chosen. `mix` says what each layer recomputes, whatever `config.recompute` says."""

    config: RunConfig   # resolved; Search.config_of makes the config to choose
    savers: SaverSet
    changes: int        # options that differ from the given run
    memory: RunCost
    cost: StepCost
    mix: RecomputeMix

    @property
    def seconds(self) -> float:
        """Estimated seconds per step."""
        in_layers = sum(layers * self.cost.layers[level] for level, layers in self.mix)
        return self.cost.seconds(self.config.gradient_accumulation_steps, in_layers)

    @property
    def score(self) -> float:
        return score(self.savers, self.changes, self.seconds)

    @property
    def mapped(self) -> int:
        """Bytes that the allocator must reserve if nothing is lost to fragmentation."""
        return self.memory.mapped(self.mix)


class ScoredConfig(NamedTuple):
    """A config, what it needs on a GPU, and how fast it should be there."""

    config: RunConfig
    flags: tuple[str, ...]        # that make it from the given config
    permission: str               # that it takes: one of PERMISSIONS
    needs: int
    headroom: int                 # what may be reserved, minus what it needs
    speed: SpeedEstimate | None   # None: the GPU's figures are not known
    measured: float | None = None # tokens per second, if it was timed
    exact: bool = True            # whether `needs` comes from replays; else it is an upper bound

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


class FitTarget(NamedTuple):
    """Where a run is fitted to."""

    platform: Platform
    budget: Budget
    card: GpuModel | None = None
    most_batch: int | None = None   # the largest micro-batch to try, where others compute on the GPU
    host_bytes: int | None = None   # CPU RAM that may be used; None: no limit

    def search(self, config: RunConfig, allow: frozenset[str] = frozenset()) -> Search:
        return Search(config, self, allow)


class Search:
    """For one shape of the model. `given` may contain `auto`; `allow` is what `permitted` returns."""

    def __init__(self, given: RunConfig, target: FitTarget, allow: frozenset[str]) -> None:
        self.given, self.target, self.platform = given, target, target.platform
        self.config = config = resolve_run(given, self.platform)
        self.limit = target.budget.reserve_limit
        self.ranked_on = target.card if target.card and has_figures(target.card) else gpus.find(STAND_IN)
        self.costs = CostCache(self.platform)
        self.saver_sets = [savers for savers in saver_sets(config, self.platform, allow) if target.host_bytes is None
                           or host_bytes(replace(config, **savers.options)) <= target.host_bytes]
        # What the scan finds: the fastest mix of each candidate within a limit, and the fastest per bin of memory.
        self.scan_limit = within_usual_loss(self.limit, self.platform.expandable)
        self.fastest: list[Candidate] = []
        self.bins: dict[int, float] = {}
        self.considered = 0
        self._replayed: dict[RunConfig, bool] = {}

    @property
    def replays(self) -> int:
        return len(self._replayed)

    # ---- candidates

    def candidates(self, savers: SaverSet, limit: int | None = None, *, batches: Sequence[int] | None = None,
                   prune: Prune | None = None) -> Iterator[Candidate]:
        """Those that may fit `limit`, with every layer keeping all. Smaller micro-batches come first in each mode."""
        given, layers = self.config, self.config.n_layer
        sequences = given.batch_size * given.gradient_accumulation_steps
        compared = ("batch_size", "eval_batch", "loss_chunk", "cuda_graphs", "compile", *savers.options)
        for mode in self.modes(savers):
            for batch in batches or self.batches(savers):
                larger_may_fit = False
                for chunk in self.chunks(batch):
                    options = {**savers.options, **mode, "batch_size": batch, "loss_chunk": chunk,
                               "gradient_accumulation_steps": sequences // batch}
                    configs = [replace(given, **options, eval_batch_size=size) for size in self.eval_batches(batch)]
                    cost = self.step_cost(configs[0])  # the evaluation batch does not affect the speed
                    for config in configs:
                        changes = sum(getattr(config, name) != getattr(given, name) for name in compared)
                        least = cost.seconds(config.gradient_accumulation_steps, layers * min(cost.layers))
                        if prune is not None and prune(savers, changes, least):
                            larger_may_fit = True  # not known, so larger batches are tried
                            continue
                        memory = self.costs.cost(config)
                        levels = reversed(range(len(LEVELS)))  # what keeps least usually needs least
                        if limit is None or any(memory.mapped(((level, layers),)) <= limit for level in levels):
                            larger_may_fit = True
                            yield Candidate(config, savers, changes, memory, cost, ((0, layers),))
                        else:
                            self.considered += len(LEVELS)
                if not larger_may_fit:
                    break

    def step_cost(self, config: RunConfig) -> StepCost:
        return step_cost(config, self.ranked_on, self.platform, likely_efficiency(self.ranked_on))

    def modes(self, savers: SaverSet) -> list[dict[str, Any]]:
        """Settings of compile and cuda_graphs: as given, compiled where that works, and without CUDA graphs where they
        would be used."""
        given, found = self.config, list[dict[str, Any]]()
        for compiled in [given.compile] if given.compile or not self.platform.compiles else [False, True]:
            mode: dict[str, Any] = {"compile": compiled, "cuda_graphs": given.cuda_graphs}
            found.append(mode)
            if uses_cuda_graphs(replace(given, **savers.options, **mode)):
                found.append({**mode, "cuda_graphs": False})
        return found

    def batches(self, savers: SaverSet) -> list[int]:
        """The micro-batches that divide the sequences of a step."""
        given = self.config.batch_size
        sequences = given * self.config.gradient_accumulation_steps
        most = self.target.most_batch or sequences
        if savers.options.get("step_in_backward", self.config.step_in_backward):  # it excludes accumulation
            return [sequences] if sequences <= max(most, given) else []
        sizes = range(1, min(most, MOST_SEQUENCES) + 1)
        return [size for size in sizes if sequences % size == 0] + [given] * (given > MOST_SEQUENCES)

    def chunks(self, batch: int) -> list[int]:
        """Values of `loss_chunk`; 0 is the engine's own choice."""
        tokens = batch * self.config.block_size
        usual = loss_chunk_tokens(tokens, self.config.vocab_size)
        sizes = {size for size in CHUNKS if size < tokens and tokens <= MOST_CHUNKS * size and size != usual}
        given = self.config.loss_chunk
        return sorted({0, *sizes, *({given} if given < tokens else ())}, key=lambda size: size or usual)

    def eval_batches(self, batch: int) -> list[int]:
        """Values of `eval_batch_size`: as given, as many windows as keep the GPU busy, and one."""
        given = self.config.eval_batch
        busy = max(EVAL_TOKENS // self.config.eval_block, 1)
        sizes = {given, *(size for size in (busy, 1) if size < given)}
        return sorted(0 if size == batch and not self.config.eval_batch_size else size for size in sizes)

    # ---- ranking

    def scan(self) -> None:
        """Ranks all candidates without lossy savers and with all of them; of the others only those that may win."""
        in_full = [savers for savers in self.saver_sets if savers.permission not in LOSSY]
        in_full += _most_lossy(self.saver_sets)
        for savers in in_full:
            for candidate in self.candidates(savers, self.scan_limit):
                self.scan_mixes(candidate)
        best = min((one.score for one in self.fastest), default=float("inf"))
        for savers in (savers for savers in self.saver_sets if savers not in in_full):
            for candidate in self.candidates(savers, self.scan_limit,
                                             prune=lambda *settings: score(*settings) >= (1 + TIE) * best):
                self.scan_mixes(candidate)

    def scan_mixes(self, candidate: Candidate) -> None:
        """Tries all mixes of at most two levels. Layers that keep less come first: their temporaries then meet fewer
        saved tensors. Not every number of layers of a deep model: the mix that is chosen is refined layer by layer."""
        layers, memory, cost = candidate.config.n_layer, candidate.memory, candidate.cost
        micro_steps, bins, limit = candidate.config.gradient_accumulation_steps, self.bins, self.scan_limit
        best: tuple[float, RecomputeMix] | None = None
        for level in range(len(LEVELS)):
            uniform = candidate._replace(mix=((level, layers),))
            held, seconds = uniform.mapped, uniform.seconds
            if held <= limit and (best is None or seconds < best[0]):
                best = seconds, uniform.mix
            bins[held // BIN] = min(seconds, bins.get(held // BIN, seconds))
        counts = range(1, layers, -(-layers // MOST_MIXES))
        for few, many in PAIRS:
            first, more = cost.fixed + layers * cost.layers[many], cost.layers[few] - cost.layers[many]
            row = memory.mapped_along(few, many, layers, counts.step)
            for k, held in zip(counts, row, strict=True):
                seconds = micro_steps * max(first + k * more, cost.host) + cost.step
                if held <= limit and (best is None or seconds < best[0]):
                    best = seconds, ((few, k), (many, layers - k))
                if seconds < bins.get(held // BIN, 1e30):
                    bins[held // BIN] = seconds
        self.considered += len(LEVELS) + len(PAIRS) * len(counts)
        if best is not None:
            self.fastest.append(candidate._replace(mix=best[1]))

    def best(self) -> list[Candidate]:
        """The one to choose, then the fastest others; empty if nothing fits.

        The given run stays unless an exact candidate is faster, and an exact candidate unless a lossy one is. So more
        permissions never make the answer worse, and the exact answer does not depend on lossy candidates.
        """
        self.scan()
        chosen = self.unchanged()
        found = [chosen] if chosen is not None else []
        for lossy in (False, True):
            fitting = self._fastest([savers for savers in self.saver_sets if (savers.permission in LOSSY) == lossy])
            found += fitting
            # Of those as fast as the fastest, the one that changes least, if it is faster than the choice so far by
            # more than the estimate's error.
            fastest = min((one.score for one in fitting), default=0.0)
            near = [one for one in fitting if one.score <= (1 + TIE) * fastest
                    and (chosen is None or (1 + TIE) * one.score < chosen.score)]
            chosen = min(near, key=self.change_cost) if near else chosen
        if chosen is None:
            return []
        others = {self.config_of(one): one for one in sorted(found, key=lambda one: one.score)}
        unwanted = self.config_of(chosen), self.given
        return [chosen, *[one for config, one in others.items() if config not in unwanted][:REPLAYED - 1]]

    def _fastest(self, of: list[SaverSet]) -> list[Candidate]:
        """The fastest with these savers that fit, by replays."""
        ranked = sorted((one for one in self.fastest if one.savers in of), key=lambda one: one.score)
        tied = [one for one in ranked if one.score <= (1 + TIE) * ranked[0].score]
        return ([*self._first_that_fit(sorted(tied, key=self.change_cost), 1), *self._first_that_fit(ranked, REPLAYED)]
                or self._first_that_fit(self.smallest_candidates(of)[:SMALLEST_TRIED], 1))

    def change_cost(self, candidate: Candidate) -> float:
        """What decides between tied candidates: changed options and memory."""
        return CHANGE_WEIGHT * candidate.changes + candidate.mapped / max(self.limit, 1)

    def unchanged(self) -> Candidate | None:
        """The given run, if it fits."""
        savers = next((savers for savers in self.saver_sets if not savers.more_offload and all(
            getattr(self.config, option) == value or option in FREE_SETTINGS
            for option, value in savers.options.items())), None)
        if savers is None or not self.fits(self.given):  # None: what is offloaded does not fit the CPU RAM
            return None
        return Candidate(self.config, savers, 0, self.costs.cost(self.config), self.step_cost(self.config),
                         mix_of(self.given.levels))

    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(bytes, tokens per second): the fastest candidate within each amount of memory; more memory only where it is
        faster."""
        found: list[tuple[int, float]] = []
        for place, seconds in sorted(self.bins.items()):
            if not found or seconds < found[-1][1] * 0.999:
                found.append(((place + 1) * BIN, seconds))
        return tuple((with_usual_loss(mapped, self.platform.expandable), self.config.tokens_per_step / seconds)
                     for mapped, seconds in found)

    # ---- the smallest

    def smallest(self, of: list[SaverSet]) -> list[Candidate]:
        """Candidates with the smallest micro-batch, each with the mix that needs least, the smallest first."""
        mixes: list[RecomputeMix] = [((level, self.config.n_layer),) for level in range(len(LEVELS))]
        found = [one._replace(mix=min((one.memory.mapped(mix), mix) for mix in mixes)[1]) for savers in of
                 for one in self.candidates(savers, batches=self.batches(savers)[:1])]
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
            self._replayed[config] = fits(resolve_run(config, self.platform), self.platform, self.limit)
        return self._replayed[config]

    def needs(self, config: RunConfig) -> int:
        return needs_of(resolve_run(config, self.platform), self.platform)

    def estimated_needs(self, config: RunConfig) -> int:
        """By closed forms, with the usual fragmentation."""
        run = resolve_run(config, self.platform)
        return with_usual_loss(self.costs.cost(run).mapped(mix_of(run.levels)), self.platform.expandable)

    def is_maximal(self, config: RunConfig) -> bool:
        """Whether some layers recompute, and the run would not fit if any single one of them kept more."""
        run = resolve_run(config, self.platform)
        memory, higher = self.costs.cost(run), one_layer_up(mix_of(run.levels))
        may_fit = [mix for mix in higher if memory.may_fit(mix, self.limit)]
        return bool(higher) and not any(
            self.fits(replace(config, recompute=describe_mix(mix), grad_checkpoint=False)) for mix in may_fit)

    def scored(self, config: RunConfig, permission: str, *, at_most: int | None = None) -> ScoredConfig:
        """`at_most`: an upper bound on what the config needs, where the exact figure is not worth the replays."""
        needs = self.needs(config) if at_most is None else at_most
        return ScoredConfig(config, flags(self.given, config), permission, needs, self.limit - needs,
                            estimate(config, self.target.card, self.platform), exact=at_most is None)

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

    def _first_that_fit(self, candidates: Sequence[Candidate], how_many: int) -> list[Candidate]:
        """The first of each kind that fit, by replays, each with as few layers recomputed as fit."""
        refined = (self._refined(candidate) for candidate in self._different(candidates))
        return list(islice((one for one in refined if one is not None), how_many))

    def _refined(self, candidate: Candidate) -> Candidate | None:
        """With as few layers recomputed as fit: first fewer kept until it fits, then more while one layer more fits."""
        memory, costs = candidate.memory, candidate.cost.layers

        def fits(mix: RecomputeMix) -> bool:
            return self.fits(self.config_of(candidate._replace(mix=mix)))

        smaller = [candidate.mix]
        for mix in lower_all(candidate.mix):  # a level that keeps less may need more, where little is kept at all
            if memory.mapped(mix) < memory.mapped(smaller[-1]):
                smaller.append(mix)
        fails, place, stride = -1, 0, 1  # growing strides, then bisection: the first that fits is usually near
        while place < len(smaller) and not fits(smaller[place]):
            fails, place, stride = place, place + stride, 2 * stride
        place = bisect_left(smaller, True, fails + 1, min(place, len(smaller)), key=fits)
        if place == len(smaller):
            return None
        found: RecomputeMix | None = smaller[place]
        while found is not None:
            mix = found
            higher = [more for more in one_layer_up(mix) if memory.may_fit(more, self.limit)]
            higher.sort(key=lambda more: sum(layers * costs[level] for level, layers in more))  # the fastest first
            found = next(filter(fits, higher), None)
        return candidate._replace(mix=mix)


FLAGS_FIRST = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "recompute")


def flags(given: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """What to add to a command, what matters most first."""
    changed = {key: now for key, _, now in diff(given, config)}
    order = [*(key for key in FLAGS_FIRST if key in changed), *(key for key in changed if key not in FLAGS_FIRST)]
    return tuple(f"--{key}={changed[key] if '*' in str(changed[key]) else shown(changed[key])}" for key in order)
