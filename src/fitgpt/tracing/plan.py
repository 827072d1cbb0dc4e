"""Trace + Target → TracedPlan: whether a traced script fits, its largest tensors, and what changes would save.

The changes are arithmetic on the trace: tensors are resized or left out, and the tape is replayed. Nothing is traced
again for them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ..core.units import MiB, show_bytes
from ..hardware.allocator_env import USE_EXPANDABLE_SEGMENTS
from ..memory.platform import EXPANDABLE, NATIVE, Platform
from ..memory.tape import Span, Tape
from ..memory.timeline import OwnerTimeline, Timeline, chart_points, replay
from ..planning.budget import Target
from ..planning.forecast import (
    Forecast,
    OwnerShare,
    TrackRecord,
    alive_after,
    lowest_error_of,
    record_kind,
    recorded_of,
    replayed,
    tight_on,
    track_record_of,
)
from ..planning.plan import GpuVerdict, PrintedPlan, every_gpu
from ..planning.plan_file import change_document, document
from ..planning.verdict import tight_reasons
from .recorder import LOAD
from .trace_file import EMPTIED, Kind, Trace

SCRIPT = "script"          # Forecast.trainer
PASSES = {"load": "loading", "forward": "the forward pass", "backward": "the backward pass",
          "optimizer": "the optimizer step", "eval": "evaluation"}  # phases of a trace
LARGEST_TENSORS = 10
PER_SEQUENCE = ("activations", "attention", "logits", "data")  # owners whose bytes grow with the batch
LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")  # "model.layers.3.mlp": layer 3
# bitsandbytes keeps states of at least 4096 elements in 8 bits, with a float32 scale per 256.
SMALLEST_8BIT, SCALE = 4096, 1 / 64
# What compiled scripts reserved, as a share of their trace: of one with the compiler's own plan, and of an eager one.
# The ranges of the recorded ones, docs/accuracy.md.
PLANNED, UNPLANNED = (0.95, 1.1), (0.41, 1.04)
PLANNED_NOTE = ("The script calls torch.compile. Inductor, its compiler, planned the memory from shapes. What it "
                "decides by timing kernels on the GPU is not known, hence the range.")
UNPLANNED_NOTE = ("The script calls torch.compile, and the compiler does not run on its shapes alone. Phases, steps, "
                  "owners and tensors are those of an eager trace; the range of the compiled run is estimated from it.")
HALF_BATCH, IN_8_BITS = "half the batch size", "an 8-bit optimizer"


class PeakMemory(NamedTuple):
    allocated_bytes: int
    reserved_bytes: int


class StepMemory(NamedTuple):
    """After an optimizer step: now, and the most so far."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class LargeTensor(NamedTuple):
    """A tensor that is allocated at the peak."""

    nbytes: int
    owner: str
    what: str      # "8 × 1,024 × 50,257 × float32"
    op: str
    module: str
    source: str


class TracedChange(NamedTuple):
    """Something to change in the script, and what it would need then, by arithmetic on the trace."""

    change: str
    what: str
    needs: int
    headroom: int

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def exact(self) -> bool:
        """Whether the same is trained, up to rounding."""
        return self.change not in (HALF_BATCH, IN_8_BITS)


@dataclass(frozen=True, repr=False)
class TracedPlan(PrintedPlan):
    """A traced script, the GPU it is planned for, and its forecast there. `print` it for the table; `to_dict()` has the
    keys of --json."""

    function = "fitgpt.trace"

    trace: Trace
    target: Target
    timeline: Timeline
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> PeakMemory:
        """The upper end of the range without the compiler's own plan, and after empty_cache(): which addresses the
        driver uses again is not known.
        """
        if (self.trace.compiled and not self.trace.planned) or EMPTIED in self.trace.events:
            most = self.forecast.reserved_range[1]
            return PeakMemory(min(self.forecast.allocated, most), most)
        return PeakMemory(self.timeline.peak, self.timeline.reserved)

    @cached_property
    def steps(self) -> tuple[StepMemory, ...]:
        return steps_of(self.trace, self.timeline)

    @cached_property
    def tensors(self) -> tuple[LargeTensor, ...]:
        """The ten largest at the peak."""
        alive = [(change, self.trace.tensors[int(event.name.partition(" ")[0]) - 1])
                 for event, change in alive_after(self.timeline, self._highest)]
        alive.sort(key=lambda each: -each[0])
        return tuple(LargeTensor(nbytes, kind.owner, kind.describe(), kind.op, kind.module, kind.source)
                     for nbytes, kind in alive[:LARGEST_TENSORS])

    def one_step(self) -> OwnerTimeline:
        """Points for a chart of the optimizer step with the highest peak, from the end of the step before."""
        allocated = self.timeline.allocated
        ends = [end for end in self.trace.steps if end <= len(allocated)] or [len(allocated)]
        loaded = next((at for name, at in self.trace.phases if name != LOAD), 0)
        steps = [*zip([loaded, *ends], ends, strict=False)]
        start, end = max(reversed(steps), key=lambda step: max(allocated[step[0]:step[1]], default=0))
        marks = dict[str, int]()
        for name, at in self.trace.phases:
            if start <= at < end:
                marks.setdefault(name, at)
        return chart_points(self.timeline, start, end, [*marks.items()])

    @property
    def _highest(self) -> int:
        allocated = self.timeline.allocated
        return allocated.index(max(allocated))

    @cached_property
    def changes(self) -> tuple[TracedChange, ...]:
        """Those that save memory, the largest saving first."""
        expandable = self.target.platform.uses_expandable_segments(SCRIPT)
        tried = [(change, what, replay(self.trace.resized(size), expandable=expandable))
                 for change, what, size in possible_changes(self.trace)]
        if not expandable:
            tried.append((USE_EXPANDABLE_SEGMENTS, "memory lost to fragmentation; not on Windows",
                          replay(self.trace.tape, expandable=True)))
        found = [(change, what, needed_for(self.trace, timeline)) for change, what, timeline in tried]
        return tuple(sorted((TracedChange(change, what, needed, self.budget.reserve_limit - needed)
                             for change, what, needed in found if needed < self.forecast.needs),
                            key=lambda each: each.needs))

    @cached_property
    def track_record(self) -> TrackRecord:
        return track_record_of(self.forecast, self.budget.card)

    def to_dict(self) -> dict[str, Any]:
        """What --json prints: the keys of `plan --json`, and those of a trace."""
        found = document(self, self.target.platform.torch, self.track_record, None)
        return {**found, "command": list(self.trace.command), "peak": {**found["peak"], **self.peak._asdict()},
                "steps": [step._asdict() for step in self.steps],
                "tensors": [tensor._asdict() for tensor in self.tensors],
                "formulas": {share.owner: share.formula for share in self.forecast.owners_at_peak},
                "changes": [change_document(self, each.needs, flags={}, what=each.change, costs="",
                                            same_training=each.exact) for each in self.changes],
                "compiled": self.trace.compiled, "notes": [*self.trace.notes, *self.notes],
                "sources": list(self.budget.sources)}

    def text(self, width: int) -> str:
        from ..show.plan_text import traced_text

        return traced_text(self, width)


def steps_of(trace: Trace, timeline: Timeline) -> tuple[StepMemory, ...]:
    """After each optimizer step, as the four functions of torch.cuda report it."""
    allocated, found = timeline.allocated, list[StepMemory]()
    for after in trace.steps:
        if after > len(allocated):
            break
        reserved = [0, *(nbytes for event, nbytes in timeline.segments if event < after)]
        found.append(StepMemory(allocated[after - 1] if after else 0, reserved[-1],
                                max(allocated[:after], default=0), max(reserved)))
    return tuple(found)


def plan_trace(trace: Trace, target: Target, allocator: str = "") -> TracedPlan:
    """`allocator`: native or expandable; "": as the script would have it."""
    expandable = trace.expandable if not allocator else allocator == "expandable"
    platform = replace(target.platform, torch=trace.platform.torch, expandable=expandable,
                       expandable_requested=expandable)
    target, traced = target._replace(platform=platform), trace.on(platform)
    limit = target.budget.reserve_limit
    timeline, needed, reserved_range, phases, highest, bounded = replayed(
        with_phases(traced.tape, traced.phases, traced.steps), limit, expandable=expandable)
    if trace.compiled:
        needed = needed_for(trace, timeline)
        reserved_range = int(range_of(trace)[0] * timeline.reserved), needed
    forecast = Forecast(
        trainer=SCRIPT, params=trace.params, phases=phases, peak_phase=highest.phase,
        owners_at_peak=owners_of(traced, timeline, highest.event), needs=needed, reserved_range=reserved_range,
        assumes={"torch": platform.describe_torch(), "attention": "traced",
                 "compile": "eager" if not trace.compiled else "a range around the compiler's plan" if trace.planned
                 else "a range from the eager trace",
                 "allocator": EXPANDABLE if expandable else NATIVE,
                 **({"convolutions": "workspaces by rule"} if trace.convolutions else {})},
        host_bytes=0, largest=largest_of(traced), not_seen=trace.not_seen, bounded=(*trace.bounded, *bounded))
    of_compiler = [PLANNED_NOTE if trace.planned else UNPLANNED_NOTE] if trace.compiled else []
    notes = (*target.notes, *of_compiler, *notes_on(trace, platform), *notes_on_batches(trace))
    return TracedPlan(forecast, target.budget, traced, target, timeline, notes)


def largest_of(trace: Trace) -> tuple[str, int]:
    """The largest tensor: what it is and where it is made, and its bytes."""
    kind = max(trace.tensors, key=lambda each: each.nbytes, default=None)
    return (f"{kind.describe()} at {kind.source}", kind.nbytes) if kind else ("", 0)


def range_of(trace: Trace) -> tuple[float, float]:
    """What a compiled script may reserve, as a share of its trace."""
    return PLANNED if trace.planned else UNPLANNED


def needed_for(trace: Trace, timeline: Timeline) -> int:
    """What a trace needs that was replayed without a limit: of a compiled script the upper end of its range."""
    return int(range_of(trace)[1] * timeline.reserved) if trace.compiled else timeline.needs


def notes_on(trace: Trace, platform: Platform) -> list[str]:
    """How the GPU differs from the one it was traced for."""
    there = trace.platform
    if trace.capability == platform.capability:
        return []
    major, minor = trace.capability
    differ = [dtype for dtype in ("float32", "bfloat16", "float16")
              if there.attention(64, dtype) != platform.attention(64, dtype)]
    if not differ:
        return [f"Traced for compute capability {major}.{minor}; workspaces of cuBLAS are those of this GPU."]
    return [f"Traced for compute capability {major}.{minor}, whose attention kernel for {' and '.join(differ)} is "
            "another than this GPU's. Trace again with this --gpu for its own."]


def notes_on_batches(trace: Trace) -> list[str]:
    """Whether batches of different steps differ in size. Steps that read other numbers of tensors are not compared."""
    found: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
    allocated, start = 0, 0
    for end in trace.steps:
        count = trace.events[start:end].count(0)
        shapes = tuple(sorted(kind.shape for kind in trace.tensors[allocated:allocated + count]
                              if kind.owner == "data" and kind.shape))
        found.setdefault(len(shapes), set()).add(shapes)
        allocated, start = allocated + count, end
    differ = [each for group in found.values() if len(group) > 1 for each in zip(*group, strict=True)
              if len(set(each)) > 1]
    if not differ:
        return []
    least, *_, most = sorted(max(differ, key=lambda shapes: max(map(prod, shapes))), key=prod)
    text = " to ".join(" × ".join(f"{side:,}" for side in shape) for shape in (least, most))
    return [f"Batches differ in size: {text} were traced. A larger one needs more memory, and another order of them "
            "may reserve more. Trace the script with all padded to the longest for a figure that holds."]


def with_phases(tape: Tape, phases: tuple[tuple[str, int], ...], steps: tuple[int, ...]) -> Tape:
    """The tape with the phases of a plan: load, first_eval, first_train, train, step, eval."""
    first_step, trained, found = steps[0] if steps else len(tape.events), False, list[Span]()
    for span, (name, start) in zip(tape.phases, phases, strict=True):
        trains = name in ("forward", "backward", "optimizer")
        trained = trained or trains
        if trains:
            name = "first_train" if start < first_step else "step" if name == "optimizer" else "train"
        elif name == "eval" and not trained:
            name = "first_eval"
        found.append(Span(name, span.start, span.end))
    return replace(tape, phases=tuple(found))


def owners_of(trace: Trace, timeline: Timeline, event: int) -> tuple[OwnerShare, ...]:
    """Every owner after an event, the largest first, with the modules that hold most of it."""
    blocks: dict[str, Counter[str]] = {}
    counts = Counter[str]()
    for entry, change in alive_after(timeline, event):
        kind = trace.tensors[int(entry.name.partition(" ")[0]) - 1]
        blocks.setdefault(entry.owner, Counter())[LAYER.sub(r".*.", kind.module).strip(".") or kind.op] += change
        counts[entry.owner] += 1
    shares = []
    for owner, modules in blocks.items():
        most = ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in modules.most_common(2))
        tensors = f"{counts[owner]:,} tensor{'' if counts[owner] == 1 else 's'}"
        shares.append(OwnerShare(owner, modules.total(), f"{tensors}: {most}"))
    return tuple(sorted(shares, key=lambda share: -share.nbytes))


# ---- changes

Size = Callable[[int, Kind], int]  # the number of a tensor, and what it is → its bytes after the change


def possible_changes(trace: Trace) -> list[tuple[str, str, Size]]:
    """What to change, what it saves, and the sizes of tensors then."""
    lives = lifetimes(trace)
    saved = saved_by_layers(trace, lives)
    temporary = {number for number, (start, end) in lives.items() if start == end == "optimizer"}
    states = {number for number, (start, end) in lives.items() if start == "optimizer" and end == ""}

    def half_batch(number: int, kind: Kind) -> int:
        return kind.nbytes // 2 if kind.owner in PER_SEQUENCE else kind.nbytes

    def checkpointed(number: int, kind: Kind) -> int:
        return 0 if number in saved else kind.nbytes

    def in_8_bits(number: int, kind: Kind) -> int:
        elements = kind.nbytes // 4
        return int(elements * (1 + SCALE)) if number in states and kind.dtype == "float32" \
            and elements >= SMALLEST_8BIT else kind.nbytes

    def fused(number: int, kind: Kind) -> int:
        return 0 if number in temporary else kind.nbytes

    found: list[tuple[str, str, Size]] = [(HALF_BATCH, "half of activations, logits and data", half_batch)]
    if saved:
        found.append(("gradient checkpointing", "what every layer but one saves for backward, except one tensor each",
                      checkpointed))
    if any(in_8_bits(number, trace.tensors[number - 1]) != trace.tensors[number - 1].nbytes for number in states):
        found.append((IN_8_BITS, "three quarters of the optimizer's state", in_8_bits))
    if sum(trace.tensors[number - 1].nbytes for number in temporary) > MiB:
        found.append(("a fused optimizer (fused=True)", "temporaries of the optimizer step", fused))
    return found


def lifetimes(trace: Trace) -> dict[int, tuple[str, str]]:
    """By tensor: the phases in which it is allocated and freed; "": never freed."""
    found: dict[int, tuple[str, str]] = {}
    starts = dict((start, name) for name, start in trace.phases)
    phase, following = "", 0
    for position, code in enumerate(trace.events):
        phase = starts.get(position, phase)
        if code == 0:
            following += 1
            found[following] = phase, ""
        elif code > 0:
            found[code] = found[code][0], phase
    return found


def saved_by_layers(trace: Trace, lives: dict[int, tuple[str, str]]) -> set[int]:
    """The tensors that gradient checkpointing would not keep: those that a layer's forward allocates and backward
    frees, except the last of each layer and those of the last layer, which is recomputed first."""
    layers: dict[int, list[int]] = {}
    for number, (start, end) in lives.items():
        found = LAYER.search(trace.tensors[number - 1].module)
        if start == "forward" and end == "backward" and found:
            layers.setdefault(int(found[1]), []).append(number)
    last = max(layers, default=0)
    return {number for layer, numbers in layers.items() if layer != last for number in numbers[:-1]}


# ---- every GPU of the table


def verdicts(trace: Trace, others: int | None = None, allocator: str = "") -> list[GpuVerdict]:
    """One verdict per GPU. GPUs with the same workspaces are replayed once."""
    expandable = trace.expandable if not allocator else allocator == "expandable"
    known: dict[int, Timeline] = {}

    def needs_and_tight(target: Target) -> tuple[int, list[str]]:
        platform = replace(target.platform, torch=trace.platform.torch)
        if platform.workspace not in known:
            known[platform.workspace] = replay(trace.on(platform).tape, expandable=expandable)
        timeline, budget = known[platform.workspace], target.budget
        if trace.compiled:
            needs = needed_for(trace, timeline)
            return needs, [*tight_reasons(needs, budget, lowest), *trace.bounded]
        needs = timeline.needs_under(budget.reserve_limit)
        return needs, [*tight_on(timeline, needs, budget, lowest), *trace.bounded]

    rows = recorded_of(record_kind(SCRIPT, expandable=expandable, odd=False, convolutions=trace.convolutions))
    lowest = lowest_error_of(rows, trace.compiled)
    return every_gpu(needs_and_tight, others, not_seen=trace.not_seen)
