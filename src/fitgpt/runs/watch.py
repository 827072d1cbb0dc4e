"""Watcher: reads a run's folder and the GPU driver again and again. → WatchFrame, what both show at one moment.

The run's part is a RunState. The run may still be writing, or its folder may be a copy from another machine.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import DeviceError, UsageError
from ..core.files import open_regular
from ..core.units import MiB
from ..hardware.nvidia import GpuProcess, GpuState, read_gpus
from .folder import LockOwner, is_run, is_running, lock_owner, runs_near, step_folders
from .metrics import (
    PHASES,
    Evaluation,
    MemoryReading,
    PhaseMemory,
    PhasePeaks,
    Row,
    RunFacts,
    StepReport,
    count,
    evaluation_from,
    facts_from,
    iterate_lines,
    memory_from,
    parse_line,
    phases_from,
    spell_nonfinite,
    step_from,
    whole,
)

SCHEMA = 1
MAX_SAMPLES = 600                          # of a GPU's memory: ten minutes at one per second
MAX_SPIKES = 8
SPIKE_BYTES, SPIKE_SHARE = 64 * MiB, 0.03  # a spike rises by at least both: bytes, and share of the memory before


@dataclass(frozen=True)
class Spike:
    """A sudden rise of memory: in which phase, by how many bytes, to how many."""

    phase: str
    step: int
    rise: int
    reached: int
    program: str = ""  # the other program that caused it; empty: the run


@dataclass(frozen=True)
class MemoryHistory:
    """Bytes over time, and (index, phase) of each spike in them."""

    values: tuple[int, ...] = ()
    marks: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, points: Sequence[tuple[int, str]]) -> MemoryHistory:
        """(bytes, phase) in the order of time."""
        marks = tuple((index, points[index][1]) for index in range(1, len(points))
                      if is_spike(points[index - 1][0], points[index][0]))
        return cls(tuple(nbytes for nbytes, _ in points), marks)


@dataclass(frozen=True)
class PhaseRow:
    """The peak of one phase since the run started, in bytes, beside its plan. None: not measured, not planned."""

    phase: str
    allocated: int | None
    reserved: int | None
    planned_allocated: int | None
    planned_reserved: int | None


@dataclass(frozen=True)
class RunState:
    """A run at one moment. None: not reported."""

    folder: str
    status: str                      # starting, running, finished, stopped, elsewhere
    whereabouts: str                 # "process 4711", "process 4711 on fast-box"
    silent_s: float | None           # since the last row of its metrics
    device_name: str | None
    phase: str | None                # None: the run has ended
    step: int                        # steps done
    max_iters: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    seconds_left: float | None
    memory: MemoryReading | None
    planned_bytes: int | None        # the highest reserved of any phase, as planned
    headroom_bytes: int | None       # what it can still allocate
    spikes: tuple[Spike, ...] = ()
    warning: str = ""                # the last one
    hint: str = ""                   # the command to type next
    losses: tuple[tuple[int, float], ...] = ()  # (step, loss) of each report
    highest_bytes: int | None = None    # the most that it has reserved since it started
    peaks: tuple[PhaseRow, ...] = ()    # in the order in which a run reaches the phases
    val_losses: tuple[tuple[int, float], ...] = ()  # (step, loss) of each evaluation
    ranks: tuple[RankState, ...] = ()   # if there are several


@dataclass(frozen=True)
class RankState:
    """One rank of a run, and its memory at the last report. None: its device counts none."""

    host: str
    pid: int
    device: str
    device_name: str
    memory: MemoryReading | None


def has_ended(run: RunState | None) -> bool:
    return run is not None and run.status in ("finished", "stopped")


def is_spike(before: int, after: int) -> bool:
    return after - before >= max(SPIKE_BYTES, SPIKE_SHARE * before)


@dataclass(frozen=True)
class WatchFrame:
    """What `fitgpt watch` shows at one moment."""

    at: float                        # seconds since 1970
    cards: tuple[GpuState, ...]
    no_card: str                     # why there is none
    run: RunState | None
    history: MemoryHistory           # of the GPU's memory since watching began, or of what the run reserved

    def to_json(self) -> dict[str, Any]:
        """For scripts, without the curves. NaN and infinity are strings, as in metrics.jsonl: JSON has neither."""
        document = {"schema": SCHEMA, **asdict(self)}
        del document["history"]
        if document["run"] is not None:
            del document["run"]["losses"], document["run"]["val_losses"]
            document["run"] = spell_nonfinite(document["run"])
        return document


class Watcher:
    """Watches one run, or the GPUs. Without a target: the newest run that is running, as soon as there is one."""

    def __init__(self, target: str) -> None:
        self._gpu = gpu_number(target)
        self._run = FollowedRun(named_run(target)) if target and self._gpu is None else None
        self._finds_run = not target
        self._samples: deque[GpuSample] = deque(maxlen=MAX_SAMPLES)

    def read(self) -> WatchFrame:
        now, state, owner = time.time(), None, None
        gpus, no_gpu = read_gpus()
        if self._finds_run and self._run is None:
            self._run = find_run(gpus, no_gpu)
        run = self._run
        if run is not None:
            owner = lock_owner(run.folder)
            state = run.state(owner, now)
            gpu, no_gpu = gpu_of_run(run.progress.facts, owner, gpus, no_gpu)
            pids = own_pids(run.progress.facts, owner) if is_running(owner) else set[int]()
            found = () if gpu is None else (gpu, *(other for other in gpus if other is not gpu and any(
                program.pid in pids for program in other.programs)))  # of the first rank, and of the others here
            gpus = tuple(replace(each, programs=tuple(replace(program, kind="run") if program.pid in pids else program
                                                      for program in each.programs)) for each in found)
        elif self._gpu is not None:
            gpus = (numbered(gpus, self._gpu, no_gpu),)

        used = gpus[0].used_bytes if gpus else None
        if used is not None:
            self._samples.append(GpuSample(used, (state and state.phase) or "", state.step if state else 0,
                                           owner.pid if owner else 0, gpus[0].programs))
        # The GPU's memory since watching began; in the first frame, what the run has reserved so far.
        history = MemoryHistory.of([(sample.used, sample.phase) for sample in self._samples])
        if run is not None and state is not None:
            if len(self._samples) < 2:
                history = run.progress.memory_history()
            state = replace(state, spikes=(*state.spikes, *spikes_of_others(self._samples))[-MAX_SPIKES:])
            # What the run can still allocate: free memory of its GPU, else what the plan leaves above its highest.
            free = gpus[0].free_bytes if gpus else None
            limit, highest = run.progress.reserve_limit, run.progress.highest_reserved
            if free is None and limit is not None and highest is not None:
                free = limit - highest
            state = replace(state, headroom_bytes=None if has_ended(state) else free)
        return WatchFrame(now, gpus, no_gpu, state, history)


# ---- which run, which GPU

def gpu_number(target: str) -> int | None:
    """'0' or 'cuda:0', unless a folder has that name."""
    found = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})", target)
    return int(found[1]) if found and not Path(target).is_dir() else None


def numbered(gpus: tuple[GpuState, ...], number: int, reason: str) -> GpuState:
    for gpu in gpus:
        if gpu.index == number:
            return gpu
    listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus) or f"none, because {reason}"
    raise DeviceError(f"GPU {number} does not exist. GPUs that the driver lists: {listed}.",
                      "fitgpt watch RUN reads a run's folder, and needs no GPU.")


def named_run(target: str, fix: str = "fitgpt watch RUN, where RUN is the --out_dir of a run; or fitgpt watch 0, for "
              "GPU 0") -> Path:
    """The folder, if it holds a run. `fix`: of the UsageError."""
    folder = Path(target)
    if is_run(folder):
        return folder
    near = ", ".join(str(found) for found in runs_near(Path())[:5])
    what = ("contains no run of fitgpt" if folder.is_dir() else "is not a folder" if folder.exists()
            else "does not exist")
    raise UsageError(f"{target} {what}." + (f" Runs near here: {near}." if near else ""), fix)


def find_run(gpus: tuple[GpuState, ...], reason: str) -> FollowedRun | None:
    """The newest run that is running; where there is no GPU to watch either, the newest of all."""
    folders = runs_near(Path())
    running = [folder for folder in folders if is_running(lock_owner(folder))]
    if not (running or gpus or folders):
        raise UsageError(f"There is nothing to watch: no run is in this folder or in runs/, and {reason}.",
                         "Name the run's folder: fitgpt watch RUN")
    found = running or ([] if gpus else folders)
    return FollowedRun(found[0]) if found else None


def own_pids(facts: RunFacts | None, owner: LockOwner | None) -> set[int]:
    """The processes of the run on this machine: that of rank 0, which has the lock, and of other ranks."""
    if owner is None or not owner.here:
        return set()
    return {owner.pid, *(rank.pid for rank in (facts.ranks if facts else ()) if rank.host == owner.host)}


def gpu_of_run(facts: RunFacts | None, owner: LockOwner | None, gpus: tuple[GpuState, ...],
               reason: str) -> tuple[GpuState | None, str]:
    """The GPU of the run: by its process, else by the name and number that it recorded; or why there is none."""
    if owner is not None and not owner.here:
        return None, f"the run is on {owner.host}, not on this machine"
    device, name = (facts.device, facts.device_name) if facts else ("", "")
    if device in ("cpu", "mps"):
        return None, f"the run trains on {'the CPU' if device == 'cpu' else 'the GPU of a Mac'}"
    if not gpus:
        return None, reason
    number = int(device[5:]) if re.fullmatch(r"cuda:[0-9]{1,4}", device) else 0
    by_process = [gpu for gpu in gpus if owner and any(one.pid == owner.pid for one in gpu.programs)]
    by_name = [gpu for gpu in gpus if name in (gpu.name, "")]
    found = by_process or sorted(by_name, key=lambda gpu: gpu.index != number)
    return (found[0], "") if found else (None, f"the run was on {name}, which is not in this machine")


# ---- spikes of other programs

@dataclass(frozen=True)
class GpuSample:
    """A GPU's memory at one moment, and the phase of the run."""

    used: int
    phase: str
    step: int
    run_pid: int
    programs: tuple[GpuProcess, ...]


def spikes_of_others(samples: Iterable[GpuSample]) -> tuple[Spike, ...]:
    """Rises of programs other than the run, as the driver lists them; the run's own are in its metrics."""
    found: list[Spike] = []
    before: dict[int, int] | None = None
    for sample in samples:
        sizes = {program.pid: program.nbytes or 0 for program in sample.programs}
        for program in sample.programs if before is not None else ():
            earlier = before.get(program.pid, 0) if before else 0
            if program.pid != sample.run_pid and is_spike(earlier, sizes[program.pid]):
                found.append(Spike(sample.phase, sample.step, sizes[program.pid] - earlier, sizes[program.pid],
                                   program.name))
        before = sizes
    return tuple(found[-MAX_SPIKES:])


# ---- a run's metrics as they grow

class FollowedRun:
    """A run folder that is read as it grows: each line of its metrics once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = RunProgress()
        self._file: tuple[int, int] | None = None  # device and inode of the file that was read
        self._position = 0

    def state(self, owner: LockOwner | None, now: float) -> RunState:
        written = self._read_new_rows()
        progress, step, evaluation = self.progress, self.progress.step, self.progress.evaluation
        status = status_of(progress, owner, written)
        silent = None if written is None else max(now - written, 0.0)
        continues = status in ("starting", "running", "elsewhere")
        left = _finite(step.seconds_left) if step else None
        memories = (_counted(report.memory) for report in (step, evaluation) if report)
        hint = ""
        if status == "stopped":
            command = shlex.join(["fitgpt", "train", "--resume", f"--out_dir={self.folder}"])
            hint = (f"To resume it: {command}" if step_folders(self.folder / "checkpoints")
                    else "It left no checkpoint.")
        return RunState(
            folder=str(self.folder), status=status, whereabouts=str(owner or ""), silent_s=silent,
            device_name=(progress.facts.device_name or None) if progress.facts else None,
            phase=(None if not continues else "load" if status == "starting"
                   else current_phase(progress, silent or 0.0)),
            step=progress.steps_done, max_iters=progress.max_iters, loss=step.loss if step else None,
            val_loss=progress.val_losses.get(evaluation.step) if evaluation else None,
            tokens_per_s=_finite(step.tokens_per_s) if step else None, mfu=step.mfu if step else None,
            seconds_left=max(left - (silent or 0.0), 0.0) if continues and left is not None else None,
            memory=next((memory for memory in memories if memory is not None), None),
            planned_bytes=progress.planned_reserved, headroom_bytes=None, highest_bytes=progress.highest_reserved,
            peaks=progress.phase_peaks(), spikes=tuple(progress.spikes), warning=progress.warning,
            losses=tuple(progress.losses.items()), val_losses=tuple(progress.val_losses.items()), hint=hint,
            ranks=rank_states(progress.facts, step))

    def _read_new_rows(self) -> float | None:
        """Reads up to the last complete line. → when the file was written last."""
        written = None
        with suppress(FileNotFoundError), open_regular(self.folder / "metrics.jsonl") as file:
            stat = os.fstat(file.fileno())
            if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._position:  # replaced, or truncated
                self._file, self._position, self.progress = (stat.st_dev, stat.st_ino), 0, RunProgress()
            file.seek(self._position)
            for line, wanted in iterate_lines(file, stat.st_size):
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                if wanted and (row := parse_line(line)) is not None:
                    self.progress.add(row)
            written = stat.st_mtime
        return written


def rank_states(facts: RunFacts | None, step: StepReport | None) -> tuple[RankState, ...]:
    memories = [_counted(memory) for memory in step.rank_memory] if step else []
    return tuple(RankState(rank.host, rank.pid, rank.device, rank.device_name, memory) for rank, memory in
                 zip_longest(facts.ranks if facts else (), memories) if rank is not None)


class ReservedAtStep(NamedTuple):
    """The most that a run had reserved around a step."""

    step: int
    phase: str
    nbytes: int


class RunProgress:
    """What the rows of a run's metrics amount to so far."""

    def __init__(self) -> None:
        self.facts: RunFacts | None = None
        self.step: StepReport | None = None
        self.evaluation: Evaluation | None = None
        self.last_kind = ""
        self.saves_next = False  # a checkpoint follows the last evaluation
        self.warning = ""
        self.planned: dict[str, PhaseMemory] = {}  # by phase
        self.reserve_limit: int | None = None
        self.spikes: list[Spike] = []
        self.losses: dict[int, float] = {}  # by step
        self.val_losses: dict[int, float] = {}
        self._start = 0  # the step of the last start, resume or rollback
        self._saved = 0  # the step of the last checkpoint
        self._peaks = PhasePeaks()
        self._reserved: list[ReservedAtStep] = []
        self._last_reserved: ReservedAtStep | None = None

    def add(self, row: Row) -> None:
        kind, step = row.get("kind"), whole(row.get("step"))
        self._peaks.add(row)
        if kind == "run":
            self.facts = facts_from(row)
        if kind == "run" or whole(row.get("start_step")) is not None:
            self._restart(count(row.get("start_step")))
        elif kind == "step" and step is not None:
            self.step = step_from(row)
            self.losses[step] = self.step.loss
            self._add_memory(row, step + 1, "train")
        elif kind == "eval" and step is not None:
            self.evaluation = evaluation_from(row)
            self.val_losses.update((step, each.mean) for each in self.evaluation.losses if each.split == "val")
            self.saves_next = row.get("best") is True or self.config("always_save_checkpoint") is True
            self._add_memory(row, step, "eval")
        elif kind == "save" and step is not None:
            self._saved = step
        elif kind == "plan":  # a resume makes a new plan
            self.planned = phases_from(row)
            self.reserve_limit = whole(row.get("reserve_limit_bytes")) or self.reserve_limit
        elif kind in ("warning", "oom", "step_down"):
            self.warning = str(row.get("text") or self.warning)
        if kind in ("run", "step", "eval", "save"):
            self.last_kind = kind

    def config(self, name: str) -> Any:
        return self.facts.config.get(name) if self.facts else None

    @property
    def max_iters(self) -> int | None:
        return self.facts.max_iters if self.facts else None

    @property
    def steps_done(self) -> int:
        return max(self._start, self._saved, self.evaluation.step if self.evaluation else 0,
                   self.step.step + 1 if self.step else 0)

    @property
    def planned_reserved(self) -> int | None:
        return max((peak.reserved for peak in self.planned.values()), default=0) or None

    @property
    def highest_reserved(self) -> int | None:
        """Since the run was started, its rehearsal included."""
        return max((peak.reserved for peak in self._peaks.of.values()), default=None)

    def phase_peaks(self) -> tuple[PhaseRow, ...]:
        """Measured and planned, by phase; empty where the device counts no memory and nothing was planned."""
        measured, planned, unknown = self._peaks.since_start(), self.planned, (None, None)
        return tuple(PhaseRow(phase, *measured.get(phase, unknown), *planned.get(phase, unknown))
                     for phase in PHASES if phase in measured or phase in planned)

    def memory_history(self) -> MemoryHistory:
        """What the run had reserved, since its start."""
        return MemoryHistory.of([(each.nbytes, each.phase) for each in self._reserved])

    def _restart(self, start: int) -> None:
        """Drops what the run did beyond the step from which it resumes."""
        self._start, self._saved, self.last_kind = start, min(self._saved, start), "run"
        self.losses = {step: loss for step, loss in self.losses.items() if step < start}
        self.val_losses = {step: loss for step, loss in self.val_losses.items() if step <= start}
        self._reserved = [each for each in self._reserved if each.step <= start]
        self.spikes = [spike for spike in self.spikes if spike.step <= start]
        self._last_reserved = None  # a new process, or one that freed everything
        if self.step and self.step.step >= start:
            self.step = None
        if self.evaluation and self.evaluation.step > start:
            self.evaluation = None

    def _add_memory(self, row: Row, step: int, phase: str) -> None:
        memory = _counted(memory_from(row))
        if memory is None:
            return
        reserved, before = ReservedAtStep(step, phase, max(memory.peak_reserved, memory.reserved)), self._last_reserved
        if before is not None and is_spike(before.nbytes, reserved.nbytes):
            spike = Spike(phase, step, reserved.nbytes - before.nbytes, reserved.nbytes)
            self.spikes = [*self.spikes, spike][-MAX_SPIKES:]
        self._reserved.append(reserved)
        self._last_reserved = reserved


def status_of(progress: RunProgress, owner: LockOwner | None, written: float | None) -> str:
    evaluated, max_iters = progress.evaluation, progress.max_iters
    all_done = (evaluated is not None if progress.config("eval_only") is True
                else max_iters is not None and progress.steps_done >= max_iters)
    if owner is not None and owner.alive:
        return "running" if written is not None and progress.facts and owner.since <= written else "starting"
    if owner is not None and owner.alive is None:  # on another machine, or on a system without such a query
        return "finished" if all_done and evaluated and evaluated.step == progress.steps_done else "elsewhere"
    return "finished" if all_done else "stopped"


def current_phase(progress: RunProgress, silent: float) -> str:
    """What follows the last row in the training loop; between two step reports, estimated from the time per step."""
    interval, done = count(progress.config("eval_interval")), progress.steps_done
    if progress.last_kind == "run":
        return "train" if done else "eval"
    if progress.last_kind == "eval":
        return "save" if progress.saves_next and done > 0 else "train"
    if progress.last_kind == "step" and interval > 0:
        seconds = progress.step.seconds if progress.step else 0.0
        by_now = done + (int(min(silent / seconds, 1e9)) if seconds > 0 else 0)
        due = -(-done // interval) * interval
        return "eval" if by_now >= (min(due, progress.max_iters) if progress.max_iters else due) else "train"
    return "train"


def _counted(memory: MemoryReading) -> MemoryReading | None:
    """None where the device counts no memory: rows of a run on the CPU contain zeros."""
    return memory if memory != MemoryReading() else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
