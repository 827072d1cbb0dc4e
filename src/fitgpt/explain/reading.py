"""A reading of nvidia-smi, two figures or a whole screen → where each MiB of the card is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.errors import UsageError
from ..core.units import MiB, show_bytes
from ..hardware.gpus import Card, match_device
from ..sights import Diagnosis, MemoryShare
from .about import Run
from .names import PHASES
from .screen import ScreenGpu, ScreenProcess
from .unsaid import OTHER_TRAINER

CLOSE = 0.05   # a forecast this near to a reading is of the same run, at that point
AS_WELL = 0.02  # two forecasts this near to it explain it equally well
MORE_THAN_CUDA_GIVES = 1.1  # a card has a little more than that, which nvidia-smi may count
CLEARLY = 3     # times as far off: then the reading is of the other trainer
# What a run holds for most of its time comes first.
HOLDS = {"train": "once it trains", "first_train": "in its first iteration",
         "first_eval": "in its first evaluation, before it trains",
         "load": "with its weights loaded and nothing computed yet"}


@dataclass(frozen=True)
class Reading:
    """What is read of a card. Bytes; None: not read."""

    used: int | None          # of the card, by all
    process: int | None       # of the run's process, its context included
    total: int | None = None
    processes: tuple[ScreenProcess, ...] = ()  # the others, where a screen lists them
    notes: tuple[str, ...] = ()
    forecast: bool = False    # `process` was not read: it is the config's forecast


class Outside(NamedTuple):
    """What a process holds outside PyTorch's allocator, and how that is known."""

    nbytes: int
    source: str
    unnamed: bool = False  # the card's name would tell it


def outside_on(card: Card | None, assumed: int | None = None) -> Outside | None:
    """As the card has it, or as it is taken to be; None: neither is known."""
    if card is not None and card.outside_mib:
        source = {"seen": "as seen on such a card", "formula": "by the number of its multiprocessors"}
        return Outside(card.outside_mib * MiB, source.get(card.outside_src, card.outside_src))
    return Outside(assumed, "as much as on any card of that size", unnamed=card is None) if assumed else None


def from_screen(gpu: ScreenGpu, process: int | None = None, foreseen: Sequence[int] = ()) -> Reading:
    """The run is the Python process; of several, one that holds what is foreseen, else the one that holds most."""
    def off(each: ScreenProcess) -> float:
        return min((abs((each.nbytes or 0) / nbytes - 1) for nbytes in foreseen), default=1.0)

    runs = sorted((each for each in gpu.processes if each.computes),
                  key=lambda each: (off(each) > CLOSE, off(each) if off(each) <= CLOSE else 0, -(each.nbytes or 0)))
    notes = []
    if process is None and runs:
        process = runs[0].nbytes
        if process is None:
            notes.append("The driver gives no figure for single processes here (WSL and Windows print N/A).")
        elif len(runs) > 1:
            why = "which holds what the config's forecast says" if off(runs[0]) <= CLOSE else "the largest"
            notes.append(f"{len(runs)} Python processes are on the card; {runs[0].pid}, {why}, is taken for the run. "
                         "--process=… says otherwise.")
    if gpu.part is not None:
        notes.append(f"The card is cut into parts (MIG); this is the one of GPU instance {gpu.part}.")
    others = tuple(each for each in gpu.processes if not runs or each is not runs[0])
    return Reading(gpu.used, process, gpu.total, others, tuple(notes))


def card_of(gpu: ScreenGpu) -> Card | None:
    return match_device(gpu.name, round(gpu.total / MiB) if gpu.part is None else None)


def explain_reading(reading: Reading, run: Run | None = None, card: Card | None = None,
                    trainer: str = "", assumed: int | None = None) -> Diagnosis:
    """`trainer`: the one that was said, or auto; by default the run's. `assumed`: what a process is taken to hold
    outside PyTorch's allocator where the card does not say."""
    used, process, outside = reading.used, reading.process, outside_on(card, assumed)
    if used is not None and process is not None and process > used:
        raise UsageError(f"--process {show_bytes(process)} is more than --reading {show_bytes(used)}: the card's "
                         "figure includes every process's.",
                         f"--reading={process // MiB}MiB --process={used // MiB}MiB, the other way round?")
    has = card.usable_mib * MiB if card and card.usable_mib else 0
    if card and has and (used or 0) > MORE_THAN_CUDA_GIVES * has:
        raise UsageError(f"--reading {show_bytes(used or 0)} is more than the {card.name} has: CUDA gives "
                         f"{show_bytes(has)} of it.", "Name the card it was read on: --gpu=…")
    if process is None and run is not None and outside is not None and used is not None:
        forecast = run.forecast.reserved + outside.nbytes
        if forecast <= used:
            told = "The process's own figure was not given: it is taken to be what the config's forecast says."
            if trainer == "auto":
                other = replace(run, trainer=OTHER_TRAINER[run.trainer])
                told += (f" That is {_trainer(run)}'s; {_trainer(other)} would hold "
                         f"{(other.forecast.reserved + outside.nbytes) / MiB:,.0f} MiB: --trainer={other.trainer}.")
            reading = replace(reading, process=forecast, forecast=True, notes=(
                *reading.notes, f"{told} --process=… tells it."))
            process = forecast
    elif process is not None and run is not None and outside is not None and trainer == "auto":
        run, why = _whose(process, run, outside)
        reading = replace(reading, notes=(*reading.notes, why))
    shares = tuple(_shares(reading, run, outside))
    return Diagnosis(
        subject="reading", title=_title(used, process, reading.forecast), what=_where_the_run_is(reading, run, outside),
        shares=shares, shares_of="the whole card" if reading.total is not None else "what is taken",
        needed=_needed(reading, run, outside), notes=reading.notes)


def _whose(process: int, run: Run, outside: Outside) -> tuple[Run, str]:
    """The run under the trainer whose forecast is clearly nearer to what was read, and a sentence that says why."""
    other = replace(run, trainer=OTHER_TRAINER[run.trainer])
    taken, left = (other, run) if _is_nearer(process, other, run, outside) else (run, other)
    told = f"{_trainer(taken)}'s forecast, {_beside_read(process, taken, outside)}"
    beside = f"{_trainer(left)}'s is {_beside_read(process, left, outside)}"
    clear = taken is other or _is_nearer(process, run, other, outside)
    return taken, (f"Which trainer it was is not said. {told}, {'is the nearer one' if clear else 'is taken'}; {beside}"
                   f"{'' if clear else ', not clearly nearer'}. --trainer={left.trainer} says otherwise.")


def _is_nearer(process: int, run: Run, than: Run, outside: Outside) -> bool:
    """Clearly: one that is near explains what another does not; of two that are not near, the other is far."""
    off, other = abs(_off(process, run, outside)), abs(_off(process, than, outside))
    return other > CLOSE and CLEARLY * off <= other


def _off(process: int, run: Run, outside: Outside) -> float:
    """How much more the forecast is than what was read, as a share of that."""
    return _held(process, run, outside) / process - 1 if process else 0.0


def _held(process: int, run: Run, outside: Outside) -> int:
    """What the process shows by the forecast, in the phase that comes nearest."""
    return run.forecast.phases[_likeliest(process - outside.nbytes, run)].reserved + outside.nbytes


def _beside_read(process: int, run: Run, outside: Outside) -> str:
    off = _off(process, run, outside)
    share = f"{abs(off):.{1 if abs(off) < 0.1 else 0}%}"
    than = "as was read" if share == "0.0%" else f"{share} {'less' if off < 0 else 'more'} than was read"
    return f"{_held(process, run, outside) / MiB:,.0f} MiB, {than}"


def _trainer(run: Run) -> str:
    return "nanoGPT" if run.trainer == "nanogpt" else "fitgpt"


def _title(used: int | None, process: int | None, forecast: bool) -> str:
    if used is None:
        return f"This process holds {(process or 0) / MiB:,.0f} MiB of the card."
    if process is None:
        return f"{used / MiB:,.0f} MiB of the card are taken."
    whose = "by this process, if it is as forecast" if forecast else "by this process"
    return (f"{used / MiB:,.0f} MiB of the card are taken: {process / MiB:,.0f} {whose}, "
            f"{max(used - process, 0) / MiB:,.0f} by others.")


def _shares(reading: Reading, run: Run | None, outside: Outside | None) -> Iterator[MemoryShare]:
    used, process = reading.used, reading.process
    if process is not None:
        yield from _of_the_process(process, run, outside)
    if used is not None:
        rest = used - (process or 0)
        listed = [each for each in reading.processes if each.nbytes is not None]
        if sum(each.nbytes or 0 for each in listed) > rest:  # the run is one of them, but which is not known
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


def _of_the_process(process: int, run: Run | None, outside: Outside | None) -> Iterator[MemoryShare]:
    if outside is None or process <= outside.nbytes:
        yield MemoryShare("this process", process, "PyTorch, and its context of a few hundred MiB")
        return
    reserved, kernels = process - outside.nbytes, f"context and kernels; {outside.source}"
    if run is None:
        yield MemoryShare("PyTorch, in tensors or reserved", reserved)
        yield MemoryShare("this process outside PyTorch", outside.nbytes, kernels)
        return
    phase = _fullest(_likeliest(reserved, run), run)
    peak = run.timeline.peaks()[phase]
    owners = sorted(run.timeline.owners_at(peak.event).items(), key=lambda each: -each[1])
    held = sum(nbytes for _, nbytes in owners)
    if held > reserved:  # less than the forecast: shares of a sum that is not there would mislead
        yield MemoryShare("PyTorch, in tensors or reserved", max(reserved, 0))
    else:
        formulas = {share.owner: share.formula for share in run.forecast.owners_at_peak} \
            if phase == run.forecast.peak_phase else {}
        for owner, nbytes in owners:
            yield MemoryShare(owner, nbytes, formulas.get(owner, ""))
        foreseen = min(reserved, max(run.forecast.phases[_likeliest(reserved, run)].reserved, held))
        if reserved - foreseen <= CLOSE * foreseen:
            foreseen = reserved
        yield MemoryShare("reserved by PyTorch, in no tensor then", foreseen - held)
        if reserved > foreseen:
            yield MemoryShare("more than the forecast", reserved - foreseen, "whose it is, this config does not say")
    yield MemoryShare("this process outside PyTorch", outside.nbytes, kernels)


def _where_the_run_is(reading: Reading, run: Run | None, outside: Outside | None) -> str:
    """The forecast beside the reading, and what phase it agrees with."""
    if run is None or outside is None or reading.process is None:
        return ""
    reserved = reading.process - outside.nbytes
    phase = _likeliest(reserved, run)
    forecast = run.forecast.phases[phase].reserved
    off = (reserved - forecast) / forecast
    whose = "nanoGPT's train.py" if run.trainer == "nanogpt" else "fitgpt"
    told = f"{forecast / MiB:,.0f} MiB reserved and {outside.nbytes / MiB:,.0f} outside"
    if reading.forecast:
        return (f"By its forecast this config under {whose} holds {reading.process / MiB:,.0f} MiB, {told}. The owners "
                f"below are those of its highest point {_there(phase, run)}.")
    if abs(off) <= CLOSE:
        return (f"That is this config under {whose} {HOLDS.get(phase, PHASES[phase])}: forecast "
                f"{(forecast + outside.nbytes) / MiB:,.0f} MiB, {told}; read {reading.process / MiB:,.0f}, "
                f"{round(off, 3) + 0.0:+.1%}.{_or_else(phase, reserved, run)} The owners below are those of its "
                f"highest point {_there(phase, run)}.")
    return (f"By its forecast this config under {whose} holds {told}: {_beside_read(reading.process, run, outside)}. "
            "The run is another config or trainer, or stands at a point between two phases.")


def _likeliest(reserved: int, run: Run) -> str:
    """The phase with nearly that much reserved; of several, the one in which a run stays longest."""
    return min(_candidates(run), key=lambda phase: _distance(phase, reserved, run))


def _candidates(run: Run) -> list[str]:
    phases = run.forecast.phases
    later = [phase for phase, held in phases.items() if phase not in HOLDS and held.reserved == run.forecast.reserved]
    return [*(phase for phase in HOLDS if phase in phases), *later]


def _distance(phase: str, reserved: int, run: Run) -> float:
    off = abs(reserved / run.forecast.phases[phase].reserved - 1)
    return off if off > AS_WELL else 0.0


def _or_else(likeliest: str, reserved: int, run: Run) -> str:
    """The other phases that such a reading may come from."""
    others = [HOLDS[phase] for phase in _candidates(run) if phase in HOLDS and phase != likeliest
              and _distance(phase, reserved, run) <= CLOSE]
    return f" It would show about as much {' and '.join(others)}." if others else ""


def _fullest(phase: str, run: Run) -> str:
    """Where the memory that is reserved in a phase was filled most: there, or before it with no more reserved."""
    peaks, order = run.timeline.peaks(), list(run.timeline.peaks())
    before = [each for each in order[:order.index(phase) + 1] if peaks[each].reserved == peaks[phase].reserved]
    return max(before, key=lambda each: peaks[each].allocated)


def _there(phase: str, run: Run) -> str:
    fullest = _fullest(phase, run)
    return "there" if fullest == phase else f"{PHASES[fullest]}, for which it was reserved, and stays so"


def _needed(reading: Reading, run: Run | None, outside: Outside | None) -> tuple[str, ...]:
    wanted = []
    if reading.process is None:
        wanted.append("--process=…: the figure beside the run's own process, in nvidia-smi's lower table")
    if run is None:
        wanted.append("the run's config, fitgpt explain … config.py: whose the process's MiB are")
    if outside is None or outside.unnamed:
        wanted.append("--gpu=…, the card's name: what a process holds outside PyTorch there")
    return tuple(wanted)
