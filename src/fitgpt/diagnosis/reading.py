"""A reading of GPU memory, two figures or the output of nvidia-smi → Diagnosis: who holds each MiB of the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..core.errors import DeviceError, UsageError
from ..core.units import MiB, show_bytes
from ..hardware.gpus import GpuModel, find, match_device
from ..hardware.nvidia import gpus
from ..planning import budget
from .case import SCRIPTS, TRAINERS, ExplainedRun, ExplainRequest
from .diagnose import Diagnosis, MemoryShare
from .nvidia_smi import SmiGpu, SmiProcess
from .tensor_match import PHASE_LABELS

CLOSE = 0.05         # a forecast this near to a reading is of the same run, in that phase
EQUALLY_CLOSE = 0.02 # two forecasts this near to a reading explain it equally well
MAX_ABOVE_USABLE = 1.1  # nvidia-smi counts a little more memory than CUDA can use
CLEARLY_CLOSER = 3   # times as close: then the reading is of that trainer
LONGEST_FIRST = ("train", "first_train", "first_eval", "load")  # phases in which a run may be read


@dataclass(frozen=True)
class Reading:
    """Figures read for one GPU, in bytes. None: not read."""

    used: int | None          # by all processes
    process: int | None       # by the run's process, its context included
    total: int | None = None
    processes: tuple[SmiProcess, ...] = ()  # the others, if they are listed
    notes: tuple[str, ...] = ()
    forecast: bool = False    # `process` was not read: it is the forecast of the config


class OutsideMemory(NamedTuple):
    """What a process holds outside PyTorch's allocator, and how that is known."""

    nbytes: int
    source: str
    no_card: bool = False  # the name of the GPU would give it


def outside_on(card: GpuModel | None, assumed: int | None = None) -> OutsideMemory | None:
    """The figure of the card, or the assumed one; None if there is neither."""
    if card is not None and card.outside_mib:
        source = {"seen": "as measured on such a GPU", "formula": "by the number of its multiprocessors"}
        return OutsideMemory(card.outside_mib * MiB, source.get(card.outside_src, card.outside_src))
    return OutsideMemory(assumed, "as on any GPU of that size", no_card=card is None) if assumed else None


# ---- from the user's input


def explain_figures(used: int | None, request: ExplainRequest) -> Diagnosis:
    """The used memory of a GPU, and that of the run's process, as two figures."""
    card = find(request.gpu) if request.gpu else _installed_card()
    return _explain_on(Reading(used, request.process), request, card)


def explain_nvidia_smi(listed: Sequence[SmiGpu], request: ExplainRequest) -> Diagnosis:
    """The GPU that runs a Python process, or else the fullest."""
    gpu = max(listed, key=lambda each: (any(process.computes for process in each.processes), each.used or 0))
    card = find(request.gpu) if request.gpu else card_of(gpu)
    run, outside, forecasts = request.run_on(card), outside_on(card), []
    if run is not None and outside is not None:
        runs = (run, run.with_other_trainer()) if request.trainer == "auto" else (run,)
        forecasts = [each.forecast.reserved + outside.nbytes for each in runs]
    return _explain_on(reading_of(gpu, request.process, forecasts), request, card)


def _explain_on(reading: Reading, request: ExplainRequest, card: GpuModel | None) -> Diagnosis:
    """Without a known GPU, the run is taken to be on the one that `plan --budget` assumes."""
    run, size = request.run_on(card), reading.total or reading.used or reading.process
    if run is None or size is None or outside_on(card) is not None:
        return explain_reading(reading, run, card, request.trainer)
    assumed = budget.unnamed(others=None, budget=size)
    diagnosis = explain_reading(reading, replace(run, platform=assumed.platform), card, request.trainer,
                                assumed.budget.outside)
    sources = assumed.budget.sources if card is None else (
        f"{card.name}: what a process holds outside PyTorch's allocator has not been measured there. "
        f"{show_bytes(assumed.budget.outside)} are assumed, as on any NVIDIA GPU of that size.",)
    return replace(diagnosis, notes=(*diagnosis.notes, *sources))


def _installed_card() -> GpuModel | None:
    try:
        found = [match_device(gpu.name, round((gpu.total_bytes or 0) / MiB)) for gpu in gpus()]
    except DeviceError:
        return None
    return found[0] if found else None


def card_of(gpu: SmiGpu) -> GpuModel | None:
    return match_device(gpu.name, round(gpu.total / MiB) if gpu.gpu_instance is None else None)


def reading_of(gpu: SmiGpu, process: int | None = None, forecasts: Sequence[int] = ()) -> Reading:
    """The run is the Python process; of several, one whose memory is close to a forecast, or else the largest."""
    def error(each: SmiProcess) -> float:
        return min((abs((each.nbytes or 0) / nbytes - 1) for nbytes in forecasts), default=1.0)

    runs = sorted((each for each in gpu.processes if each.computes),
                  key=lambda each: (error(each) > CLOSE, error(each) if error(each) <= CLOSE else 0,
                                    -(each.nbytes or 0)))
    notes = []
    if process is None and runs:
        process = runs[0].nbytes
        if process is None:
            notes.append("The driver reports no memory per process here (WSL and Windows print N/A).")
        elif len(runs) > 1:
            why = "whose memory is close to the config's forecast" if error(runs[0]) <= CLOSE else "the largest"
            notes.append(f"{len(runs)} Python processes use the GPU; {runs[0].pid}, {why}, is taken for the run. "
                         "--process=… selects another.")
    if gpu.gpu_instance is not None:
        notes.append(f"The GPU is split into MIG devices; this is GPU instance {gpu.gpu_instance}.")
    others = tuple(each for each in gpu.processes if not runs or each is not runs[0])
    return Reading(gpu.used, process, gpu.total, others, tuple(notes))


# ---- the run's forecast beside the reading


@dataclass(frozen=True)
class RunComparison:
    """The memory read for a process, beside the forecast of a run in the phase that explains it best."""

    run: ExplainedRun
    process: int
    outside: OutsideMemory

    @property
    def reserved(self) -> int:
        return self.process - self.outside.nbytes

    @cached_property
    def phase(self) -> str:
        """The phase with nearly this much reserved; of several, the one in which a run stays longest."""
        return min(self._phases(), key=self._distance)

    @property
    def forecast_reserved(self) -> int:
        return self.run.forecast.phases[self.phase].reserved

    @property
    def forecast(self) -> int:
        return self.forecast_reserved + self.outside.nbytes

    @property
    def error(self) -> float:
        """How much larger the forecast is than the reading, as a share of the reading."""
        return self.forecast / self.process - 1 if self.process else 0.0

    def clearly_closer_than(self, other: RunComparison) -> bool:
        return abs(other.error) > CLOSE and CLEARLY_CLOSER * abs(self.error) <= abs(other.error)

    def describe(self) -> str:
        """'4,496 MiB, 0.7% more than was read'"""
        share = f"{abs(self.error):.{1 if abs(self.error) < 0.1 else 0}%}"
        than = "as was read" if share == "0.0%" else f"{share} {'less' if self.error < 0 else 'more'} than was read"
        return f"{self.forecast / MiB:,.0f} MiB, {than}"

    def other_phases(self) -> list[str]:
        """Further phases that explain the reading."""
        return [phase for phase in self._phases() if phase in LONGEST_FIRST and phase != self.phase
                and self._distance(phase) <= CLOSE]

    @property
    def peak_phase(self) -> str:
        """The phase with the most allocated in the memory that is reserved in `phase`: this one, or one before it."""
        peaks, order = self.run.timeline.peaks(), list(self.run.timeline.peaks())
        before = [each for each in order[:order.index(self.phase) + 1]
                  if peaks[each].reserved == peaks[self.phase].reserved]
        return max(before, key=lambda each: peaks[each].allocated)

    def _phases(self) -> list[str]:
        phases = self.run.forecast.phases
        later = [phase for phase, peak in phases.items()
                 if phase not in LONGEST_FIRST and peak.reserved == self.run.forecast.reserved]
        return [*(phase for phase in LONGEST_FIRST if phase in phases), *later]

    def _distance(self, phase: str) -> float:
        error = abs(self.reserved / self.run.forecast.phases[phase].reserved - 1)
        return error if error > EQUALLY_CLOSE else 0.0


def choose_trainer(process: int, run: ExplainedRun, outside: OutsideMemory) -> tuple[ExplainedRun, str]:
    """The run with the trainer whose forecast is clearly closer to the reading, and a sentence about the choice."""
    given = RunComparison(run, process, outside)
    other = replace(given, run=run.with_other_trainer())
    chosen, left = (other, given) if other.clearly_closer_than(given) else (given, other)
    clear = chosen.clearly_closer_than(left)
    return chosen.run, (
        f"The trainer was not given. {TRAINERS[chosen.run.trainer]}'s forecast, {chosen.describe()}, is "
        f"{'the closer one' if clear else 'taken'}; {TRAINERS[left.run.trainer]}'s is {left.describe()}"
        f"{'' if clear else ', not clearly closer'}. --trainer={left.run.trainer} selects it.")


# ---- the diagnosis


def explain_reading(reading: Reading, run: ExplainedRun | None = None, card: GpuModel | None = None,
                    trainer: str = "", assumed: int | None = None) -> Diagnosis:
    """`trainer`: as given, may be auto; by default the run's. `assumed`: bytes that a process holds outside PyTorch's
    allocator, if the card does not give them."""
    _check_figures(reading, card)
    outside = outside_on(card, assumed)
    if run is not None and outside is not None:
        if reading.process is not None and trainer == "auto":
            run, note = choose_trainer(reading.process, run, outside)
            reading = replace(reading, notes=(*reading.notes, note))
        elif reading.process is None and reading.used is not None:
            reading = _with_forecast_process(reading, run, outside, trainer)
    comparison = None
    if run is not None and outside is not None and reading.process is not None:
        comparison = RunComparison(run, reading.process, outside)
    return Diagnosis(
        subject="reading", title=_title(reading), what=_what(reading, comparison) if comparison else "",
        shares=tuple(_shares(reading, comparison, outside)),
        shares_of="the whole GPU" if reading.total is not None else "the used memory",
        needed=_needed(reading, run, outside), notes=reading.notes)


def _check_figures(reading: Reading, card: GpuModel | None) -> None:
    used, process = reading.used, reading.process
    if used is not None and process is not None and process > used:
        raise UsageError(f"--process {show_bytes(process)} is more than --reading {show_bytes(used)}: the GPU's figure "
                         "includes every process.",
                         f"--reading={process // MiB}MiB --process={used // MiB}MiB, the other way round?")
    usable = card.usable_mib * MiB if card and card.usable_mib else 0
    if card and usable and (used or 0) > MAX_ABOVE_USABLE * usable:
        raise UsageError(f"--reading {show_bytes(used or 0)} is more than the {card.name} has: CUDA can use "
                         f"{show_bytes(usable)} of it.", "Name the GPU on which it was read: --gpu=…")


def _with_forecast_process(reading: Reading, run: ExplainedRun, outside: OutsideMemory, trainer: str) -> Reading:
    """The reading with the config's forecast as the memory of the process; unchanged if that is more than is used."""
    forecast = run.forecast.reserved + outside.nbytes
    if reading.used is None or forecast > reading.used:
        return reading
    note = "The memory of the process was not given: the config's forecast is taken."
    if trainer == "auto":
        other = run.with_other_trainer()
        note += (f" It is {TRAINERS[run.trainer]}'s; {TRAINERS[other.trainer]} would hold "
                 f"{(other.forecast.reserved + outside.nbytes) / MiB:,.0f} MiB: --trainer={other.trainer}.")
    return replace(reading, process=forecast, forecast=True, notes=(*reading.notes, f"{note} --process=… gives it."))


def _title(reading: Reading) -> str:
    used, process = reading.used, reading.process
    if used is None:
        return f"This process holds {(process or 0) / MiB:,.0f} MiB of the GPU."
    if process is None:
        return f"{used / MiB:,.0f} MiB of the GPU are used."
    by = "by this process, according to the forecast" if reading.forecast else "by this process"
    return (f"{used / MiB:,.0f} MiB of the GPU are used: {process / MiB:,.0f} {by}, "
            f"{max(used - process, 0) / MiB:,.0f} by others.")


def _what(reading: Reading, comparison: RunComparison) -> str:
    """The forecast beside the reading, and the phase in which they agree."""
    phase, peak_phase = comparison.phase, comparison.peak_phase
    error = (comparison.reserved - comparison.forecast_reserved) / comparison.forecast_reserved
    config = f"this config under {SCRIPTS[comparison.run.trainer]}"
    forecast = (f"{comparison.forecast_reserved / MiB:,.0f} MiB reserved and {comparison.outside.nbytes / MiB:,.0f} "
                "outside PyTorch")
    peak = "that phase" if peak_phase == phase else (
        f"the {PHASE_LABELS[peak_phase]} phase, for which the memory was reserved")
    owners = f"The owners below are those at the peak of {peak}."
    if reading.forecast:
        return (f"By its forecast {config} holds {comparison.process / MiB:,.0f} MiB, {forecast}, in the "
                f"{PHASE_LABELS[phase]} phase. {owners}")
    if abs(error) > CLOSE:
        return (f"By its forecast {config} holds {forecast}: {comparison.describe()}. The run has another config or "
                "trainer, or was read between two phases.")
    others = " and the ".join(PHASE_LABELS[each] for each in comparison.other_phases())
    also = f" It would be about the same in the {others} phase." if others else ""
    return (f"The reading matches {config} in the {PHASE_LABELS[phase]} phase: forecast "
            f"{comparison.forecast / MiB:,.0f} MiB, {forecast}; read {comparison.process / MiB:,.0f}, "
            f"{round(error, 3) + 0.0:+.1%}.{also} {owners}")


def _shares(reading: Reading, comparison: RunComparison | None, outside: OutsideMemory | None) -> Iterator[MemoryShare]:
    used, process = reading.used, reading.process
    if process is not None:
        yield from _process_shares(process, comparison, outside)
    if used is None:
        return
    rest = used - (process or 0)
    listed = [each for each in reading.processes if each.nbytes is not None]
    if sum(each.nbytes or 0 for each in listed) > rest:  # the run is one of them, but which one is not known
        listed = []
    for each in listed:
        yield MemoryShare(f"process {each.pid}", each.nbytes or 0, each.name)
    left = rest - sum(each.nbytes or 0 for each in listed)
    if left > 0:
        what = "other processes" if process is not None else "all processes"
        yield MemoryShare(f"{what} and the driver" if listed else what, left,
                          "" if listed else "desktop, browser, other runs")
    if reading.total is not None:
        yield MemoryShare("free", max(reading.total - used, 0))


def _process_shares(process: int, comparison: RunComparison | None,
                    outside: OutsideMemory | None) -> Iterator[MemoryShare]:
    if outside is None or process <= outside.nbytes:
        yield MemoryShare("this process", process, "PyTorch, and its context of a few hundred MiB")
        return
    reserved = process - outside.nbytes
    owners = _owners(comparison) if comparison is not None else []
    allocated = sum(share.nbytes for share in owners)
    if comparison is None or allocated > reserved:  # less than the forecast: its owners would not add up
        yield MemoryShare("reserved by PyTorch", reserved)
    else:
        yield from owners
        forecast = min(reserved, max(comparison.forecast_reserved, allocated))
        if reserved - forecast <= CLOSE * forecast:
            forecast = reserved
        yield MemoryShare("reserved by PyTorch but unallocated at the peak", forecast - allocated)
        if reserved > forecast:
            yield MemoryShare("more than the forecast", reserved - forecast, "not explained by this config")
    yield MemoryShare("this process outside PyTorch", outside.nbytes, f"context and kernels; {outside.source}")


def _owners(comparison: RunComparison) -> list[MemoryShare]:
    """What was allocated at the peak of the reserved memory, the largest first."""
    run, phase = comparison.run, comparison.peak_phase
    owners = run.timeline.owners_at(run.timeline.peaks()[phase].event)
    formulas = {share.owner: share.formula for share in run.forecast.owners_at_peak} \
        if phase == run.forecast.peak_phase else {}
    return [MemoryShare(owner, nbytes, formulas.get(owner, ""))
            for owner, nbytes in sorted(owners.items(), key=lambda each: -each[1])]


def _needed(reading: Reading, run: ExplainedRun | None, outside: OutsideMemory | None) -> tuple[str, ...]:
    needed = []
    if reading.process is None:
        needed.append("--process=…: the memory of the run's own process, in nvidia-smi's lower table")
    if run is None:
        needed.append("the run's config, fitgpt explain … config.py: what the process's memory is used for")
    if outside is None or outside.no_card:
        needed.append("--gpu=…, the name of the GPU: what a process holds outside PyTorch there")
    return tuple(needed)
