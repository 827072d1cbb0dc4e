"""What `fit` may change: the sets of memory savers that are permitted, and every candidate with its memory and speed.

Candidates differ in savers, compilation, CUDA graphs, micro-batch, chunk of the loss, evaluation batch, and what each
layer recomputes. They all train on the same tokens per step, in the same order. Memory and speed come from closed forms
(layer costs, roofline), so that thousands can be ranked; search.py replays the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

from ..config.fields import nearest, option_specs
from ..config.memory_savers import LEVELS, LOSSY_SAVERS, OTHER_RULES, SAVERS, loss_chunk_tokens
from ..config.run_config import RunConfig, gpt2_shapes
from ..core.errors import UsageError
from ..core.units import MiB
from ..hardware import gpus
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from ..tapes import engine as engine_tape
from ..tapes.engine import draft
from .layer_costs import CostCache, RecomputeMix, RunCost
from .speed import StepCost, has_figures, likely_efficiency, step_cost

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
    names = allow
    if "lossy" in allow or allow >= set(LOSSY_SAVERS):
        names = allow - set(LOSSY_SAVERS) | {"lossy"}
    return ",".join(word for word in ALLOWABLE if word in names)


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


# ---- sets of savers


class SaverSet(NamedTuple):
    """Memory savers to use together, and the permission they take."""

    permission: str
    options: dict[str, Any]
    more_offload: bool  # whether more lives in CPU RAM than in the given run


def saver_sets(config: RunConfig, platform: Platform, allow: frozenset[str]) -> list[SaverSet]:
    """Every permitted set of savers that work together, the least permission first."""
    found = []
    free = {option: value for option, value in FREE_SETTINGS.items() if getattr(config, option) != value}
    for names in _combinations(config, platform, allow):
        savers = {option: value for name in names for option, value in NAMED_SAVERS[name].items()}
        for place in OFFLOAD:
            options = {**savers, **free, "offload": place}
            if options.get("gradient_accumulation_steps") == 1:  # then one micro-batch has all sequences of a step
                options["batch_size"] = config.batch_size * config.gradient_accumulation_steps
            if _is_valid(config, options):
                more_offload = OFFLOAD.index(place) > OFFLOAD.index(config.offload)
                permission = ("rules" if set(names) & set(OTHER_RULES) else "lossy" if names else
                              "places" if more_offload else "free")
                found.append(SaverSet(permission, options, more_offload))
    return sorted(found, key=lambda savers: PERMISSIONS.index(savers.permission))


def _combinations(config: RunConfig, platform: Platform, allow: frozenset[str]) -> Iterator[tuple[str, ...]]:
    """Names of savers, in every combination in which no two set one option to different values."""
    may = permitted(config, allow)
    names = [name for name, options in NAMED_SAVERS.items() if name in may
             and any(getattr(config, option) != value for option, value in options.items())
             and (platform.has_bf16 or "bfloat16" not in options.values())]
    for count in range(len(names) + 1):
        for each in combinations(names, count):
            settings = {item for name in each for item in NAMED_SAVERS[name].items()}
            if len(settings) == len({option for option, _ in settings}):
                yield each


def _is_valid(config: RunConfig, options: dict[str, Any]) -> bool:
    try:
        replace(config, **options)
    except UsageError:
        return False
    return True


# ---- candidates

CHUNKS = (256, 512, 1024, 2048, 4096, 8192)  # tokens per chunk of the loss …
MOST_CHUNKS = 64                             # … and chunks per micro-batch
EVAL_TOKENS = 4096                           # tokens that keep a GPU busy in an evaluation
MOST_MIXES = 24                              # mixes of two recompute levels that are tried
MOST_SEQUENCES = 4096                        # of a micro-batch: larger ones are no faster
BIN = 32 * MiB                               # of the frontier
PAIRS = tuple((few, many) for few in range(len(LEVELS)) for many in range(few))
STAND_IN = "RTX 4070"                        # ranks candidates for a GPU whose figures are not known
# Whether to skip candidates: given the savers, the number of changes, and the seconds per step without recomputing.
Prune = Callable[[SaverSet, int, float], bool]


class Candidate(NamedTuple):
    """Settings that may be chosen. `mix` says what each layer recomputes, whatever `config.recompute` says."""

    config: RunConfig   # not checked
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
    def mapped(self) -> int:
        """Bytes that the allocator must reserve if nothing is lost to fragmentation."""
        return self.memory.mapped(self.mix)


@dataclass
class CandidateScan:
    """The fastest mix of each candidate within the limit, and the fastest candidate in each bin of memory."""

    limit: int
    considered: int = 0
    fastest: list[Candidate] = field(default_factory=list)
    bins: dict[int, float] = field(default_factory=dict)

    def scan(self, candidate: Candidate) -> None:
        """Tries all mixes of at most two levels. Layers that keep less come first: their temporaries then meet fewer
        saved tensors."""
        layers, memory, cost = candidate.config.n_layer, candidate.memory, candidate.cost
        micro_steps, bins, limit = candidate.config.gradient_accumulation_steps, self.bins, self.limit
        best: tuple[float, RecomputeMix] | None = None
        for level in range(len(LEVELS)):
            uniform = candidate._replace(mix=((level, layers),))
            held, seconds = uniform.mapped, uniform.seconds
            if held <= limit and (best is None or seconds < best[0]):
                best = seconds, uniform.mix
            if seconds < bins.get(held // BIN, 1e30):
                bins[held // BIN] = seconds
        counts = _layer_counts(layers)
        for few, many in PAIRS:
            first, more = cost.fixed + layers * cost.layers[many], cost.layers[few] - cost.layers[many]
            row = memory.mapped_along(few, many, layers, counts.step)
            times = [micro_steps * max(first + k * more, cost.host) + cost.step for k in counts]
            if best is None or min(times, default=best[0]) < best[0]:
                for k, held, seconds in zip(counts, row, times, strict=True):
                    if held <= limit and (best is None or seconds < best[0]):
                        best = seconds, ((few, k), (many, layers - k))
            for held, seconds in zip(row, times, strict=True):
                if seconds < bins.get(held // BIN, 1e30):
                    bins[held // BIN] = seconds
        self.considered += len(LEVELS) + len(PAIRS) * len(counts)
        if best is not None:
            self.fastest.append(candidate._replace(mix=best[1]))

    def frontier(self) -> list[tuple[int, float]]:
        """(bytes, seconds): more memory only where it is faster."""
        found: list[tuple[int, float]] = []
        for place, seconds in sorted(self.bins.items()):
            if not found or seconds < found[-1][1] * 0.999:
                found.append(((place + 1) * BIN, seconds))
        return found


def _layer_counts(layers: int) -> range:
    """Numbers of layers to try at one of two levels. Not every number of a deep model: the search refines the chosen
    mix layer by layer."""
    return range(1, layers, -(-layers // MOST_MIXES))


class SearchSpace:
    """All candidates for one config on one platform."""

    def __init__(self, config: RunConfig, platform: Platform, card: GpuModel | None,
                 most_batch: int | None = None) -> None:
        self.config, self.platform = config, platform
        self.card = card if card is not None and has_figures(card) else gpus.find(STAND_IN)
        self.costs = CostCache(platform)
        self.most_batch = most_batch or config.batch_size * config.gradient_accumulation_steps
        self.too_large = 0  # mixes of candidates that cannot fit with any mix

    def scan(self, savers: SaverSet, scan: CandidateScan, prune: Prune | None = None) -> None:
        """Adds all candidates with these savers to the scan."""
        before = self.too_large
        for candidate in self.candidates(savers, scan.limit, prune=prune):
            scan.scan(candidate)
        scan.considered += self.too_large - before

    def candidates(self, savers: SaverSet, limit: int | None = None, *, batches: Sequence[int] | None = None,
                   prune: Prune | None = None) -> Iterator[Candidate]:
        """Those that may fit `limit`, with every layer keeping all. Smaller micro-batches come first in each mode."""
        for mode in self.modes(savers):
            for batch in batches or self.batches(savers):
                fits = False
                for config, cost in self._with_batch(savers, mode, batch):
                    changes = self.changes(config, savers)
                    fastest = cost.seconds(config.gradient_accumulation_steps, config.n_layer * min(cost.layers))
                    if prune is not None and prune(savers, changes, fastest):
                        fits = True  # not known, so larger batches are tried
                        continue
                    memory = self.costs.cost(config)
                    levels = reversed(range(len(LEVELS)))  # what keeps least usually needs least
                    if limit is None or any(memory.mapped(((level, config.n_layer),)) <= limit for level in levels):
                        fits = True
                        yield Candidate(config, savers, changes, memory, cost, ((0, config.n_layer),))
                    else:
                        self.too_large += len(LEVELS)
                if not fits:
                    break  # larger micro-batches need more

    def cost(self, config: RunConfig) -> StepCost:
        return step_cost(config, self.card, self.platform, likely_efficiency(self.card))

    def _with_batch(self, savers: SaverSet, mode: dict[str, Any], batch: int) -> Iterator[tuple[RunConfig, StepCost]]:
        """Configs with every chunk of the loss and every evaluation batch; the latter does not affect the speed."""
        sequences = self.config.batch_size * self.config.gradient_accumulation_steps
        for chunk in self.chunks(batch):
            configs = [draft(self.config, **{
                **savers.options, **mode, "batch_size": batch, "gradient_accumulation_steps": sequences // batch,
                "loss_chunk": chunk, "eval_batch_size": windows}) for windows in self.eval_batches(batch)]
            cost = self.cost(configs[0])
            yield from ((config, cost) for config in configs)

    def modes(self, savers: SaverSet) -> list[dict[str, Any]]:
        """Settings of compile and cuda_graphs: as given, compiled where that works, and without CUDA graphs where they
        would be used."""
        given = self.config
        found: list[dict[str, Any]] = []
        for compiled in [given.compile] if given.compile or not self.platform.compiles else [False, True]:
            mode = {"compile": compiled, "cuda_graphs": given.cuda_graphs}
            found.append(mode)
            if engine_tape.uses_cuda_graphs(draft(given, **savers.options, **mode)):
                found.append({**mode, "cuda_graphs": False})
        return found

    def batches(self, savers: SaverSet) -> list[int]:
        """The micro-batches that divide the sequences of a step."""
        given = self.config.batch_size
        sequences = given * self.config.gradient_accumulation_steps
        if savers.options.get("step_in_backward", self.config.step_in_backward):  # it excludes accumulation
            return [sequences] if sequences <= max(self.most_batch, given) else []
        sizes = range(1, min(self.most_batch, MOST_SEQUENCES) + 1)
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

    def changes(self, config: RunConfig, savers: SaverSet) -> int:
        """How many options differ from the given run."""
        options = ("batch_size", "eval_batch", "loss_chunk", "cuda_graphs", "compile", *savers.options)
        return sum(getattr(config, name) != getattr(self.config, name) for name in options)
