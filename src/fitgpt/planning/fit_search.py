"""A config and a FitTarget → the fastest settings that fit: permitted memory savers, candidates, and the choice.

1. Enumerate: candidates differ in savers, compilation, CUDA graphs, micro-batch, chunk of the loss, evaluation batch,
   and what each layer recomputes. They all train on the same tokens per step, in the same order.
2. Bound: memory and seconds of each come from closed forms (layer_costs.py, speed.py).
3. Sort those that fit by closed forms, the fastest first.
4. Replay the best few, and let as few layers recompute as fit.
5. Choose (`Search.choose`): the given run if it fits and nothing gains more than the estimate's error, else the
   fastest; of settings that the estimate cannot tell apart, those that need less.

One Search is for one shape of the model. fit_goals.py tries other shapes and builds the answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, islice
from math import isqrt
from typing import Any, NamedTuple

from ..config.fields import nearest, option_specs, shown
from ..config.memory_savers import LOSSY_SAVERS, OTHER_RULES, POLICIES, SAVERS, loss_chunk_tokens
from ..config.optimizers import host_bytes
from ..config.run_config import MOST_TOKENS, RunConfig, diff, gpt2_shapes, resolve_run
from ..core.errors import UsageError
from ..hardware import gpus
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from .budget import Budget
from .forecast import assumptions, fits, lowest_error, lowest_error_of, recorded_of, replay_run
from .layer_costs import (
    PAGE,
    CostCache,
    RecomputeMix,
    RunCost,
    describe_mix,
    lower_all,
    mix_of,
    one_layer_up,
    policies_of,
    with_usual_loss,
    within_usual_loss,
)
from .measured_speeds import measured_on
from .speed import (
    MEASURED_ERROR,
    SpeedEstimate,
    StepCost,
    communication,
    estimate,
    has_figures,
    likely_efficiency,
    modelled,
    speed_key,
    step_cost,
)
from .verdict import Verdict, safe_limit, tight_reasons, verdict_of

# ---- permissions

# What a change may take, from what nobody minds to what only the user may allow.
PERMISSIONS = ("free", "places", "lossy", "rules", "context", "model")
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
    names: tuple[str, ...]   # of NAMED_SAVERS
    options: dict[str, Any]


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
            if not works_with(config, options):
                continue
            permission = ("rules" if set(names) & set(OTHER_RULES) else "lossy" if names else
                          place_permission(config, place))
            found.append(SaverSet(permission, names, options))
    return sorted(found, key=lambda savers: PERMISSIONS.index(savers.permission))


def place_permission(config: RunConfig, offload: str) -> str:
    return "places" if OFFLOAD.index(offload) > OFFLOAD.index(config.offload) else "free"


def works_with(config: RunConfig, options: dict[str, Any]) -> bool:
    """Whether no two options exclude each other."""
    try:
        replace(config, **options)
    except UsageError:
        return False
    return True


# ---- candidates

CHUNKS = (256, 1024, 4096)  # tokens per chunk of the loss …
MOST_CHUNKS = 16            # … and chunks per micro-batch
EVAL_TOKENS = 4096          # tokens that keep a GPU busy in an evaluation
LARGER = 1.25               # times as large: the next micro-batch that is tried
TIE = 0.01                  # closer than this, the roofline cannot rank two settings of one run
MOST_OF_A_GAIN = 0.8        # that a step up should have: the rest often takes several times as much memory
TRIED = 12                  # candidates replayed before giving up
RUNNERS_UP = 3


class Candidate(NamedTuple):
    """Settings that may be chosen. `mix` says what each layer recomputes, whatever `config.saved_activations` says."""

    config: RunConfig   # resolved; Search.config_of makes the config to choose
    savers: SaverSet
    other_options: int         # options that differ from the given run, without saved_activations
    memory: RunCost
    time: StepCost
    mix: RecomputeMix = ()
    other_mix: bool = False    # whether it differs from the given run's
    mapped: int = 0            # bytes that the allocator must reserve if nothing is lost to fragmentation
    seconds: float = 0.0       # per step, by the estimate
    measured: bool = False     # whether that very run was measured on this GPU

    @property
    def changes(self) -> int:
        return self.other_options + self.other_mix


class ScoredConfig(NamedTuple):
    """A config, what it needs on a GPU, and how fast it should be there."""

    config: RunConfig
    flags: tuple[str, ...]        # that make it from the given config
    permission: str               # that it takes: one of PERMISSIONS
    needs: int
    headroom: int                 # what may be reserved, minus what it needs
    speed: SpeedEstimate | None   # None: the GPU's figures are not known
    tight: tuple[str, ...] = ()   # why it may run out of memory all the same, one sentence each
    measured: float | None = None # tokens per second, if it was timed

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.headroom, tight=self.tight)

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS


class FitTarget(NamedTuple):
    """Where a run is fitted to."""

    platform: Platform
    budget: Budget
    card: GpuModel | None = None
    most_batch: int | None = None   # the largest micro-batch to try, where others compute on the GPU
    host_bytes: int | None = None   # CPU RAM that may be used; None: no limit
    safe: bool = False              # whether settings that are tight do not count as fitting

    def search(self, config: RunConfig, allow: frozenset[str] = frozenset()) -> Search:
        return Search(config, self, allow)


class Search:
    """For one shape of the model. `given` may contain `auto`; `allow` is what `permitted` returns."""

    def __init__(self, given: RunConfig, target: FitTarget, allow: frozenset[str]) -> None:
        self.given, self.target, self.platform = given, target, target.platform
        self.config = config = resolve_run(given, self.platform)
        self.mix = mix_of(config.policies)
        lowest = min(lowest_error_of(recorded_of("fitgpt"), compiled) for compiled in (False, True))
        self.limit = safe_limit(target.budget, lowest) if target.safe else target.budget.reserve_limit
        self.usual_limit = within_usual_loss(self.limit, self.platform.expandable)  # for closed forms
        self.ranked_on = card = target.card if target.card and has_figures(target.card) else similar_gpu(self.platform)
        self.costs = CostCache(self.platform)
        self.saver_sets = [savers for savers in saver_sets(config, self.platform, allow)
                           if self.has_ram(replace(config, **savers.options))]
        expected = estimate(config, card, self.platform, measured=False)
        assert expected is not None  # the GPU's figures are known
        self.error = expected.error
        self.scale = expected.likely / modelled(config, card, self.platform, likely_efficiency(card))
        self.measured = {speed_key(resolve_run(each.config, self.platform)): each.tokens_per_s
                         for each in reversed(measured_on(card.name))} if target.card else {}
        self._fits: dict[RunConfig, bool] = {}
        self._needs: dict[RunConfig, int] = {}

    @property
    def replays(self) -> int:
        """Configs that were replayed."""
        return len(self._fits.keys() | self._needs.keys())

    # ---- 1. enumerate

    @cached_property
    def candidates(self) -> list[Candidate]:
        return [candidate for savers in self.saver_sets for config in self.configs(savers, self.batches(savers))
                for candidate in self.with_mixes(config, savers)]

    def configs(self, savers: SaverSet, batches: Sequence[int]) -> Iterator[RunConfig]:
        """Settings with these savers; larger micro-batches only while one may fit."""
        given, layers = self.config, self.config.n_layer
        sequences = given.batch_size * given.gradient_accumulation_steps
        for mode in self.modes(savers):
            for batch in batches:
                larger_may_fit = False
                for chunk in self.chunks(batch):
                    for eval_batch in self.eval_batches(batch):
                        config = replace(given, **{**mode, **savers.options, "batch_size": batch, "loss_chunk": chunk,
                                                   "gradient_accumulation_steps": sequences // batch,
                                                   "eval_batch_size": eval_batch})
                        yield config
                        memory = self.costs.cost(config)
                        least = min(memory.mapped(((policy, layers),)) for policy in range(len(POLICIES)))
                        larger_may_fit |= least <= self.limit
                        if least > memory.floor:
                            break  # training needs more than evaluation: a smaller evaluation batch saves nothing
                if not larger_may_fit:
                    break

    def modes(self, savers: SaverSet) -> list[dict[str, Any]]:
        """Settings of compile and cuda_graphs: as given, compiled where that works, and without CUDA graphs where they
        would be used."""
        given, found = self.config, list[dict[str, Any]]()
        for compiled in [given.compile] if given.compile or not self.platform.compiles else [False, True]:
            mode: dict[str, Any] = {"compile": compiled, "cuda_graphs": given.cuda_graphs}
            found.append(mode)
            if replace(given, **{**mode, **savers.options}).uses_cuda_graphs:
                found.append({**mode, "cuda_graphs": False})
        return found

    def batches(self, savers: SaverSet) -> list[int]:
        """Micro-batches that divide the sequences of a step: the given one, and others in growing steps."""
        given = self.config.batch_size
        sequences = given * self.config.gradient_accumulation_steps
        most = min(self.target.most_batch or sequences, MOST_TOKENS // self.config.block_size)
        if savers.options.get("step_in_backward", self.config.step_in_backward):  # it excludes accumulation
            return [sequences] if sequences <= max(most, given) else []
        found = list[int]()
        for size in divisors(sequences // self.config.ranks):
            if size <= most and size != given and (not found or size >= LARGER * found[-1]):
                found.append(size)
        return sorted([*found, given])

    def chunks(self, batch: int) -> list[int]:
        """Values of `loss_chunk`; 0 is the engine's own choice."""
        tokens = batch * self.config.block_size
        usual = loss_chunk_tokens(tokens, self.config.vocab_size)
        sizes = {size for size in CHUNKS if size < tokens and tokens <= MOST_CHUNKS * size and size != usual}
        given = self.config.loss_chunk
        return sorted({0, *sizes, *({given} if given < tokens else ())}, key=lambda size: size or usual)

    def eval_batches(self, batch: int) -> list[int]:
        """Values of `eval_batch_size`: as given, as many windows as keep the GPU busy, and one; the largest first."""
        given = self.config.eval_batch
        busy = max(EVAL_TOKENS // self.config.eval_block, 1)
        sizes = {given, *(size for size in (busy, 1) if size < given)}
        return [0 if size == batch and not self.config.eval_batch_size else size
                for size in sorted(sizes, reverse=True)]

    # ---- 2. bound: memory and time by closed forms

    def with_mixes(self, config: RunConfig, savers: SaverSet) -> Iterator[Candidate]:
        """The config with the recompute policies of the given run; with one policy for all layers, for each policy; and
        with two policies, as many layers as may fit at the faster one. Layers that save less come first: their
        temporaries then meet fewer saved tensors."""
        settings, layers = self.settings(config, savers), config.n_layer
        alike: list[RecomputeMix] = [((policy, layers),) for policy in range(len(POLICIES))]
        mapped = [settings.memory.mapped(mix) for mix in alike]
        mixes = [*alike, *([self.mix] if self.mix not in alike else [])]
        for more, less in combinations(range(len(POLICIES)), 2):
            if mapped[less] <= self.usual_limit < mapped[more]:
                along: list[RecomputeMix] = [((less, few), (more, layers - few)) for few in range(1, layers)]
                first = bisect_left(along, True, key=lambda mix: settings.memory.mapped(mix) <= self.usual_limit)
                mixes += along[first:first + 1]
        yield from (self.with_mix(settings, mix) for mix in mixes)

    def settings(self, config: RunConfig, savers: SaverSet) -> Candidate:
        """A candidate without a mix."""
        compared = ("batch_size", "eval_batch", "loss_chunk", "cuda_graphs", "compile", *savers.options)
        changed = sum(getattr(config, name) != getattr(self.config, name) for name in compared)
        time = step_cost(config, self.ranked_on, self.platform, likely_efficiency(self.ranked_on))
        return Candidate(config, savers, changed, self.costs.cost(config), time)

    def with_mix(self, candidate: Candidate, mix: RecomputeMix) -> Candidate:
        """A candidate with another mix, and its bytes and seconds."""
        config, time = candidate.config, candidate.time
        in_layers = sum(layers * time.layers[policy] for policy, layers in mix)
        seconds = time.seconds(config.micro_batches, in_layers) / self.scale + communication(config, self.ranked_on)
        is_known = self.measured and config.ranks == 1  # speeds were measured on one GPU
        speed = self.measured.get(speed_key(config, policies_of(mix))) if is_known else None
        return candidate._replace(
            mix=mix, other_mix=mix != self.mix, mapped=candidate.memory.mapped(mix),
            seconds=config.tokens_per_step / speed if speed else seconds, measured=speed is not None)

    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(bytes, tokens per second): the fastest candidate within each amount of memory; more memory only where it is
        faster."""
        found = list[Candidate]()
        for one in sorted(self.candidates, key=lambda one: (one.mapped, one.seconds)):
            if not found or (1 + TIE) * one.seconds < found[-1].seconds:
                found.append(one)
        return tuple((with_usual_loss(one.mapped, self.platform.expandable), self.config.tokens_per_step / one.seconds)
                     for one in found)

    # ---- 3. sort

    def expected_to_fit(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that fit by closed forms, with the usual fragmentation: the fastest first."""
        return sorted((one for one in candidates if one.mapped <= self.usual_limit),
                      key=lambda one: (one.seconds, one.changes, one.mapped))

    def gains(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a candidate is faster than another by more than the estimate's error."""
        error = MEASURED_ERROR if candidate.measured and other.measured else self.error
        return candidate.seconds * (1 + error) < other.seconds

    # ---- 4. replay the best few

    def that_fit(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """The first of each kind, if it fits: with as few layers recomputed as fit."""
        return (one for one in map(self._refined, different(candidates)) if one is not None)

    def first_that_fits(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """As it is. None if none of the first few fits."""
        return next((one for one in islice(candidates, TRIED) if one.memory.may_fit(one.mix, self.limit)
                     and self.fits(self.config_of(one))), None)

    def leanest(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The one that fits and needs least memory."""
        return self.first_that_fits(smallest(candidates))

    def fastest(self, by_speed: Sequence[Candidate]) -> Candidate | None:
        """The fastest that fits; of those as fast, the one with fewest changes, then least memory."""
        first = next(self.that_fit(by_speed), None)
        return first and (self.first_that_fits(simplest(
            one for one in by_speed if one.seconds <= (1 + TIE) * first.seconds)) or first)

    def fits(self, config: RunConfig) -> bool:
        """Whether the config fits, by a replay."""
        if config not in self._fits:
            run = resolve_run(config, self.platform)
            self._fits[config] = self.has_ram(run) and fits(run, self.platform, self.limit)
        return self._fits[config]

    def has_ram(self, config: RunConfig) -> bool:
        """Whether there is enough CPU RAM for what is offloaded."""
        return self.target.host_bytes is None or host_bytes(config) <= self.target.host_bytes

    def needs(self, config: RunConfig) -> int:
        if config not in self._needs:
            self._needs[config] = replay_run(resolve_run(config, self.platform), self.platform).needs
        return self._needs[config]

    def _refined(self, candidate: Candidate) -> Candidate | None:
        """First more layers recompute until it fits, then fewer while one layer less fits."""
        while not self.fits(config := self.config_of(candidate)):
            most = candidate.mapped - (self.needs(config) - self.limit)
            less = next((mix for mix in lower_all(candidate.mix) if candidate.memory.mapped(mix) <= most), None)
            if less is None:
                return None
            candidate = self.with_mix(candidate, less)
        while True:
            higher = [self.with_mix(candidate, mix) for mix in one_layer_up(candidate.mix)
                      if candidate.memory.may_fit(mix, self.limit)]
            fitting = (one for one in sorted(higher, key=lambda one: one.seconds) if self.fits(self.config_of(one)))
            if (faster := next(fitting, None)) is None:
                return candidate
            candidate = faster

    # ---- 5. choose

    def choose(self) -> Candidate | None:
        """The settings to choose; None if nothing fits.

        The given run stays if it fits and nothing gains more than the estimate's error; what gains should then need
        little memory. If it does not fit, the fastest is chosen. Each further permission (CPU RAM, lossy savers, other
        rules) must gain more than the error over the choice without it. So more permission never makes the answer
        slower, and memory is spent only on a gain that the estimate can tell.
        """
        chosen = given = self.unchanged()
        for permission in PERMISSIONS:
            groups: dict[tuple[str, ...], list[Candidate]] = {}  # by lossy savers: each has a winner of its own, so
            for one in self.candidates:                          # that the choice is no slower with more of them
                if one.savers.permission == permission:
                    groups.setdefault(one.savers.names, []).append(one)
            winners = [winner for group in groups.values()
                       if (winner := self._winner(group, chosen, lean=given is not None)) is not None]
            chosen = min(winners, key=lambda one: one.seconds, default=chosen)
        return chosen

    def _winner(self, group: list[Candidate], chosen: Candidate | None, *, lean: bool) -> Candidate | None:
        """The best of a group that gains over the choice so far. `lean`: of those over which the fastest does not gain,
        the one that needs least memory; else the fastest. CUDA graphs stay where they can: a few MiB of their pool are
        no reason to launch kernels one by one, whose time the estimate does not count."""
        better = [one for one in self.expected_to_fit(group) if chosen is None or self.gains(one, chosen)]
        if lean and chosen is not None:
            alike = [one for one in better if not self.gains(better[0], one)]
            with_graphs = [one for one in alike if one.config.cuda_graphs == chosen.config.cuda_graphs]
            return self.leanest(with_graphs or alike)
        winner = self.fastest(better)
        if winner is None and chosen is None:  # with less fragmentation than usual the smallest may fit
            least = self.leanest(group)
            winner = self.fastest([least]) if least else None
        return winner if winner and (chosen is None or self.gains(winner, chosen)) else None

    def unchanged(self) -> Candidate | None:
        """The given run, if it fits."""
        if not self.fits(self.given):
            return None
        return self.with_mix(self.settings(self.config, SaverSet("free", (), {})), self.mix)

    def runners_up(self, chosen: Candidate) -> list[Candidate]:
        """The fastest others that fit."""
        unwanted = self.config_of(chosen), self.given
        others = (one for one in self.that_fit(self.expected_to_fit(self.candidates))
                  if self.config_of(one) not in unwanted)
        return list(islice(others, RUNNERS_UP))

    def step_up(self, chosen: Candidate) -> Candidate | None:
        """The next step up from the chosen settings: of those with most of the gain that is possible, the one with
        least permission, then least memory; None if nothing is faster. CUDA graphs stay: without them no run is faster.
        """
        faster = [one for one in self.expected_to_fit(self.candidates) if (1 + TIE) * one.seconds < chosen.seconds
                  and one.config.cuda_graphs == chosen.config.cuda_graphs]
        least = faster[0].seconds if faster else 0.0
        enough = max((1 + TIE) * least, least + (1 - MOST_OF_A_GAIN) * (chosen.seconds - least))
        return self.first_that_fits(sorted(
            (one for one in faster if one.seconds <= enough),
            key=lambda one: (PERMISSIONS.index(one.savers.permission), one.mapped, one.changes)))

    # ---- the smallest

    def small(self) -> list[Candidate]:
        """Candidates with the smallest micro-batch."""
        return [one for savers in self.saver_sets for config in self.configs(savers, self.batches(savers)[:1])
                for one in self.with_mixes(config, savers)]

    def may_fit(self) -> bool:
        """Whether one of the smallest candidates fits, by replays."""
        return self.leanest(self.small()) is not None

    def least(self) -> tuple[RunConfig, str]:
        """The config that needs least, and the permission it takes. The smallest by closed forms are replayed, until
        the next cannot need less."""
        first, *others = islice(smallest(self.small()), TRIED)
        best, least = first, self.needs(self.config_of(first))
        for one in others:
            if one.mapped - PAGE >= least:
                break
            if (needs := self.needs(self.config_of(one))) < least:
                best, least = one, needs
        return self.config_of(best), best.savers.permission

    # ---- configs

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
        if candidate.other_mix:
            options |= {"saved_activations": describe_mix(candidate.mix), "grad_checkpoint": False}
        return replace(given, **options)

    def scored(self, config: RunConfig, permission: str) -> ScoredConfig:
        run, needs, budget = resolve_run(config, self.platform), self.needs(config), self.target.budget
        lowest = lowest_error("fitgpt", assumptions(run, self.platform, "fitgpt"))
        return ScoredConfig(config, flags(self.given, config), permission, needs, budget.reserve_limit - needs,
                            estimate(config, self.target.card, self.platform),
                            tuple(tight_reasons(needs, budget, lowest)))

    def estimated_needs(self, config: RunConfig) -> int:
        """By closed forms, with the usual fragmentation."""
        run = resolve_run(config, self.platform)
        return with_usual_loss(self.costs.cost(run).mapped(mix_of(run.policies)), self.platform.expandable)

    def is_maximal(self, config: RunConfig) -> bool:
        """Whether some layers recompute, and the run would not fit if any single one of them kept more."""
        run = resolve_run(config, self.platform)
        memory, higher = self.costs.cost(run), one_layer_up(mix_of(run.policies))
        may_fit = [mix for mix in higher if memory.may_fit(mix, self.limit)]
        return bool(higher) and not any(
            self.fits(replace(config, saved_activations=describe_mix(mix), grad_checkpoint=False)) for mix in may_fit)


def simplest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those with fewest changes first, of these the ones that need least memory."""
    return sorted(candidates, key=lambda one: (one.changes, one.mapped))


def smallest(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """The smallest of each kind, the smallest first."""
    by_memory = sorted(candidates, key=lambda one: (one.mapped, one.changes))
    return different(by_memory, "cuda_graphs", "eval_batch_size")


def different(candidates: Iterable[Candidate], *options: str) -> Iterator[Candidate]:
    """The first of each kind: of those that differ in savers, micro-batch, compilation, or in these options."""
    seen = set()
    for candidate in candidates:
        savers = tuple(candidate.savers.options.items())
        kind = (savers, *(getattr(candidate.config, option) for option in ("batch_size", "compile", *options)))
        if kind not in seen:
            seen.add(kind)
            yield candidate


def divisors(number: int) -> list[int]:
    """12 → 1, 2, 3, 4, 6, 12."""
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def similar_gpu(platform: Platform) -> GpuModel:
    """A GPU whose figures are known: the nearest in compute capability, then in multiprocessors."""
    known = [card for card in gpus.load() if card.capability and has_figures(card)]

    def distance(card: GpuModel) -> tuple[float, int]:
        (major, minor), (other_major, other_minor) = platform.capability, card.capability or (0, 0)
        return abs(10 * (major - other_major) + minor - other_minor), abs((card.sms or 0) - platform.sms)

    return min(known, key=distance)


FLAGS_FIRST = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps",
               "saved_activations")


def flags(given: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """What to add to a command, what matters most first."""
    changed = {key: now for key, _, now in diff(given, config)}
    order = [*(key for key in FLAGS_FIRST if key in changed), *(key for key in changed if key not in FLAGS_FIRST)]
    return tuple(f"--{key}={changed[key] if '*' in str(changed[key]) else shown(changed[key])}" for key in order)
