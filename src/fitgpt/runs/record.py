"""How a run stands, read from its folder by others than itself: what its record says, and what follows from it.

The folder may be written to meanwhile, may hold half a line, or be a copy from another machine. Nothing is changed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..core.units import MiB
from ..nouns import MemoryReading
from ..sights import RunState, Spike, Track
from .folder import step_folders
from .lock import Owner
from .metrics import LONGEST_LINE, NONFINITE, record_lines, row_of
from .rows import memory_in, phases_in, whole

SPIKE_BYTES, SPIKE_SHARE = 64 * MiB, 0.03  # a rise at once of this much, and of this share of what was there
SPIKES_KEPT = 8
CURVE_POINTS = 1024
RUN_FILES = ("metrics.jsonl", "lock", "run.json")


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def runs_here(place: Path) -> list[Path]:
    """Run folders in the usual places, the one written to last first."""
    found: dict[Path, float] = {}
    for folder in (place, *_folders_in(place), *_folders_in(place / "runs")):
        with suppress(OSError):  # gone meanwhile, or not ours to read
            if is_run(folder):
                found[folder] = max((folder / name).stat().st_mtime for name in RUN_FILES if (folder / name).exists())
    return sorted(found, key=lambda folder: -found[folder])


def _folders_in(place: Path) -> list[Path]:
    try:
        return [path for path in place.iterdir() if path.is_dir()]
    except OSError:
        return []


def is_spike(before: int, after: int) -> bool:
    return after - before >= max(SPIKE_BYTES, SPIKE_SHARE * before)


# ---- its record

class FollowedRun:
    """A run folder that is read as it grows: each line of its record once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = Record()
        self._file: tuple[int, int] | None = None  # which file that was, and how far it was read
        self._read = 0

    def look(self, owner: Owner | None, now: float) -> RunState:
        written = self._catch_up()
        return run_state(self.folder, self.record, owner, written, now)

    def _catch_up(self) -> float | None:
        """Reads what is new, up to the last whole line: when that was written."""
        written = None
        with suppress(FileNotFoundError), open(self.folder / "metrics.jsonl", "rb") as file:
            stat = os.fstat(file.fileno())
            if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._read:  # another, or cut back
                self._file, self._read, self.record = (stat.st_dev, stat.st_ino), 0, Record()
            file.seek(self._read)
            for line, wanted in record_lines(file, stat.st_size):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break
                self._read += len(line)
                if wanted and (row := row_of(line)) is not None:
                    self.record.take(row)
            written = stat.st_mtime
        return written


class Held(NamedTuple):
    """The most a run had reserved around a step."""

    step: int
    phase: str
    nbytes: int


class Curve:
    """Evenly spaced points over all that were added, at most CURVE_POINTS; what falls on one point is merged."""

    def __init__(self, merge: Callable[[Any, Any], Any]) -> None:
        self.points: list[Any] = []
        self._merge, self._every, self._added = merge, 1, 0

    def add(self, point: Any) -> None:
        if self._added % self._every == 0:
            self.points.append(point)
        else:
            self.points[-1] = self._merge(self.points[-1], point)
        self._added += 1
        if len(self.points) == CURVE_POINTS:
            self.points = [self._merge(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._every *= 2

    def keep(self, fits: Callable[[Any], bool]) -> None:
        self.points = [point for point in self.points if fits(point)]
        self._added = len(self.points) * self._every


class Record:
    """What a run has written of itself so far. Anything in it may be missing, or of another kind than expected."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.last_kind = ""
        self._start = 0  # where the run began, was resumed or went back to, whichever came last
        self.step_row: dict[str, Any] = {}
        self.eval_row: dict[str, Any] = {}
        self._saved = 0  # steps that the last checkpoint has
        self.warning = ""
        self.planned: int | None = None
        self.reserve_limit: int | None = None
        self.spikes: list[Spike] = []
        self._losses = Curve(lambda first, second: first)
        self._held = Curve(lambda first, second: max(first, second, key=lambda held: held.nbytes))
        self._last_held: Held | None = None

    def take(self, row: dict[str, Any]) -> None:
        kind, step = row.get("kind"), whole(row.get("step"))
        if kind == "run":
            self.facts = row
        if kind == "run" or whole(row.get("start_step")) is not None:
            self._begin(whole(row.get("start_step")) or 0)
        elif kind == "step" and step is not None:
            self.step_row = row
            if (loss := number(row.get("loss"))) is not None:
                self._losses.add((step, loss))
            self._hold(row, step + 1, "train")
        elif kind == "eval" and step is not None:
            self.eval_row = row
            self._hold(row, step, "eval")
        elif kind == "save" and step is not None:
            self._saved = step
        elif kind == "plan":
            self._plan(row)
        elif kind in ("warning", "oom", "step_down"):
            self.warning = str(row.get("text") or self.warning)
        if kind in ("run", "step", "eval", "save"):
            self.last_kind = kind

    def _plan(self, row: Mapping[str, Any]) -> None:
        """The highest reserved of its phases, and the allocator's cap; a resume plans anew."""
        self.planned = max((held.reserved for held in phases_in(row).values()), default=0) or None
        self.reserve_limit = whole(row.get("reserve_limit_bytes")) or self.reserve_limit

    @property
    def highest(self) -> int | None:
        return max((held.nbytes for held in self._held.points), default=None)

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(loss for _, loss in self._losses.points)

    @property
    def steps_done(self) -> int:
        reported = whole(self.step_row.get("step"))
        return max(self._start, self._saved, whole(self.eval_row.get("step")) or 0,
                   0 if reported is None else reported + 1)

    def config(self, name: str) -> Any:
        return _part(self.facts.get("config"), name)

    def track(self) -> Track:
        held: list[Held] = self._held.points
        marks = tuple((place, held[place].phase) for place in range(1, len(held))
                      if is_spike(held[place - 1].nbytes, held[place].nbytes))
        return Track(tuple(each.nbytes for each in held), marks)

    def _begin(self, start: int) -> None:
        """What was done beyond the start was undone."""
        self._start, self._saved, self.last_kind = start, min(self._saved, start), "run"
        self._losses.keep(lambda point: point[0] < start)
        self._held.keep(lambda held: held.step <= start)
        self.spikes = [spike for spike in self.spikes if spike.step <= start]
        self._last_held = None  # another process, or one that let go of all: it begins with nothing
        if (whole(self.step_row.get("step")) or 0) >= start:
            self.step_row = {}
        if (whole(self.eval_row.get("step")) or 0) > start:
            self.eval_row = {}

    def _hold(self, row: Mapping[str, Any], step: int, phase: str) -> None:
        memory = memory_of(row)
        if memory is None:
            return
        held, before = Held(step, phase, max(memory.peak_reserved, memory.reserved)), self._last_held
        if before is not None and is_spike(before.nbytes, held.nbytes):
            spike = Spike(phase, step, held.nbytes - before.nbytes, held.nbytes)
            self.spikes = [*self.spikes, spike][-SPIKES_KEPT:]
        self._held.add(held)
        self._last_held = held


# ---- what follows from it

def run_state(folder: Path, record: Record, owner: Owner | None, written: float | None, now: float) -> RunState:
    """`written`: when the record was last added to."""
    row, status = record.step_row, status_of(record, owner, written)
    silent = None if written is None else max(now - written, 0.0)
    goes_on = status in ("starting", "running", "elsewhere")
    left = number(row.get("seconds_left"))
    device_name = record.facts.get("device_name")
    return RunState(
        folder=str(folder), status=status, whereabouts=str(owner or ""), silent_s=silent,
        device_name=device_name if isinstance(device_name, str) else None,
        phase=None if not goes_on else "load" if status == "starting" else phase_now(record, silent or 0.0),
        step=record.steps_done, max_iters=whole(record.facts.get("max_iters")), loss=number(row.get("loss")),
        val_loss=validation_loss(record.eval_row), tokens_per_s=number(row.get("tokens_per_s")),
        mfu=number(row.get("mfu")),
        seconds_left=max(left - (silent or 0.0), 0.0) if goes_on and left is not None else None,
        memory=memory_of(row) or memory_of(record.eval_row), planned_bytes=record.planned, headroom_bytes=None,
        spikes=tuple(record.spikes), warning=record.warning, losses=record.losses,
        hint=resume_hint(folder) if status == "stopped" else "")


def status_of(record: Record, owner: Owner | None, written: float | None) -> str:
    last, evaluated = whole(record.facts.get("max_iters")), whole(record.eval_row.get("step"))
    only_evaluates = record.config("eval_only") is True
    all_done = evaluated is not None if only_evaluates else last is not None and record.steps_done >= last
    if owner is not None and owner.alive:
        return "running" if written is not None and record.facts and owner.since <= written else "starting"
    if owner is not None and owner.alive is None:  # on another machine, or on one that cannot be asked
        return "finished" if all_done and evaluated == record.steps_done else "elsewhere"
    return "finished" if all_done else "stopped"


def phase_now(record: Record, silent: float) -> str:
    """What comes after the last line written, by the loop's own order; between two reports, by the clock."""
    interval, last = whole(record.config("eval_interval")) or 0, whole(record.facts.get("max_iters")) or 0
    done = record.steps_done
    if record.last_kind == "run":
        return "train" if done else "eval"
    if record.last_kind == "eval":
        saves = record.eval_row.get("best") is True or record.config("always_save_checkpoint") is True
        return "save" if saves and done > 0 else "train"
    if record.last_kind == "step" and interval > 0:
        seconds = number(record.step_row.get("seconds")) or 0.0
        by_now = done + (int(min(silent / seconds, 1e9)) if seconds > 0 else 0)
        due = -(-done // interval) * interval
        return "eval" if by_now >= (min(due, last) if last else due) else "train"
    return "train"


def resume_hint(folder: Path) -> str:
    if not step_folders(folder / "checkpoints"):
        return "It left no checkpoint."
    return f"To go on with it: {shlex.join(['fitgpt', 'train', '--resume', f'--out_dir={folder}'])}"


# ---- single figures

def number(value: Any) -> float | None:
    """A figure of metrics.jsonl, where NaN and infinity are words."""
    if isinstance(value, str):
        return NONFINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def memory_of(row: Mapping[str, Any]) -> MemoryReading | None:
    """None where the device counts no memory: a CPU's rows hold zeros."""
    reading = memory_in(row)
    return reading if reading != MemoryReading() else None


def validation_loss(row: Mapping[str, Any]) -> float | None:
    losses = row.get("losses")
    told = losses if isinstance(losses, list) else []
    return next((number(_part(loss, "mean")) for loss in told if _part(loss, "split") == "val"), None)


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
