"""ResolvedRun + Platform → Forecast: the memory of each phase, who owns the bytes at the peak and by which formula, and
what the run needs. Also how accurate forecasts of recorded runs were.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from math import log2, prod
from pathlib import Path
from typing import Any, NamedTuple

from ..config.optimizers import host_bytes
from ..config.run_config import DEFAULT_VOCAB, ResolvedRun, RunConfig
from ..core.units import MiB, show_bytes, show_count
from ..memory.platform import EXPANDABLE, NATIVE, Platform
from ..memory.tape import EMPTY_CACHE, Event, Span, Tape
from ..memory.timeline import (
    MAX_POINTS,
    OwnerTimeline,
    PhasePeak,
    Timeline,
    chart_points,
    replay,
    replays_in_other_orders,
)
from ..runs.metrics import PhaseMemory
from ..tapes import engine as engine_tape
from ..tapes import nanogpt as nanogpt_tape
from ..tapes.aten import round_up
from ..tapes.nanogpt_compiled import LINE, MULTIPLE, MULTIPLE_FLOAT32, ODD_SIZES, has_odd_sizes
from .budget import Budget
from .verdict import Verdict, tight_reasons, verdict_of


class OwnerShare(NamedTuple):
    """Whose bytes lie there at the peak, and where they come from: "16 × 1,024 × 50,304 × 2 bytes"."""

    owner: str
    nbytes: int
    formula: str


class Forecast(NamedTuple):
    """What a run will use of GPU memory, before it runs. Bytes."""

    trainer: str                           # "fitgpt", "nanogpt"
    params: int                            # all parameters, the tied head counted once
    phases: dict[str, PhaseMemory]         # of runs.metrics.PHASES, those that the run has
    peak_phase: str                        # the phase that allocates most
    owners_at_peak: tuple[OwnerShare, ...] # their sum is what is allocated then
    needs: int                             # the smallest memory limit under which the run completes
    reserved_range: tuple[int, int]        # lowest and highest, over the addresses a driver may return
    assumes: dict[str, str]                # torch, attention, compile, allocator
    host_bytes: int                        # CPU RAM of what is offloaded
    largest: tuple[str, int] = ("", 0)     # allocation: its name and its bytes
    not_seen: tuple[str, ...] = ()         # what the run does besides, one sentence each
    bounded: tuple[str, ...] = ()          # what may take more memory than forecast, one sentence each

    @property
    def allocated(self) -> int:
        return max(phase.allocated for phase in self.phases.values())

    @property
    def reserved(self) -> int:
        return max(phase.reserved for phase in self.phases.values())


OTHER_ADDRESSES = "If the CUDA driver returns addresses in another order than usual, it runs out of memory."


@dataclass(frozen=True)
class MemoryPlan:
    """A forecast compared with a budget. `needs` decides: a run that reserves more may complete with less."""

    forecast: Forecast
    budget: Budget

    @property
    def headroom(self) -> int:
        """Bytes; negative where the run does not fit."""
        return self.budget.reserve_limit - self.forecast.needs

    @cached_property
    def tight(self) -> tuple[str, ...]:
        """Why a run that fits may run out of memory all the same, one sentence each."""
        lowest = lowest_error(self.forecast.trainer, self.forecast.assumes)
        found = tight_reasons(self.forecast.needs, self.budget, lowest)
        return tuple(dict.fromkeys([*found, *self.forecast.bounded])) if self.headroom >= 0 else ()

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.headroom, self.forecast.not_seen, self.tight)

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the verdict leaves open, one sentence each: what was not seen, and why a run that fits may not."""
        return (*self.forecast.not_seen, *self.tight)

    @property
    def process_bytes(self) -> int:
        """What nvidia-smi will show for the process."""
        return self.forecast.reserved + self.budget.outside


def write_tape(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt") -> Tape:
    """Every allocation and free of the run, in order."""
    return nanogpt_tape.write(run, platform) if trainer == "nanogpt" else engine_tape.write(run, platform)


def replay_run(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt") -> Timeline:
    """The run's tape, replayed to its end."""
    return replay(write_tape(run, platform, trainer), expandable=platform.uses_expandable_segments(trainer))


def fits(run: ResolvedRun, platform: Platform, limit: int, trainer: str = "fitgpt") -> bool:
    """Whether the run completes under a memory limit: one replay, none where its tensors alone take more."""
    tape = write_tape(run, platform, trainer)
    expandable = platform.uses_expandable_segments(trainer)
    return tape.peak <= limit and replay(tape, limit, expandable=expandable).failed is None


def forecast(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt", limit: int | None = None) -> Forecast:
    """`limit`: what the allocator can reserve, if that is known. A run that would reserve more and completes with
    less is then forecast as it completes."""
    nanogpt, expandable = trainer == "nanogpt", platform.uses_expandable_segments(trainer)
    params = run.gpt_config().count_params()
    timeline, needed, reserved_range, phases, highest, bounded = replayed(write_tape(run, platform, trainer), limit,
                                                                          expandable=expandable)
    if nanogpt and not run.eval_only:  # a resume reads weights and moments onto the GPU, next to the model it has made
        resumed = phases["load"].allocated + 12 * params
        phases["save"] = PhaseMemory(timeline.allocated[-1], timeline.reserved)
        phases["resume"] = PhaseMemory(resumed, max(resumed, phases["load"].reserved))
    elif not run.eval_only:  # a resume reads its checkpoint into CPU RAM; sampling is another process
        phases["resume"] = phases["load"]
        if run.states != "early":  # optimizer state that a new run allocates later is there, too
            load = replay(engine_tape.write(replace(run, init_from="resume"), platform),
                          expandable=expandable).peaks()["load"]
            phases["resume"] = PhaseMemory(load.allocated, load.reserved)
        sampled = replay(engine_tape.write_sampling(run, platform), expandable=expandable)
        sample = sampled.peaks()["sample"]
        phases["sample"] = PhaseMemory(sample.allocated, sample.reserved)
        if sample.allocated > highest.allocated:
            highest, timeline = sample, sampled

    return Forecast(
        trainer=trainer, params=params, phases=phases,
        peak_phase=highest.phase, owners_at_peak=owners(run, trainer, timeline, highest.event),
        needs=needed, reserved_range=reserved_range,
        assumes=assumptions(run, platform, trainer), host_bytes=0 if nanogpt else host_bytes(run), bounded=bounded,
        largest=largest_allocation(timeline.tape))


def assumptions(run: ResolvedRun, platform: Platform, trainer: str) -> dict[str, str]:
    """`Forecast.assumes` of a run."""
    attention, compiled = engine_tape.attention_kernel(run, platform), "compiled"
    if trainer == "nanogpt":
        attention = platform.attention(run.n_embd // run.n_head, run.dtype)
        if has_odd_sizes(run.dtype, run.batch_size * run.block_size, run.vocab_size):
            compiled = f"compiled, {ODD_SIZES}"
    return {"torch": platform.describe_torch(), "attention": attention,
            "compile": compiled if run.compile else "eager",
            "allocator": EXPANDABLE if platform.uses_expandable_segments(trainer) else NATIVE}


class Replayed(NamedTuple):
    """A tape replayed: to its end, or under a limit within which it completes."""

    timeline: Timeline
    needs: int                       # the smallest memory limit under which it completes
    reserved_range: tuple[int, int]  # lowest and highest, over the addresses a driver may return
    phases: dict[str, PhaseMemory]
    highest: PhasePeak               # the phase that allocates most
    bounded: tuple[str, ...]         # whether it may run out of memory under the limit


def replayed(tape: Tape, limit: int | None, *, expandable: bool) -> Replayed:
    """What is reserved without a limit, what is needed, and what is reserved under the limit."""
    unlimited = timeline = replay(tape, expandable=expandable)
    needed = unlimited.needs if limit is None else unlimited.needs_under(limit)
    reserved, bounded = unlimited.reserved_in_any_order, tuple[str, ...]()
    if limit is not None and needed <= limit < max(reserved):
        timeline = replay(tape, limit, expandable=expandable)
        others = () if expandable else replays_in_other_orders(tape, limit)
        reserved = timeline.reserved, *(each.reserved for each in others)
        bounded = (OTHER_ADDRESSES,) if any(each.failed is not None for each in others) else ()

    # Reserved is cumulative: a phase that repeats comes after all the others.
    peaks = timeline.peaks()
    so_far = accumulate((peak.reserved for peak in peaks.values()), max)
    phases = {phase: PhaseMemory(peak.allocated, held) for (phase, peak), held in zip(peaks.items(), so_far,
                                                                                      strict=True)}
    return Replayed(timeline, needed, (min(reserved), max(reserved)), phases,
                    max(peaks.values(), key=lambda peak: peak.allocated), bounded)


def largest_allocation(tape: Tape) -> tuple[str, int]:
    event = max((event for event in tape.events if event.alloc), key=lambda event: event.nbytes, default=None)
    return (event.name, event.nbytes) if event else ("", 0)


def one_step(timeline: Timeline, most: int = MAX_POINTS) -> OwnerTimeline:
    """Points for a chart of the training step with the highest peak, its optimizer step included; of a run that does
    not train, of the phase with the highest peak. With CUDA graphs that is the first step: later ones allocate nothing.
    """
    phases = [phase for phase in timeline.tape.phases if phase.start < len(timeline.changes)]
    none = Span("", 0, 0)
    steps: list[tuple[int, int, tuple[tuple[str, int], ...]]] = []  # first event, end, and where its parts begin
    for before, phase, after in zip([none, *phases], phases, [*phases[1:], none], strict=False):
        if (phase.name, after.name) in (("first_train", "first_train"), ("train", "step")):
            steps.append((phase.start, after.end, (("training", phase.start), ("step", phase.end))))
        elif phase.name == "first_train" and before.name != "first_train":  # a first step may be one phase
            steps.append((phase.start, phase.end, (("training", phase.start),)))
    steps = steps or [(start, end, ((phase, start),)) for phase, start, end in phases if end > start]
    start, end, marks = max(reversed(steps), key=lambda each: max(timeline.allocated[each[0]:each[1]], default=0))
    return chart_points(timeline, start, end, marks, most)


# ---- formulas: the bytes of an owner as products of sizes, "12 layers × 16,384 tokens × … bytes"
#
# Every figure is a sum over the tensors that are alive at the peak, so a formula cannot differ from the tape. Bytes
# that no formula covers are named at its end.

MOST_TERMS = 3
SMALL = 0.01       # of an owner's bytes: smaller terms are summed up
LARGE = MiB        # tensors without a formula are listed from this size on
NEGLIGIBLE = 0.002 # of an owner's bytes: a smaller rest is not mentioned
LAYER = re.compile(r"(\d+)\.")        # "3.qkv": of layer 3
POSITIONS = re.compile(r"pos(?:itions|_emb)")  # a tensor of one sequence, whatever the batch
PARAMETER = re.compile(r"(?:\d+\.)?(wte|wpe|c_attn|attn(?:\.c)?_proj|c_fc|mlp(?:\.c)?_proj)(?!\w|\.bias)")
RAW = ".raw"       # a half-precision gradient, the result of a matmul
WHOLE = ".float32" # a weight before it is rounded


class Alive(NamedTuple):
    """A tensor that is allocated at the peak."""

    name: str
    nbytes: int    # as requested
    taken: int     # of the allocator's block


class Term(NamedTuple):
    """One product of a formula."""

    nbytes: int
    text: str


class FormulaSizes(NamedTuple):
    """The sizes that tensors are multiples of."""

    batch: int
    block: int
    width: int
    layers: int
    vocab: int
    params: int
    matmul: int    # bytes per element in matmuls
    weight: int    # bytes per element of a weight matrix


def owners(config: RunConfig, trainer: str, timeline: Timeline, event: int) -> tuple[OwnerShare, ...]:
    """Every owner after an event, the largest first; their sum is what is allocated then."""
    tensors: dict[str, list[Alive]] = {}
    for entry, change in alive_after(timeline, event):
        tensors.setdefault(entry.owner, []).append(Alive(entry.name, entry.nbytes, change))
    phase = next((phase for phase, start, end in timeline.tape.phases if start <= event < end), "")
    sizes = formula_sizes(config, trainer, phase)
    shares = [OwnerShare(owner, sum(each.taken for each in held), formula(owner, held, sizes))
              for owner, held in tensors.items()]
    return tuple(sorted(shares, key=lambda share: -share.nbytes))


def alive_after(timeline: Timeline, event: int) -> list[tuple[Event, int]]:
    """The tensors that are allocated after an event, each with the bytes of its block."""
    alive: dict[str, tuple[Event, int]] = {}
    for entry, change in zip(timeline.tape.events[:event + 1], timeline.changes, strict=False):
        if entry.alloc:
            alive[entry.name] = entry, change
        elif entry.name != EMPTY_CACHE:
            del alive[entry.name]
    return list(alive.values())


def formula_sizes(config: RunConfig, trainer: str, phase: str) -> FormulaSizes:
    """nanoGPT's train.py evaluates with the batch and block of training, whatever the config says."""
    evaluating, in_sampling = trainer == "fitgpt" and phase.endswith("eval"), phase == "sample"
    return FormulaSizes(
        batch=config.eval_batch if evaluating else 1 if in_sampling else config.batch_size,
        block=config.eval_block if evaluating else config.block_size, width=config.n_embd, layers=config.n_layer,
        vocab=config.vocab_size or DEFAULT_VOCAB, params=config.gpt_config().count_params(),
        matmul=4 if config.dtype == "float32" else 2,
        weight=2 if trainer == "fitgpt" and config.weights == "bfloat16" and not in_sampling else 4)


def formula(owner: str, tensors: Sequence[Alive], sizes: FormulaSizes) -> str:
    """'12 layers × 16,384 tokens × (576 × 36 + 64) bytes, and 3.1 MiB of small things'."""
    total = sum(each.taken for each in tensors)
    named = [term for term in sorted(_terms(owner, tensors, sizes), reverse=True)
             if term.nbytes >= SMALL * total][:MOST_TERMS]
    rest = total - sum(term.nbytes for term in named)
    if not named:
        return f"{show_bytes(rest)} of small things"
    text = " + ".join(term.text for term in named)
    if rest < NEGLIGIBLE * total:
        return text
    slack = total - sum(each.nbytes for each in tensors)
    what = "of rounding" if slack > rest / 2 else "of small things" if rest < 3 * SMALL * total else "more"
    return f"{text}, and {show_bytes(rest)} {what}"


def tensor_formula(event: Event, config: RunConfig, trainer: str, phase: str) -> str:
    """'2,048 × 50,304 × 2 bytes': one tensor as a product of its dimensions; in bytes where they are not known."""
    sizes, width = formula_sizes(config, trainer, phase), config.n_embd
    possible: list[tuple[int, ...]] = []  # dimensions of a tensor of that name, the most first
    if event.owner == "logits":
        terms = _logits_terms([Alive(event.name, event.nbytes, event.nbytes)], sizes)
        return terms[0].text if terms else show_bytes(event.nbytes)
    if event.owner in ("activations", "data"):
        batch = () if POSITIONS.search(event.name) else (sizes.batch,)
        possible = [(*batch, sizes.block, width), (*batch, sizes.block)]
    elif event.owner in ("weights", "gradients", "optimizer", "casts") and (found := PARAMETER.match(event.name)):
        possible = [{"wte": (sizes.vocab, width), "wpe": (sizes.block, width), "c_attn": (width, 3 * width),
                     "attn_proj": (width, width), "c_fc": (width, 4 * width),
                     "mlp_proj": (4 * width, width)}[found[1].replace(".c", "")]]
    shape = next((shape for shape in possible if event.nbytes % prod(shape) == 0), None)
    if shape is None:
        return show_bytes(event.nbytes)
    element = event.nbytes // prod(shape)
    return " × ".join(f"{side:,}" for side in (*shape, element)) + (" bytes" if element > 1 else " byte")


def _terms(owner: str, tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    """The tensors of an owner as a sum of products."""
    nbytes, tokens = sum(each.nbytes for each in tensors), sizes.batch * sizes.block
    if owner == "activations":
        return _layer_terms(tensors, sizes)
    if owner == "logits":
        return _logits_terms(tensors, sizes)
    if owner == "data":
        per_token = nbytes // tokens
        return [Term(tokens * per_token, f"{tokens:,} tokens × {per_token:,} bytes")] if per_token else []
    if owner == "optimizer":
        return [Term(nbytes, f"{show_count(sizes.params)} × {nbytes / sizes.params:.3g} bytes")]
    if owner == "casts":
        return [Term(nbytes, f"{show_count(nbytes // sizes.matmul)} × {sizes.matmul} bytes")]
    if owner in ("weights", "gradients"):  # those of matmuls apart from those that are kept
        raw, whole = (sum(each.nbytes for each in tensors if each.name.endswith(end)) for end in (RAW, WHOLE))
        parts = (nbytes - raw - whole, sizes.weight), (raw, sizes.matmul), (whole, 4)
        return [Term(part, f"{show_count(part // element)} × {element} bytes") for part, element in parts if part]
    return [Term(count * size, f"{f'{count} × ' if count > 1 else ''}{show_bytes(size)}")
            for size, count in Counter(each.nbytes for each in tensors).items() if size >= LARGE]


def _layer_terms(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    """Bytes per token of the layers, those that are alike together, and of tensors outside the layers. Sizes that are
    no multiple of the tokens are left out."""
    tokens, width = sizes.batch * sizes.block, sizes.width
    per_token: dict[int, tuple[int, int]] = {}  # layer, or -1 → bytes per token and channel, other bytes per token
    for each in tensors:
        found = LAYER.match(each.name)
        layer = int(found[1]) if found and int(found[1]) < sizes.layers else -1
        wide, beside = per_token.get(layer, (0, 0))
        if each.nbytes % (tokens * width) == 0:
            wide += each.nbytes // (tokens * width)
        elif each.nbytes % tokens == 0:
            beside += each.nbytes // tokens
        per_token[layer] = wide, beside
    outside = per_token.pop(-1, (0, 0))
    terms = []
    for (wide, beside), layers in [*Counter(per_token.values()).items(), (outside, 0)]:
        if wide or beside:
            times = f"{layers} layer{'s' if layers > 1 else ''} × " if layers else ""
            text = f"{width:,} × {wide:,}" if wide else f"{beside:,}"
            text = f"({text} + {beside:,})" if wide and beside else text
            terms.append(Term(max(layers, 1) * tokens * (wide * width + beside),
                              f"{times}{tokens:,} tokens × {text} bytes"))
    return terms


def _logits_terms(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    """Arrays with the logits of all tokens, and those of chunks. Rows that are padded to whole cache lines lack the
    padding of the last row."""
    element, terms, left = sizes.matmul, list[Term](), list(tensors)
    for multiple in (1, MULTIPLE_FLOAT32, MULTIPLE, LINE // element):
        vocab = round_up(sizes.vocab, multiple)
        whole = sizes.batch * sizes.block * vocab
        lacks = vocab * element if multiple == LINE // element else 1
        whole_arrays = [each for each in left if -each.nbytes % (whole * element) < lacks]
        left = [each for each in left if each not in whole_arrays]
        if whole_arrays:
            wide = sum(-(-each.nbytes // whole) for each in whole_arrays)
            terms.append(Term(sum(each.nbytes for each in whole_arrays),
                              f"{sizes.batch:,} × {sizes.block:,} × {vocab:,} × {wide} bytes"))
    for nbytes, count in Counter(each.nbytes for each in left).items():
        rows, rest = divmod(nbytes, sizes.vocab * element)
        if not rest:
            times = f"{count} × " if count > 1 else ""
            terms.append(Term(count * nbytes, f"{times}{rows:,} × {sizes.vocab:,} × {element} bytes"))
    return terms


# ---- how accurate forecasts were: track_record.csv, one row per recorded run, written by tools/accuracy.py

TRACK_RECORD = Path(__file__).with_name("track_record.csv")
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "vocab_size",
         "dtype")
COLUMNS = ("trainer", "gpu", "torch", "name", "params", *SHAPE, "mode", "options", "allocated_bytes",
           "reserved_bytes", "forecast_allocated_bytes", "forecast_reserved_bytes", "figures", "worst_percent")
RECORDED_OPTIONS = ("bias", "dropout", "saved_activations", "weights", "residual", "casts", "gradients", "optimizer",
                    "offload", "step_in_backward", "deterministic")  # further options that change the memory
NANOGPT_OPTIONS = ("bias", "dropout")


class TrackRecord(NamedTuple):
    on_card: int                  # recorded runs on this GPU
    in_all: int
    worst_percent: float | None   # the largest error of all their figures; None: there are no runs
    torch: tuple[str, ...]        # versions of torch in these runs


@cache  # every plan asks several times
def recorded_runs() -> list[dict[str, str]]:
    """The rows of the file, by COLUMNS."""
    with TRACK_RECORD.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _recorded_like(trainer: str, assumes: Mapping[str, str]) -> list[dict[str, str]]:
    """The recorded runs of that trainer and allocator. `assumes`: of a forecast."""
    return recorded_of(record_kind(trainer, expandable=assumes["allocator"] == EXPANDABLE,
                                   odd=ODD_SIZES in assumes["compile"], convolutions="convolutions" in assumes))


def recorded_of(kind: str) -> list[dict[str, str]]:
    """The recorded runs of a `record_kind`."""
    return [row for row in recorded_runs() if row["trainer"] == kind]


def tight_on(timeline: Timeline, needs: int, budget: Budget, lowest: float) -> list[str]:
    """Why a run that fits may run out of memory all the same: `MemoryPlan.tight` without a forecast. `timeline`: of the
    run, without a limit."""
    found = tight_reasons(needs, budget, lowest)
    fits_in_any_order = needs > budget.reserve_limit or timeline.fits_in_any_order(budget.reserve_limit)
    return found if fits_in_any_order else [*found, OTHER_ADDRESSES]


def track_record_of(forecast: Forecast, gpu: str) -> TrackRecord:
    """The recorded runs of that trainer, and the worst error of their forecasts."""
    rows = _recorded_like(forecast.trainer, forecast.assumes)
    errors = [float(row["worst_percent"]) for row in rows]
    return TrackRecord(sum(row["gpu"] == gpu for row in rows), len(rows), max(errors, key=abs) if errors else None,
                       tuple(sorted({row["torch"] for row in rows})))


def lowest_error(trainer: str, assumes: Mapping[str, str]) -> float:
    """By how much forecasts of such runs, eager or compiled, were too low at most: −0.05 is 5 %; 0: none was."""
    return lowest_error_of(_recorded_like(trainer, assumes), assumes["compile"] != "eager")


def lowest_error_of(rows: Iterable[dict[str, str]], compiled: bool) -> float:
    """The same of recorded runs."""
    return min((int(row["forecast_reserved_bytes"]) / int(row["reserved_bytes"]) - 1 for row in rows
                if row["mode"] == ("compiled" if compiled else "eager")), default=0.0)


def record_kind(trainer: str, *, expandable: bool, odd: bool, convolutions: bool = False) -> str:
    """The value of the column `trainer`. Runs of nanoGPT are counted apart with the native allocator, with expandable
    segments, and with sizes for which torch's compiler times on the GPU whether to pad; scripts with convolutions."""
    if convolutions:
        return f"{trainer}, convolutions"
    if trainer != "nanogpt":
        return trainer
    return f"{trainer}, {EXPANDABLE}" if expandable else f"{trainer}, {ODD_SIZES}" if odd else trainer


class RecordedRun(NamedTuple):
    """A recorded run, what was measured, and the forecast of it. Bytes."""

    gpu: str
    torch: str
    params: int
    n_layer: int
    n_embd: int
    batch_size: int
    block_size: int
    vocab_size: int
    dtype: str
    mode: str          # compiled or eager
    options: str       # those that differ from the defaults: "saved_activations=input weights=bfloat16"
    allocated_bytes: int
    reserved_bytes: int
    forecast_allocated_bytes: int
    forecast_reserved_bytes: int

    def describe(self) -> str:
        with_options = f" {self.options}," if self.options else ""
        return (f"{show_count(self.params)} parameters, batch {self.batch_size:,} × {self.block_size:,}, {self.dtype}, "
                f"{self.mode},{with_options} {self.gpu}: measured {show_bytes(self.allocated_bytes)} allocated, "
                f"{show_bytes(self.reserved_bytes)} reserved; forecast {show_bytes(self.forecast_allocated_bytes)} and "
                f"{show_bytes(self.forecast_reserved_bytes)}")


def nearest_recorded_run(run: ResolvedRun, forecast: Forecast, gpu: str) -> RecordedRun | None:
    """The recorded run of the same trainer that is most similar; None if there is none.

    Distance: the factors by which layers, width, batch, block and vocabulary differ, as log2; 1 for the other compile
    mode, and for float32 against half precision; ½ for each other option that differs, and for another GPU.
    """
    sizes = ("n_layer", "n_embd", "batch_size", "block_size", "vocab_size")
    mode, options = "compiled" if run.compile else "eager", set(recorded_options(run, forecast.trainer).split())

    def distance(row: dict[str, str]) -> float:
        factors = ((int(row[size]) or DEFAULT_VOCAB) / (getattr(run, size) or DEFAULT_VOCAB) for size in sizes)
        return (sum(abs(log2(factor)) for factor in factors)
                + (row["mode"] != mode) + ((row["dtype"] == "float32") != (run.dtype == "float32"))
                + len(options ^ set(row["options"].split())) / 2 + (row["gpu"] != gpu) / 2)

    row = min(_recorded_like(forecast.trainer, forecast.assumes), key=distance, default=None)
    if row is None:
        return None
    figures: dict[str, Any] = {name: int(row[name]) if row[name].isdigit() else row[name]
                               for name in RecordedRun._fields}
    return RecordedRun(**figures)


def recorded_options(run: RunConfig, trainer: str) -> str:
    """The value of the column `options`."""
    if run.grad_checkpoint:  # the same recompute policy
        run = replace(run, grad_checkpoint=False, saved_activations="input")
    names = NANOGPT_OPTIONS if trainer == "nanogpt" else RECORDED_OPTIONS
    return " ".join(f"{name}={getattr(run, name)}" for name in names if getattr(run, name) != getattr(RunConfig, name))
