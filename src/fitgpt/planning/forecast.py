"""ResolvedRun + Platform → Forecast: the memory of each phase, who owns the bytes at the peak, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from ..config.resolve import ResolvedRun
from ..config.run_config import NOT_NANOGPTS, RunConfig
from ..memory.platform import EXPANDABLE, NATIVE, Platform
from ..memory.tape import Span, Tape
from ..memory.timeline import (
    MAX_POINTS,
    OwnerTimeline,
    PhasePeak,
    Timeline,
    chart_points,
    needs,
    needs_under,
    replay,
    reserved_in_other_orders,
)
from ..runs.metrics import PhaseMemory
from ..tapes import engine as engine_tape
from ..tapes import nanogpt as nanogpt_tape
from ..tapes.nanogpt_compiled import ODD_SIZES, has_odd_sizes
from . import formulas
from .budget import Budget
from .formulas import OwnerShare

TRAINERS = ("fitgpt", "nanogpt")


class Forecast(NamedTuple):
    """What a run will use of GPU memory, before it runs. Bytes."""

    trainer: str                           # "fitgpt", "nanogpt"
    params: int                            # all parameters, the tied head counted once
    phases: dict[str, PhaseMemory]       # of runs.metrics.PHASES, those that the run has
    peak_phase: str                        # the phase that allocates most
    owners_at_peak: tuple[OwnerShare, ...] # their sum is what is allocated then
    needs: int                             # the smallest memory limit under which the run completes
    reserved_range: tuple[int, int]        # lowest and highest, over the addresses a driver may return
    assumes: dict[str, str]                # torch, attention, compile, allocator
    host_bytes: int                        # CPU RAM of what is offloaded
    checkpoint_bytes: int                  # of one checkpoint on disk

    @property
    def allocated(self) -> int:
        return max(phase.allocated for phase in self.phases.values())

    @property
    def reserved(self) -> int:
        return max(phase.reserved for phase in self.phases.values())


@dataclass(frozen=True)
class MemoryPlan:
    """A forecast compared with a budget. `needs` decides: a run that reserves more may complete with less."""

    forecast: Forecast
    budget: Budget

    @property
    def headroom(self) -> int:
        """Bytes; negative where the run does not fit."""
        return self.budget.reserve_limit - self.forecast.needs

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def process_bytes(self) -> int:
        """What nvidia-smi will show for the process."""
        return self.forecast.reserved + self.budget.outside


def write_tape(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt") -> Tape:
    """Every allocation and free of the run, in order."""
    if trainer == "nanogpt":
        return nanogpt_tape.write(run, platform)
    return engine_tape.write(run, platform)


def replay_run(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt", limit: int | None = None) -> Timeline:
    """The run's tape, replayed: to its end, or to the allocation that fails under `limit`."""
    return replay(write_tape(run, platform, trainer), limit, expandable=platform.uses_expandable_segments(trainer))


def needs_of(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt") -> int:
    """The smallest memory limit, in 2 MiB steps, under which the run completes."""
    return needs(write_tape(run, platform, trainer), expandable=platform.uses_expandable_segments(trainer))


def fits(run: ResolvedRun, platform: Platform, limit: int, trainer: str = "fitgpt") -> bool:
    """Whether the run completes under a memory limit: one replay, none where its tensors alone take more."""
    tape = write_tape(run, platform, trainer)
    expandable = platform.uses_expandable_segments(trainer)
    return tape.peak <= limit and replay(tape, limit, expandable=expandable).failed is None


def forecast(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt", limit: int | None = None) -> Forecast:
    """`limit`: what the allocator may reserve, if that is known. A run that would reserve more and completes with
    less is then forecast as it completes."""
    expandable = platform.uses_expandable_segments(trainer)
    tape = write_tape(run, platform, trainer)
    unlimited = timeline = replay(tape, expandable=expandable)
    needed = needs(tape, expandable=expandable, free_run=unlimited)
    if limit is not None:
        needed = needs_under(limit, tape, needed, free_run=unlimited, expandable=expandable)
        if needed <= limit < unlimited.reserved:
            timeline = replay(tape, limit, expandable=expandable)
    other_orders = () if expandable else reserved_in_other_orders(tape)
    reserved = unlimited.reserved, *other_orders
    most = max(reserved) if timeline is unlimited else timeline.reserved

    peaks = timeline.peaks()
    highest = max(peaks.values(), key=lambda peak: peak.allocated)
    phases = _by_phase(peaks)
    if trainer == "nanogpt" and not run.eval_only:
        phases |= _other_phases_of_nanogpt(run, timeline, phases)
    elif not run.eval_only:  # sampling is another process; a resume reads its checkpoint into CPU RAM
        sampled = replay(engine_tape.write_sampling(run, platform), expandable=expandable)
        sample = sampled.peaks()["sample"]
        phases["resume"] = phases["load"] if run.states == "early" else _resumed(run, platform)
        phases["sample"] = PhaseMemory(sample.allocated, sample.reserved)
        if sample.allocated > highest.allocated:
            highest, timeline = sample, sampled

    effective: RunConfig = run if trainer == "fitgpt" else replace(run, **{
        name: getattr(RunConfig, name) for name in NOT_NANOGPTS})
    return Forecast(
        trainer=trainer, params=run.gpt_config().count_params(), phases=phases,
        peak_phase=highest.phase, owners_at_peak=formulas.owners(run, trainer, timeline, highest.event),
        needs=needed, reserved_range=(min(*reserved, most), most),
        assumes=assumptions(run, platform, trainer), host_bytes=engine_tape.host_bytes(effective),
        checkpoint_bytes=engine_tape.checkpoint_bytes(effective))


def assumptions(run: ResolvedRun, platform: Platform, trainer: str) -> dict[str, str]:
    """What a forecast assumes: torch and how its rules are known, attention kernel, compiled or eager, allocator."""
    padded = trainer == "nanogpt" and has_odd_sizes(run.dtype, run.batch_size * run.block_size,
                                                    run.vocab_size)
    attention = (engine_tape.attention_kernel(run, platform) if trainer == "fitgpt" else
                 platform.attention(run.n_embd // run.n_head, run.dtype))
    return {
        "torch": platform.describe_torch(), "attention": attention,
        "compile": (f"compiled, {ODD_SIZES}" if padded else "compiled") if run.compile else "eager",
        "allocator": EXPANDABLE if platform.uses_expandable_segments(trainer) else NATIVE}


def _by_phase(peaks: dict[str, PhasePeak]) -> dict[str, PhaseMemory]:
    """Reserved is cumulative: a phase that repeats comes after all the others."""
    reserved = accumulate((peak.reserved for peak in peaks.values()), max)
    return {phase: PhaseMemory(peak.allocated, most)
            for (phase, peak), most in zip(peaks.items(), reserved, strict=True)}


def _resumed(run: ResolvedRun, platform: Platform) -> PhaseMemory:
    """After a checkpoint was read: optimizer state that a new run allocates later is there, too."""
    resumed = replay(engine_tape.write(replace(run, init_from="resume"), platform), expandable=platform.expandable)
    peak = resumed.peaks()["load"]
    return PhaseMemory(peak.allocated, peak.reserved)


def _other_phases_of_nanogpt(run: ResolvedRun, timeline: Timeline,
                             phases: dict[str, PhaseMemory]) -> dict[str, PhaseMemory]:
    """Phases that are not on the tape. A resume reads the checkpoint onto the GPU, weights and moments, next to the
    model it has made."""
    held = phases["load"].allocated + 12 * run.gpt_config().count_params()
    return {"save": PhaseMemory(timeline.allocated[-1], timeline.reserved),
            "resume": PhaseMemory(held, max(held, phases["load"].reserved))}


def one_step(timeline: Timeline, most: int = MAX_POINTS) -> OwnerTimeline:
    """Points for a chart of the training step with the highest peak, its optimizer step included; of a run that does
    not train, of the phase with the highest peak. With CUDA graphs that is the first step: later ones allocate nothing.
    """
    phases = [phase for phase in timeline.tape.phases if phase.start < len(timeline.changes)]
    steps = _training_steps(phases) or [(start, end, ((phase, start),)) for phase, start, end in phases if end > start]
    start, end, marks = max(reversed(steps), key=lambda each: max(timeline.allocated[each[0]:each[1]], default=0))
    return chart_points(timeline, start, end, marks, most)


def _training_steps(phases: list[Span]) -> list[tuple[int, int, tuple[tuple[str, int], ...]]]:
    """First event, end, and the beginnings of micro-batches and optimizer step; a first step may be one phase."""
    steps: list[tuple[int, int, tuple[tuple[str, int], ...]]] = []
    none = Span("", 0, 0)
    for before, phase, after in zip([none, *phases], phases, [*phases[1:], none], strict=False):
        if (phase.name, after.name) in (("first_train", "first_train"), ("train", "step")):
            steps.append((phase.start, after.end, (("training", phase.start), ("step", phase.end))))
        elif phase.name == "first_train" and before.name != "first_train":
            steps.append((phase.start, phase.end, (("training", phase.start),)))
    return steps
