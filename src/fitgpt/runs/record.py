"""A run folder → RunRecord, the whole run, for `fitgpt report`; or RunState, its present state, for `fitgpt watch`.

The run may still be writing, or the folder may be a copy from another machine. Nothing in it is changed.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..config.fields import option_specs
from ..config.run_config import RunConfig
from ..core.errors import CheckpointError, UsageError
from ..core.files import disk_faults
from ..core.phases import PhaseMemory
from ..core.units import MiB, show_bytes
from ..memory.timeline import OwnerTimeline
from .folder import recorded_config, step_folders
from .lock import LockOwner
from .metrics import (
    MAX_LINE,
    Evaluation,
    MemoryReading,
    Row,
    RunFacts,
    StepReport,
    count,
    evaluation_from,
    facts_from,
    iterate_lines,
    last_row,
    measured_peaks,
    memory_from,
    owners_from,
    parse_line,
    phases_from,
    read_metrics,
    read_with_errors,
    reading_stride,
    rows_by_step,
    step_from,
    text,
    texts,
    whole,
)

SPIKE_BYTES, SPIKE_SHARE = 64 * MiB, 0.03  # a spike rises by at least both: bytes, and share of the memory before
MAX_SPIKES = 8
MAX_POINTS = 1024                          # of a curve
RUN_FILES = ("metrics.jsonl", "lock", "run.json")
_NOT_EVENTS = {"run", "step", "eval", "save", "plan", "plan_measured", "sample"}


# ---- finding runs

def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def runs_near(folder: Path) -> list[Path]:
    """Run folders at, directly below, and in runs/ below a folder; the one written to last first."""
    found: dict[Path, float] = {}
    for candidate in (folder, *_folders_in(folder), *_folders_in(folder / "runs")):
        with suppress(OSError):  # removed meanwhile, or not readable
            if is_run(candidate):
                files = [candidate / name for name in RUN_FILES]
                found[candidate] = max(file.stat().st_mtime for file in files if file.exists())
    return sorted(found, key=lambda candidate: -found[candidate])


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


# ---- the whole run, for `fitgpt report`

@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run, as a sentence."""

    step: int
    kind: str   # "resumed", "skipped", "warning", "note", or the kind of its row in metrics.jsonl
    text: str


@dataclass(frozen=True)
class RunSample:
    """Text that the model generated at a step."""

    step: int
    text: str


@dataclass(frozen=True)
class RunRecord:
    """A run, finished or not. What its folder does not contain is absent, NaN or empty."""

    name: str
    facts: RunFacts | None
    config: dict[str, Any]
    unusual: tuple[str, ...]                   # options that differ from their defaults
    steps: tuple[StepReport, ...]
    evaluations: tuple[Evaluation, ...]
    saves: tuple[int, ...]                     # the steps at which a checkpoint was written
    events: tuple[RunEvent, ...]
    samples: tuple[RunSample, ...]
    planned: dict[str, PhaseMemory]            # by phase; empty: no plan was made
    measured: dict[str, PhaseMemory]
    owners_at_peak: dict[str, int]             # of the plan
    reserve_limit: int | None                  # the most that the allocator may reserve
    unreadable: tuple[str, ...]                # what of the folder could not be read, each a sentence
    timeline: OwnerTimeline | None = None      # one step of the planned tape; commands.report adds it


def read_run(folder: str, name: str = "") -> RunRecord:
    """A run folder → its record, however little it contains; UsageError where it contains no run."""
    path = Path(folder)
    metrics = path / "metrics.jsonl"
    with disk_faults("read", path):
        if not path.is_dir():
            inside = path.is_file() and (path.parent / "metrics.jsonl").exists()
            what = "is a file" if path.exists() else "does not exist"
            raise UsageError(f"{folder} {what}: `fitgpt report` reads a run's folder.",
                             f"fitgpt report {path.parent if inside else 'OUT_DIR'}")
        if not any((path / part).exists() for part in ("metrics.jsonl", "run.json", "checkpoints")):
            near = runs_near(path)
            raise UsageError(f"{folder} contains no run: neither metrics.jsonl nor run.json is in it.",
                             f"fitgpt report {near[0]}" if near else "Name the folder that was a run's --out_dir.")
    with disk_faults("read", metrics):
        rows, broken = read_with_errors(metrics) if metrics.is_file() else ([], [])
        rows += read_metrics(path / "samples.jsonl")
        unreadable = [*_unreadable(metrics, broken)]
    try:
        config = recorded_config(path)
    except CheckpointError as error:
        unreadable.append(error.what)
        config = None
    return record_of(name or path.resolve().name, rows, config, unreadable)


def _unreadable(metrics: Path, broken: Sequence[int]) -> Iterable[str]:
    if not metrics.is_file():
        yield f"{metrics.name} is missing: the run has recorded nothing."
        return
    size = metrics.stat().st_size
    if (stride := reading_stride(size)) > 1:
        yield f"{metrics.name} has {show_bytes(size)}: every {stride}th step was read, and all of the last ones."
    if broken:
        lines = f"Line {broken[0]:,} of {metrics.name} is" if len(broken) == 1 else (
            f"{len(broken):,} lines of {metrics.name} are")
        yield f"{lines} broken or half-written, and skipped."


def record_of(name: str, rows: Sequence[Row], config: dict[str, Any] | None,
              unreadable: Sequence[str] = ()) -> RunRecord:
    """`config`: from run.json; where there is none, the one in the rows."""
    facts = facts_from(start) if (start := last_row(rows, "run")) else None
    config = config or (facts.config if facts else {})
    steps = tuple(step_from(row) for row in rows_by_step(rows, "step"))
    plan = last_row(rows, "plan")
    defaults = {option.name: option.default for option in option_specs(RunConfig).values()}
    return RunRecord(
        name=name, facts=facts, config=config,
        unusual=tuple(key for key, value in config.items() if key not in defaults or defaults[key] != value),
        steps=steps, evaluations=tuple(evaluation_from(row) for row in rows_by_step(rows, "eval")),
        saves=tuple(count(row["step"]) for row in rows_by_step(rows, "save")),
        events=tuple(_events(rows, steps)),
        samples=tuple(RunSample(count(row.get("step")), row["text"]) for row in rows
                      if row.get("kind") == "sample" and isinstance(row.get("text"), str)),
        planned=phases_from(plan), measured=phases_from(last_row(rows, "plan_measured")) or measured_peaks(rows),
        owners_at_peak={owner: nbytes for owner, nbytes, _ in owners_from(plan)},
        reserve_limit=whole(plan.get("reserve_limit_bytes")) or None, unreadable=tuple(unreadable))


def _events(rows: Sequence[Row], steps: Sequence[StepReport]) -> list[RunEvent]:
    """Resumes, notes, warnings, skipped steps and rows of any other kind, by step."""
    found: list[RunEvent] = list(_skips(steps))
    step, started, noted = 0, False, set()
    for row in rows:
        kind = text(row.get("kind")) or "unknown"
        step = count(row.get("step"), count(row.get("start_step"), step))
        if kind == "run":
            if started or step > 0:
                found.append(RunEvent(step, "resumed", f"Training resumed from step {step:,}."))
            notes = [note for note in texts(row.get("notes")) if note not in noted]
            found += [RunEvent(step, "note", note) for note in notes]
            noted.update(notes)
            started = True
        elif kind not in _NOT_EVENTS:
            found.append(RunEvent(step, kind, text(row.get("text")) or _describe(row)))
    return sorted(found, key=lambda event: event.step)


def _skips(steps: Sequence[StepReport]) -> Iterable[RunEvent]:
    before = 0
    for each in steps:
        if each.skipped > before:
            skipped = each.skipped - before
            scale = f"; the loss scale is now {each.loss_scale:g}" if each.loss_scale != 1.0 else ""
            were = "step was" if skipped == 1 else "steps were"
            yield RunEvent(each.step, "skipped", f"{skipped:,} {were} skipped: not all gradients were finite{scale}.")
        before = each.skipped


def _describe(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("kind", "step")) or "no details"


# ---- the present state, for `fitgpt watch`

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
    losses: tuple[float, ...] = ()


def has_ended(run: RunState | None) -> bool:
    return run is not None and run.status in ("finished", "stopped")


def is_spike(before: int, after: int) -> bool:
    return after - before >= max(SPIKE_BYTES, SPIKE_SHARE * before)


class FollowedRun:
    """A run folder that is read as it grows: each line of its metrics once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = RunProgress()
        self._file: tuple[int, int] | None = None  # device and inode of the file that was read
        self._position = 0

    def state(self, owner: LockOwner | None, now: float) -> RunState:
        written = self._read_new_rows()
        return run_state(self.folder, self.progress, owner, written, now)

    def _read_new_rows(self) -> float | None:
        """Reads up to the last complete line. → when the file was written last."""
        written = None
        with suppress(FileNotFoundError), open(self.folder / "metrics.jsonl", "rb") as file:
            stat = os.fstat(file.fileno())
            if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._position:  # replaced, or truncated
                self._file, self._position, self.progress = (stat.st_dev, stat.st_ino), 0, RunProgress()
            file.seek(self._position)
            for line, wanted in iterate_lines(file, stat.st_size):
                if not line.endswith(b"\n") and len(line) < MAX_LINE:
                    break
                self._position += len(line)
                if wanted and (row := parse_line(line)) is not None:
                    self.progress.add(row)
            written = stat.st_mtime
        return written


class ReservedAtStep(NamedTuple):
    """The most that a run had reserved around a step."""

    step: int
    phase: str
    nbytes: int


class BoundedCurve:
    """Evenly spaced points over all that were added, at most MAX_POINTS; neighbours are merged."""

    def __init__(self, merge: Callable[[Any, Any], Any]) -> None:
        self.points: list[Any] = []
        self._merge, self._every, self._added = merge, 1, 0

    def add(self, point: Any) -> None:
        if self._added % self._every == 0:
            self.points.append(point)
        else:
            self.points[-1] = self._merge(self.points[-1], point)
        self._added += 1
        if len(self.points) == MAX_POINTS:
            self.points = [self._merge(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._every *= 2

    def keep(self, condition: Callable[[Any], bool]) -> None:
        self.points = [point for point in self.points if condition(point)]
        self._added = len(self.points) * self._every


class RunProgress:
    """What the rows of a run's metrics amount to so far, in bounded memory."""

    def __init__(self) -> None:
        self.facts: RunFacts | None = None
        self.step: StepReport | None = None
        self.evaluation: Evaluation | None = None
        self.last_kind = ""
        self.saves_next = False  # a checkpoint follows the last evaluation
        self.warning = ""
        self.planned: int | None = None
        self.reserve_limit: int | None = None
        self.spikes: list[Spike] = []
        self._start = 0  # the step of the last start, resume or rollback
        self._saved = 0  # the step of the last checkpoint
        self._losses = BoundedCurve(lambda first, second: first)
        self._reserved = BoundedCurve(lambda first, second: max(first, second, key=lambda each: each.nbytes))
        self._last_reserved: ReservedAtStep | None = None

    def add(self, row: Row) -> None:
        kind, step = row.get("kind"), whole(row.get("step"))
        if kind == "run":
            self.facts = facts_from(row)
        if kind == "run" or whole(row.get("start_step")) is not None:
            self._restart(count(row.get("start_step")))
        elif kind == "step" and step is not None:
            self.step = step_from(row)
            self._losses.add((step, self.step.loss))
            self._add_memory(row, step + 1, "train")
        elif kind == "eval" and step is not None:
            self.evaluation = evaluation_from(row)
            self.saves_next = row.get("best") is True or self.config("always_save_checkpoint") is True
            self._add_memory(row, step, "eval")
        elif kind == "save" and step is not None:
            self._saved = step
        elif kind == "plan":  # a resume makes a new plan
            self.planned = max((peak.reserved for peak in phases_from(row).values()), default=0) or None
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
    def losses(self) -> tuple[float, ...]:
        return tuple(loss for _, loss in self._losses.points)

    @property
    def highest_reserved(self) -> int | None:
        return max((each.nbytes for each in self._reserved.points), default=None)

    def memory_history(self) -> MemoryHistory:
        """What the run had reserved, since its start."""
        points: list[ReservedAtStep] = self._reserved.points
        marks = tuple((index, points[index].phase) for index in range(1, len(points))
                      if is_spike(points[index - 1].nbytes, points[index].nbytes))
        return MemoryHistory(tuple(each.nbytes for each in points), marks)

    def _restart(self, start: int) -> None:
        """Drops what the run did beyond the step from which it resumes."""
        self._start, self._saved, self.last_kind = start, min(self._saved, start), "run"
        self._losses.keep(lambda point: point[0] < start)
        self._reserved.keep(lambda each: each.step <= start)
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
        self._reserved.add(reserved)
        self._last_reserved = reserved


def run_state(folder: Path, progress: RunProgress, owner: LockOwner | None, written: float | None,
              now: float) -> RunState:
    """`written`: when the metrics were written last."""
    status, step, evaluation = status_of(progress, owner, written), progress.step, progress.evaluation
    silent = None if written is None else max(now - written, 0.0)
    continues = status in ("starting", "running", "elsewhere")
    left = _finite(step.seconds_left) if step else None
    memories = (_counted(report.memory) for report in (step, evaluation) if report)
    return RunState(
        folder=str(folder), status=status, whereabouts=str(owner or ""), silent_s=silent,
        device_name=(progress.facts.device_name or None) if progress.facts else None,
        phase=None if not continues else "load" if status == "starting" else current_phase(progress, silent or 0.0),
        step=progress.steps_done, max_iters=progress.max_iters, loss=step.loss if step else None,
        val_loss=next((each.mean for each in evaluation.losses if each.split == "val"), None) if evaluation else None,
        tokens_per_s=_finite(step.tokens_per_s) if step else None, mfu=step.mfu if step else None,
        seconds_left=max(left - (silent or 0.0), 0.0) if continues and left is not None else None,
        memory=next((memory for memory in memories if memory is not None), None), planned_bytes=progress.planned,
        headroom_bytes=None, spikes=tuple(progress.spikes), warning=progress.warning, losses=progress.losses,
        hint=resume_hint(folder) if status == "stopped" else "")


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


def resume_hint(folder: Path) -> str:
    if not step_folders(folder / "checkpoints"):
        return "It left no checkpoint."
    return f"To resume it: {shlex.join(['fitgpt', 'train', '--resume', f'--out_dir={folder}'])}"


def _counted(memory: MemoryReading) -> MemoryReading | None:
    """None where the device counts no memory: rows of a run on the CPU contain zeros."""
    return memory if memory != MemoryReading() else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
