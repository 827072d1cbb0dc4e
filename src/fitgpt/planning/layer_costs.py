"""Per-layer memory cost: what would a run need with other recompute policies? Closed forms, read off tapes.

A micro-step goes up the layers and down again, and layers of one recompute policy are alike: each leaves some bytes
behind and reaches some bytes above its start. Both are read off an ordinary tape of one layer per policy, span by span.
So the peak of any number of layers at any mix of policies is the highest of a few sums, equal to what the tape says.
Fragmentation is not known: a run that is to be chosen is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from ..config.memory_savers import POLICIES
from ..config.run_config import RunConfig
from ..core.units import MiB
from ..memory.allocator import LARGE_BUFFER
from ..memory.platform import Platform
from ..memory.tape import EMPTY_CACHE, GRAPH_POOL, Event, round_size
from ..tapes import engine as engine_tape

RecomputeMix = tuple[tuple[int, int], ...]  # (index of a policy in POLICIES, layers), from the first layer to the last

# Memory limits are multiples of 2 MiB; whole pages of that size are mapped into an expandable segment.
PAGE = LARGE_BUFFER


# Fragmentation of most runs, with and without expandable segments: bytes, and a share of what is held. Half of 7,300
# random runs lost less, half more. So a run that is to be chosen is replayed.
USUALLY_LOST = {True: (20 * MiB, 0.01), False: (20 * MiB, 0.05)}


def mix_of(policies: tuple[str, ...]) -> RecomputeMix:
    return tuple((POLICIES.index(policy), len(list(run))) for policy, run in groupby(policies))


def policies_of(mix: RecomputeMix) -> tuple[str, ...]:
    return tuple(POLICIES[policy] for policy, layers in mix for _ in range(layers))


def describe_mix(mix: RecomputeMix) -> str:
    """As `saved_activations` takes it."""
    return POLICIES[mix[0][0]] if len(mix) == 1 else ",".join(f"{layers}*{POLICIES[policy]}" for policy, layers in mix)


def one_layer_up(mix: RecomputeMix) -> list[RecomputeMix]:
    """The mixes in which one layer keeps more."""
    counts = dict(mix)
    return [_ordered({**counts, policy: counts[policy] - 1, more: counts.get(more, 0) + 1})
            for policy in counts for more in range(policy)]


def one_layer_down(mix: RecomputeMix) -> RecomputeMix | None:
    """One layer of those that keep most goes to the policy of those that keep least, or to the next."""
    counts = dict(mix)
    most, least = min(counts), max(counts)
    less = least if least > most else least + 1
    if less == len(POLICIES):
        return None
    return _ordered({**counts, most: counts[most] - 1, less: counts.get(less, 0) + 1})


def lower_all(mix: RecomputeMix) -> list[RecomputeMix]:
    """From a mix, layer by layer, to the one that keeps nothing but inputs."""
    found = [mix]
    while (lower := one_layer_down(found[-1])) is not None:
        found.append(lower)
    return found


def _ordered(counts: dict[int, int]) -> RecomputeMix:
    """The layers that keep least come first."""
    return tuple((policy, layers) for policy, layers in sorted(counts.items(), reverse=True) if layers)


def with_usual_loss(mapped: int, expandable: bool) -> int:
    nbytes, share = USUALLY_LOST[expandable]
    return mapped + nbytes + int(share * mapped)


def within_usual_loss(limit: int, expandable: bool) -> int:
    """What may be mapped, if the rest of a limit is for the usual fragmentation."""
    nbytes, share = USUALLY_LOST[expandable]
    return int((limit - nbytes) / (1 + share))


class NetAndPeak(NamedTuple):
    """A stretch of a tape: the bytes that it leaves behind, and the most it holds above its start."""

    net: int
    peak: int


class MicroStepCost(NamedTuple):
    """One micro-step, in parts; those of a layer in the order of POLICIES."""

    captured: bool                 # whether it lies in the private pool of CUDA graphs
    beside: int                    # bytes elsewhere when it begins, beyond what evaluation leaves, without gradients
    has_gradients: bool            # whether all gradients are allocated before it
    embedding: NetAndPeak            # with cuBLAS's workspaces, if this micro-step allocates them
    forward: tuple[NetAndPeak, ...]  # one layer
    head: NetAndPeak                 # with the loss
    backward: tuple[NetAndPeak, ...] # one layer
    embedding_backward: NetAndPeak

    @property
    def leaves(self) -> int:
        """What stays, where gradients were there before: workspaces and the loss."""
        return self.embedding.net + self.head.net + self.embedding_backward.net

    def peak(self, mix: RecomputeMix) -> int:
        """The most it holds above its start. Along layers of one policy all is linear: its ends decide."""
        at, most = self.embedding
        for policy, layers in mix:
            net, peak = self.forward[policy]
            at += layers * net
            if at - net + peak > most:
                most = at - net + peak
        net, peak = self.head
        if at + peak > most:
            most = at + peak
        at += net
        for policy, layers in reversed(mix):
            net, peak = self.backward[policy]
            if at + peak > most:
                most = at + peak
            at += layers * net
            if at - net + peak > most:
                most = at - net + peak
        return max(most, at + self.embedding_backward.peak)


class MicroSteps(NamedTuple):
    """The first micro-step, and the next if it is captured or finds gradients."""

    steps: tuple[MicroStepCost, ...]
    loss_chunk: int        # the option with which they were read
    layer_gradients: int   # bytes of gradients that come and go: of one layer …
    other_gradients: int   # … and of all other parameters


class Resident(NamedTuple):
    """What is there before the first batch."""

    loaded: int
    loading: int       # the most while it is loaded
    step: int          # what the optimizer's step adds


class EvalCost(NamedTuple):
    """Evaluation: its peaks in the default pool and in that of CUDA graphs, and what it leaves to training. When a
    later one is captured, the workspaces of matmuls are there already."""

    peak: int
    captured_peak: int
    beside: int        # bytes in the default pool while it is captured
    leaves: int
    captured_again: int
    places: int        # bytes of the default pool that its CUDA graph reads


@dataclass(frozen=True)
class RunCost:
    """A run's cost for any mix of recompute policies."""

    resident: Resident
    evaluation: EvalCost
    steps: tuple[MicroStepCost, ...]
    gradients: int     # of all parameters, where they are freed after each step
    places: int        # bytes of the default pool that a captured micro-step reads
    expandable: bool   # the allocator's segments

    def may_fit(self, mix: RecomputeMix, limit: int) -> bool:
        """False only where a replay under that cap fails for certain."""
        return self.mapped(mix) - (PAGE if self.expandable else 0) <= limit

    def mapped(self, mix: RecomputeMix) -> int:
        """What must be held from the driver if there is no fragmentation. Without CUDA graphs that is the most that is
        allocated, as the tape says; a graph's pool is held also while nothing is allocated in it."""
        return max(self.floor, *(beside + step.peak(mix) for beside, step in self._beside))

    @cached_property
    def floor(self) -> int:
        """What is held whatever the recompute policies."""
        loaded, look = self.resident.loaded, self.evaluation
        return max(self.resident.loading, loaded + look.peak, loaded + look.beside + look.captured_peak,
                   self._later_evaluation,
                   self._at_step + look.places + (look.captured_again + self._left if look.places else 0))

    @cached_property
    def _beside(self) -> tuple[tuple[int, MicroStepCost], ...]:
        """Each micro-step with what is held besides it. The pool of CUDA graphs stays for good: the optimizer's step
        finds it, after a later evaluation, whose graph reads from tensors of its own."""
        after, look = self.resident.loaded + self.evaluation.leaves, self.evaluation
        return tuple((max(after + step.beside, self._at_step + look.places) if step.captured else
                      after + step.beside + (self.gradients if step.has_gradients else 0), step) for step in self.steps)

    @property
    def _later_evaluation(self) -> int:
        """The evaluation that is captured after the micro-step; the graph of the one before is dropped."""
        look = self.evaluation
        return self.resident.loaded + look.beside + self.places + look.captured_again + self._left if look.places else 0

    @property
    def _left(self) -> int:
        """What a captured micro-step keeps in its pool: workspaces and its loss."""
        return sum(step.leaves for step in self.steps if step.captured)

    @property
    def _at_step(self) -> int:
        there = self.resident.loaded + self.evaluation.leaves + self.steps[-1].beside
        return there + self.gradients + self.resident.step


# ---- read off tapes of a few layers

ONE_OF_EACH = ",".join(f"1*{policy}" for policy in POLICIES)
Found = TypeVar("Found")
_pass_options = attrgetter("block_size", "n_head", "n_embd", "vocab_size", "bias", "dropout", "dtype", "compile",
                           "weights", "residual", "casts", "gradients")


class CostCache:
    """Costs of runs on one platform. A tape that does not depend on what differs between two runs is written once."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._known: dict[tuple[Any, ...], Any] = {}

    def cost(self, config: RunConfig) -> RunCost:
        """Takes a resolved config. Its recompute policies do not matter."""
        optimizer = config.optimizer if config.step_in_backward else None  # else the passes do not depend on it
        key = *_pass_options(config), config.uses_cuda_graphs, config.offload == "gradients", optimizer
        accumulates = config.micro_batches > 1
        resident = self._once(_resident, config, key, config.n_layer, config.optimizer, config.adam8bit, config.offload)
        evaluation = self._once(_evaluation, config, key, config.eval_batch, config.eval_block, config.loss_chunk)
        found = self._once(_micro_steps, config, key, config.batch_size, accumulates)
        steps = found.steps
        if config.loss_chunk != found.loss_chunk:  # only the heads differ
            heads = self._once(_heads, config, key, config.batch_size, accumulates, config.loss_chunk)
            steps = tuple(step._replace(head=head) for step, head in zip(steps, heads, strict=True))
        return RunCost(resident, evaluation, steps, config.n_layer * found.layer_gradients + found.other_gradients,
                       _places(config, config.batch_size * config.block_size), self.platform.expandable)

    def _once(self, read: Callable[[RunConfig, Platform], Found], config: RunConfig, *key: Any) -> Found:
        found: Found | None = self._known.get((read, *key))
        if found is None:
            found = self._known[(read, *key)] = read(config, self.platform)
        return found


def _run_of(config: RunConfig, platform: Platform, **options: Any) -> engine_tape.Run:
    """With its weights and states loaded. States that come late are taken to be there: from the first step on they
    are."""
    run = engine_tape.Run(replace(config, states="early", eval_only=False, grad_checkpoint=False, **options), platform)
    run.load()
    return run


def _span_cost(events: Iterable[Event], captured: bool) -> NetAndPeak:
    """Of the events in the pool of CUDA graphs, or of those elsewhere."""
    net = peak = 0
    for is_alloc, name, _, nbytes, pool in events:
        if name != EMPTY_CACHE and (pool == GRAPH_POOL) == captured:
            net += round_size(nbytes) if is_alloc else -round_size(nbytes)
            peak = max(peak, net)
    return NetAndPeak(net, peak)


def _resident(config: RunConfig, platform: Platform) -> Resident:
    run = _run_of(config, platform)
    loaded = _span_cost(run.w.events_since(0), captured=False)
    if not run.gradients_stay and run.optimizer.sink is None:
        with run.gpu.section():
            run.make_gradients()
    start = run.w.length
    run.apply_gradients()
    step = (event for event in run.w.events_since(start)
            if event.name not in engine_tape.WORKSPACES)  # allocated in the passes before
    return Resident(*loaded, _span_cost(step, captured=False).peak)


def _evaluation(config: RunConfig, platform: Platform) -> EvalCost:
    run = _run_of(config, platform, n_layer=1, saved_activations="input")
    start = run.w.length
    run.evaluate()
    events = run.w.events_since(start)
    ordinary, captured = _span_cost(events, captured=False), _span_cost(events, captured=True)
    first = next((at for at, event in enumerate(events) if event.pool == GRAPH_POOL), 0)
    beside = _span_cost(events[:first], captured=False).net
    workspaces = sum(round_size(event.nbytes) for event in events if event.alloc and event.pool == GRAPH_POOL
                     and event.name in engine_tape.WORKSPACES)
    return EvalCost(ordinary.peak, captured.peak, beside, 0 if run.cuda_graphs else ordinary.net,
                    captured.peak - workspaces, _places(config, config.eval_batch * config.eval_block))


def _places(config: RunConfig, tokens: int) -> int:
    """Bytes of the inputs and targets that a CUDA graph reads."""
    return 2 * round_size(8 * tokens) if config.uses_cuda_graphs else 0


def _heads(config: RunConfig, platform: Platform) -> tuple[NetAndPeak, ...]:
    """The part between the two passes, of each micro-step that differs."""
    return tuple(step.head for step in _micro_steps(config, platform, one_layer=True).steps)


def _micro_steps(config: RunConfig, platform: Platform, one_layer: bool = False) -> MicroSteps:
    """With one layer per recompute policy; or with one layer in all, which is enough for the heads."""
    layers = 1 if one_layer else len(POLICIES)
    run = _run_of(config, platform, n_layer=layers, saved_activations="input" if one_layer else ONE_OF_EACH)
    w = run.w
    if not run.cuda_graphs:  # else graphs are dropped before training begins. One batch leaves behind what all do
        batch = run.fetch(config.eval_batch, config.eval_block)
        run.work("eval", "token losses", run.batch)
        w.free("token losses", batch)
    run.gpu.spans.clear()
    base = _span_cost(w.events_since(0), captured=False).net
    run.micro_steps()
    comes_and_goes = not run.gradients_stay and run.optimizer.sink is None
    of_layer, in_all = (_gradients(w.events_since(0), prefix) if comes_and_goes else 0 for prefix in ("0.", ""))
    if run.cuda_graphs and config.micro_batches == 1:  # the next micro-step is another step's
        run.step()
        run.micro_steps()
    events, spans = w.events_since(0), [span for span in run.gpu.spans if span[0] != "update"]
    size = 2 * layers + 3  # embedding, layers forward, head, layers backward, embedding again
    steps = [_micro_step(events, spans[at:at + size], layers, base, comes_and_goes)
             for at in range(0, len(spans), size)]
    return MicroSteps(tuple(steps), config.loss_chunk, of_layer, in_all - layers * of_layer)


def _micro_step(events: list[Event], spans: list[tuple[str, int, int]], layers: int, base: int,
                comes_and_goes: bool) -> MicroStepCost:
    """The first matmul allocates workspaces: counted as the embedding's, so that the first layer is like the others."""
    start, end = spans[0][1], spans[-1][2]
    captured = any(event.pool == GRAPH_POOL for event in events[start:end])
    workspaces = sum(round_size(event.nbytes) for event in events[start:end] if event.name in engine_tape.WORKSPACES)
    costs = [_span_cost((event for event in events[first:last] if event.name not in engine_tape.WORKSPACES), captured)
             for _, first, last in spans]
    embed, *up = costs[:layers + 1]
    turn, *down = costs[layers + 1:-1]
    gradients = _gradients(events[:start], "") if comes_and_goes else 0
    return MicroStepCost(captured, _span_cost(events[:start], captured=False).net - base - gradients, gradients > 0,
                         NetAndPeak(embed.net + workspaces, embed.peak + workspaces), tuple(up), turn,
                         tuple(reversed(down)), costs[-1])


def _gradients(events: Iterable[Event], prefix: str) -> int:
    """Bytes of the gradients that are alive after these events."""
    return sum(round_size(event.nbytes) if event.alloc else -round_size(event.nbytes) for event in events
               if event.name.endswith(".grad") and event.name.startswith(prefix))
