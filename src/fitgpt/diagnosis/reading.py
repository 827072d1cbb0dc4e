"""A reading of GPU memory, two figures or the output of nvidia-smi → Diagnosis: who holds each MiB of the GPU, and
which changes would reduce it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.errors import DeviceError, UsageError
from ..core.units import GiB, MiB, show_bytes
from ..hardware.gpus import GpuModel, find, match_device
from ..hardware.nvidia import survey
from ..planning import budget
from ..planning.forecast import nearest_recorded_run
from ..runs.metrics import PHASES
from .case import SCRIPTS, TRAINERS, ExplainedRun, ExplainRequest, describe_rank_contexts, rank_contexts
from .diagnose import Cause, Diagnosis, MemoryShare, Remedy, savings
from .nvidia_smi import SmiGpu, SmiProcess
from .rules import RANKS_ADVICE, SMALLER_BATCH, SPILL_ADVICE

CLOSE = 0.05         # a forecast this near to a reading is of the same run, in that phase
EQUALLY_CLOSE = 0.02 # two forecasts this near to a reading explain it equally well
MAX_ABOVE_USABLE = 1.1  # nvidia-smi counts a little more memory than CUDA can use
CLEARLY_CLOSER = 3   # times as close: then the reading is of that trainer
MIN_SPILLED = GiB    # of shared GPU memory; a few hundred MiB are in use at all times
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
    shared: int | None = None # CPU RAM that the GPU uses, on Windows
    contexts: tuple[tuple[int, int], ...] = ()  # (pid, bytes) of other ranks


class OutsideMemory(NamedTuple):
    """What a process holds outside PyTorch's allocator, and how that is known."""

    nbytes: int
    source: str


# ---- from the user's input


def explain_figures(used: int | None, request: ExplainRequest) -> Diagnosis:
    """The used memory of a GPU, that of the run's process and that of others: two of them give the third."""
    process, others = request.process, request.others
    if others is not None and process is None and used is not None:
        process = max(used - others, 0)
    elif others is not None and used is None and process is not None:
        used = process + others
    if request.gpu:
        card: GpuModel | None = find(request.gpu)
    else:
        try:
            card = next((match_device(gpu.name, round((gpu.total_bytes or 0) / MiB)) for gpu in survey().gpus), None)
        except DeviceError:
            card = None
    return explain_reading(Reading(used, process), request.run_on(card), card, request.trainer)


def explain_nvidia_smi(listed: Sequence[SmiGpu], request: ExplainRequest) -> Diagnosis:
    """The GPU that runs a Python process, or else the fullest."""
    gpu = max(listed, key=lambda each: (any(process.computes for process in each.processes), each.used or 0))
    card = find(request.gpu) if request.gpu else card_of(gpu)
    run, outside, forecasts = request.run_on(card), outside_on(card), []
    if run is not None and outside is not None:
        runs = (run, run.with_other_trainer()) if request.trainer == "auto" else (run,)
        forecasts = [each.forecast.reserved + outside.nbytes for each in runs]
    process = request.process
    if process is None and request.others is not None and gpu.used is not None:
        process = max(gpu.used - request.others, 0)
    return explain_reading(reading_of(gpu, process, forecasts), run, card, request.trainer)


def card_of(gpu: SmiGpu) -> GpuModel | None:
    return match_device(gpu.name, round(gpu.total / MiB) if gpu.total and gpu.gpu_instance is None else None)


def outside_on(card: GpuModel | None) -> OutsideMemory | None:
    """The figure of the GPU; None if it has none."""
    if card is None or not card.outside_mib:
        return None
    source = {"seen": "as measured on such a GPU", "formula": "by the number of its multiprocessors"}
    return OutsideMemory(card.outside_mib * MiB, source.get(card.outside_src, card.outside_src))


def reading_of(gpu: SmiGpu, process: int | None = None, forecasts: Sequence[int] = ()) -> Reading:
    """The run is the Python process; of several, one whose memory is close to a forecast, or else the largest."""
    def error(each: SmiProcess) -> float:
        return min((abs((each.nbytes or 0) / nbytes - 1) for nbytes in forecasts), default=1.0)

    close = [each for each in gpu.runs if error(each) <= CLOSE]
    run = min(close, key=error) if close else max(gpu.runs, key=lambda each: each.nbytes or 0, default=None)
    notes = []
    if process is None and run is not None:
        process = run.nbytes
        if process is None:
            notes.append("The driver reports no memory per process here (WSL and Windows print N/A).")
        elif len(gpu.runs) > 1:
            why = "whose memory is close to the config's forecast" if close else "the largest"
            python = "Python " if run.computes else ""
            notes.append(f"{len(gpu.runs)} {python}processes use the GPU; {run.pid}, {why}, is taken for the run. "
                         "--process=… selects another.")
    if gpu.gpu_instance is not None:
        notes.append(f"The GPU is split into MIG devices; this is GPU instance {gpu.gpu_instance}.")
    used = gpu.used
    if used is not None and process is not None and process > used and run is not None:
        used = None
        notes.append("The GPU's figure is left out: it is smaller than that of a process.")
    contexts = rank_contexts([(each.pid, each.nbytes or 0) for each in gpu.runs if each is not run])
    return Reading(used, process, gpu.total, tuple(each for each in gpu.processes if each is not run), tuple(notes),
                   shared=gpu.shared, contexts=tuple(contexts))


# ---- the run's forecast beside the reading


class RunComparison(NamedTuple):
    """The memory read for a process, beside the forecast of a run in the phase that explains it best."""

    run: ExplainedRun
    process: int
    outside: int
    phase: str
    other_phases: tuple[str, ...]  # further phases that explain the reading

    @property
    def forecast_reserved(self) -> int:
        return self.run.forecast.phases[self.phase].reserved

    @property
    def error(self) -> float:
        """How much larger the forecast is than the reading, as a share of the reading."""
        return (self.forecast_reserved + self.outside) / self.process - 1 if self.process else 0.0

    def clearly_closer_than(self, other: RunComparison) -> bool:
        return abs(other.error) > CLOSE and CLEARLY_CLOSER * abs(self.error) <= abs(other.error)

    def describe(self) -> str:
        """'4,496 MiB, 0.7% more than was read'"""
        share = f"{abs(self.error):.{1 if abs(self.error) < 0.1 else 0}%}"
        than = "as was read" if share == "0.0%" else f"{share} {'less' if self.error < 0 else 'more'} than was read"
        return f"{(self.forecast_reserved + self.outside) / MiB:,.0f} MiB, {than}"


def compare(run: ExplainedRun, process: int, outside: int) -> RunComparison:
    """The phase is one with nearly this much reserved; of several, the one in which a run stays longest."""
    phases = run.forecast.phases
    longest = [phase for phase in LONGEST_FIRST if phase in phases]
    others = [phase for phase, peak in phases.items()
              if phase not in LONGEST_FIRST and peak.reserved == run.forecast.reserved]
    errors = {phase: abs((process - outside) / phases[phase].reserved - 1) for phase in (*longest, *others)}
    best = min(errors, key=lambda phase: errors[phase] if errors[phase] > EQUALLY_CLOSE else 0.0)
    return RunComparison(run, process, outside, best,
                         tuple(phase for phase in longest if phase != best and errors[phase] <= CLOSE))


# ---- the diagnosis


def explain_reading(reading: Reading, run: ExplainedRun | None = None, card: GpuModel | None = None,
                    trainer: str = "") -> Diagnosis:
    """`trainer`: as given, may be auto; by default the run's."""
    _check_figures(reading, card)
    outside, notes = outside_on(card), list(reading.notes)
    assumptions: tuple[str, ...] = ()
    if run is not None and outside is None:  # the run is taken to be on the GPU that `plan --budget` assumes
        assumed = budget.unnamed(others=None, budget=reading.total or reading.used or reading.process or 0)
        run = replace(run, platform=assumed.platform)
        outside = OutsideMemory(assumed.budget.outside, "as on any GPU of that size")
        assumptions = assumed.budget.sources if card is None else (
            f"{card.name}: what a process holds outside PyTorch's allocator has not been measured there. "
            f"{show_bytes(outside.nbytes)} are assumed, as on any NVIDIA GPU of that size.",)

    comparison = None
    if run is not None and outside is not None:
        if reading.process is None and reading.used is not None:
            run, reading, note = _forecast_process(reading, run, outside.nbytes, both=trainer == "auto")
            notes.append(note)
        elif reading.process is not None and trainer == "auto":
            chosen, left = (compare(each, reading.process, outside.nbytes) for each in (run, run.with_other_trainer()))
            if left.clearly_closer_than(chosen):
                chosen, left = left, chosen
            clear, run = chosen.clearly_closer_than(left), chosen.run
            notes.append(
                f"The trainer was not given. {TRAINERS[run.trainer]}'s forecast, {chosen.describe()}, is "
                f"{'the closer one' if clear else 'taken'}; {TRAINERS[left.run.trainer]}'s is {left.describe()}"
                f"{'' if clear else ', not clearly closer'}. --trainer={left.run.trainer} selects it.")
        if reading.process is not None:
            comparison = compare(run, reading.process, outside.nbytes)
        if nearest := nearest_recorded_run(run.resolved, run.forecast, card.name if card else ""):
            notes.append(f"Nearest recorded run: {nearest.describe()}.")

    causes, advice = [], list[tuple[str, str]]()
    if reading.contexts:
        causes.append(Cause("OOM-RANKS", describe_rank_contexts(reading.contexts)))
        advice += RANKS_ADVICE
    if reading.shared is not None and reading.shared >= MIN_SPILLED:
        causes.append(Cause("OOM-SPILL", f"The GPU uses {show_bytes(reading.shared)} of CPU RAM as shared GPU memory: "
                            "the Windows driver (in WSL too) moved there what the GPU has no room for. Over the bus, "
                            "steps are many times slower."))
        advice += SPILL_ADVICE
    remedies = [Remedy(*each) for each in advice]
    remedies += savings(run) if run is not None else [Remedy(*each) for each in SMALLER_BATCH]

    needed = []
    if reading.process is None:
        needed.append("--process=…: the memory of the run's own process, in nvidia-smi's lower table")
    if run is None:
        needed.append("the run's config, fitgpt explain … config.py: what the process's memory is used for")
    if card is None:
        needed.append("--gpu=…, the name of the GPU: what a process holds outside PyTorch there")
    return Diagnosis(
        subject="reading", title=_title(reading), what=_what(reading, comparison) if comparison else "",
        shares=tuple(_shares(reading, comparison, outside)),
        shares_of="the whole GPU" if reading.total is not None else "the used memory",
        causes=tuple(causes), remedies=tuple(remedies), needed=tuple(needed), notes=(*notes, *assumptions))


def _forecast_process(reading: Reading, run: ExplainedRun, outside: int, *,
                      both: bool) -> tuple[ExplainedRun, Reading, str]:
    """The run whose forecast is taken for the memory of its process, the reading with it, and a note. `both`: of the
    trainers whose forecast is within the used memory, the one that leaves least to other processes."""
    used = reading.used or 0
    runs = [run, run.with_other_trainer()] if both else [run]
    held = {each.trainer: each.forecast.reserved + outside for each in runs}
    possible = [each for each in runs if held[each.trainer] <= used]

    def left(each: ExplainedRun) -> str:
        return (f"{TRAINERS[each.trainer]} would hold {held[each.trainer] / MiB:,.0f} MiB and leave "
                f"{(used - held[each.trainer]) / MiB:,.0f} to others")

    if not possible:
        more = f"By its forecast {TRAINERS[run.trainer]} holds {held[run.trainer] / MiB:,.0f} MiB, more than is used: "
        return run, reading, f"{more}the run has another config or trainer, or was read before its peak."
    chosen = max(possible, key=lambda each: held[each.trainer])
    others = "".join(f" {left(each)}: --trainer={each.trainer}." for each in possible if each is not chosen)
    note = (f"The memory of the process was not given: the config's forecast is taken. {left(chosen)}.{others} "
            "--process=… gives it.")
    return chosen, replace(reading, process=held[chosen.trainer], forecast=True), note


def _check_figures(reading: Reading, card: GpuModel | None) -> None:
    used, process = reading.used, reading.process
    if used is not None and process is not None and process > used:
        raise UsageError(f"--process {show_bytes(process)} is more than --reading {show_bytes(used)}: the GPU's figure "
                         "includes every process.",
                         f"--reading={process // MiB}MiB --process={used // MiB}MiB, the other way round?")
    if card and card.usable_mib and (used or 0) > MAX_ABOVE_USABLE * card.usable_mib * MiB:
        raise UsageError(f"--reading {show_bytes(used or 0)} is more than the {card.name} has: CUDA can use "
                         f"{show_bytes(card.usable_mib * MiB)} of it.", "Name the GPU on which it was read: --gpu=…")


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
    phase, peak_phase, reserved = comparison.phase, _peak_phase(comparison), comparison.forecast_reserved
    error = (comparison.process - comparison.outside - reserved) / reserved
    config = f"this config under {SCRIPTS[comparison.run.trainer]}"
    forecast = f"{reserved / MiB:,.0f} MiB reserved and {comparison.outside / MiB:,.0f} outside PyTorch"
    peak = "that phase" if peak_phase == phase else (
        f"the {PHASES[peak_phase]} phase, for which the memory was reserved")
    owners = f"The owners below are those at the peak of {peak}."
    if reading.forecast:
        return (f"By its forecast {config} holds {comparison.process / MiB:,.0f} MiB, {forecast}, in the "
                f"{PHASES[phase]} phase. {owners}")
    if abs(error) > CLOSE:
        return (f"By its forecast {config} holds {forecast}: {comparison.describe()}. The run has another config or "
                "trainer, or was read between two phases.")
    others = " and the ".join(PHASES[each] for each in comparison.other_phases)
    also = f" It would be about the same in the {others} phase." if others else ""
    return (f"The reading matches {config} in the {PHASES[phase]} phase: forecast "
            f"{(reserved + comparison.outside) / MiB:,.0f} MiB, {forecast}; read {comparison.process / MiB:,.0f}, "
            f"{round(error, 3) + 0.0:+.1%}.{also} {owners}")


def _peak_phase(comparison: RunComparison) -> str:
    """The phase with the most allocated in the memory that is reserved in this one: this one, or one before it."""
    peaks = comparison.run.timeline.peaks()
    before = [phase for phase in list(peaks)[:list(peaks).index(comparison.phase) + 1]
              if peaks[phase].reserved == peaks[comparison.phase].reserved]
    return max(before, key=lambda phase: peaks[phase].allocated)


def _shares(reading: Reading, comparison: RunComparison | None, outside: OutsideMemory | None) -> Iterator[MemoryShare]:
    used, process = reading.used, reading.process
    if process is not None and (outside is None or process <= outside.nbytes):
        yield MemoryShare("this process", process, "PyTorch, and its context of a few hundred MiB")
    elif process is not None and outside is not None:
        yield from _reserved_shares(process - outside.nbytes, comparison)
        yield MemoryShare("this process outside PyTorch", outside.nbytes, f"context and kernels; {outside.source}")
    if used is None:
        return
    left = used - (process or 0)
    listed = [(each, each.nbytes) for each in reading.processes if each.nbytes is not None]
    if sum(nbytes for _, nbytes in listed) > left:  # the run is one of them, but which one is not known
        listed = []
    for each, nbytes in listed:
        unnamed = "a process" if process is None else "another process"
        yield MemoryShare(f"process {each.pid}" if each.pid else unnamed, nbytes, each.name)
        left -= nbytes
    if left > 0:
        what = "other processes" if process is not None else "all processes"
        yield MemoryShare("in no listed process" if listed else what, left,
                          "the driver, the display" if listed else "desktop, browser, other runs")
    if reading.total is not None and reading.total >= used:
        yield MemoryShare("free", reading.total - used)


def _reserved_shares(reserved: int, comparison: RunComparison | None) -> Iterator[MemoryShare]:
    """What PyTorch has reserved: the owners at the peak for which it was reserved, the largest first, and the rest."""
    owners: dict[str, int] = {}
    if comparison is not None:
        run, phase = comparison.run, _peak_phase(comparison)
        owners = run.timeline.owners_at(run.timeline.peaks()[phase].event)
    allocated = sum(owners.values())
    if comparison is None or allocated > reserved:  # less than the forecast: its owners would not add up
        yield MemoryShare("reserved by PyTorch", reserved)
        return
    formulas = {share.owner: share.formula for share in run.forecast.owners_at_peak} \
        if phase == run.forecast.peak_phase else {}
    for owner, nbytes in sorted(owners.items(), key=lambda each: -each[1]):
        yield MemoryShare(owner, nbytes, formulas.get(owner, ""))
    forecast = min(reserved, max(comparison.forecast_reserved, allocated))
    if reserved - forecast <= CLOSE * forecast:
        forecast = reserved
    yield MemoryShare("reserved by PyTorch but unallocated at the peak", forecast - allocated)
    if reserved > forecast:
        yield MemoryShare("more than the forecast", reserved - forecast, "not explained by this config")
