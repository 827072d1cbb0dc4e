"""The run folder: who may write in it, what run it holds, and its record of metrics.

    OUT/lock            held by the one process that trains here; says which
    OUT/run.json        the resolved config of the run
    OUT/metrics.jsonl   one JSON object a line
    OUT/samples.jsonl   what `fitgpt sample` let the model write, likewise
    OUT/checkpoints/    step-00000500/ … (contents: engine/checkpoint.py)
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from . import __version__
from .atomic import disk_faults, seal_json, sync_folder, unseal_json, write_atomically
from .config import AS_RECORDED
from .errors import CheckpointError, SystemFault, UsageError
from .units import show_bytes

SCHEMA = 1
LONGEST_LINE = 2**20        # bytes; ours are a few hundred
LONG_RECORD = 32 * 2**20    # bytes: some 90,000 steps, which take some seconds to read

_PROBE_BYTES = 64 * 1024       # enough that a full disk cannot hide it in spare metadata room
_DIFFERENCES_SHOWN = 10
_LOCK_OFFSET = 2**30           # Windows forbids reading locked bytes: lock one far from what we write
_HELD_BY_ANOTHER = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # some network disks
_STEP_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_STEP_ROW = b'{"kind": "step", '  # as append_metrics writes it
_PROGRESS = ("step", "eval", "save")  # kinds of rows that going back undoes
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# ---- what is in the folder

class StepFolder(NamedTuple):
    """Sorts from oldest to newest: a later branch (begun by going back to an earlier step) is newer."""

    branch: int
    step: int
    path: Path


def step_folder_name(step: int, branch: int) -> str:
    return f"step-{step:08d}" + (f"-{branch}" if branch > 1 else "")


def step_folders(checkpoints: Path) -> list[StepFolder]:
    """Every checkpoint folder by its name alone, oldest first."""
    if not checkpoints.is_dir():
        return []
    named = ((_STEP_FOLDER.fullmatch(path.name), path) for path in checkpoints.iterdir())
    return sorted(StepFolder(int(match[2] or 1), int(match[1]), path) for match, path in named if match)


def holds_run(out_dir: Path | str) -> bool:
    return bool(step_folders(Path(out_dir) / "checkpoints"))


def can_resume(out_dir: Path | str) -> bool:
    return holds_run(out_dir) or (Path(out_dir) / "ckpt.pt").is_file()


def recorded_config(out_dir: Path | str) -> dict[str, Any] | None:
    """The config that `record` wrote; None where there is none."""
    path = Path(out_dir) / "run.json"
    try:
        with disk_faults("read", path):
            if not path.exists():
                return None
            document = unseal_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or was edited: {error}.",
            f"Remove it (rm {path}): the checkpoints carry their own config.",
        ) from error
    if document.get("schema") != SCHEMA or not isinstance(document.get("config"), dict):
        written_by = document.get("fitgpt", "unknown")
        raise CheckpointError(
            f"{path} was written by fitgpt {written_by} in a form that fitgpt {__version__} does not know.",
            f"Use fitgpt {written_by} or newer.",
        )
    config: dict[str, Any] = document["config"]
    return config


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each knob that differs: 'n_layer: 6 → 12'."""
    return [f"{key}: {old.get(key, 'absent')!r} → {new.get(key, 'absent')!r}"
            for key in sorted({*old, *new}) if old.get(key, "absent") != new.get(key, "absent")]


# ---- opening it

class RunFolder:
    """A run folder that this process alone may write to, until it is closed."""

    def __init__(self, path: Path, lock: int, notes: tuple[str, ...]) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.notes = notes  # what was repaired or could not be had, each a sentence
        self._lock = lock
        self._metrics = os.open(path / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._torn = False  # the last append failed midway

    def record(self, config: Mapping[str, Any]) -> None:
        """Writes run.json, whole or not at all."""
        document = {"schema": SCHEMA, "fitgpt": __version__, "config": dict(config)}
        write_atomically(self.path / "run.json", seal_json(document))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One line, in one write; valid JSON whatever the numbers are."""
        line = (json.dumps(speak_nonfinite(dict(row)), allow_nan=False) + "\n").encode()
        if self._torn:
            line = b"\n" + line
        with disk_faults("append to", self.path / "metrics.jsonl"):
            self._torn = True
            written = os.write(self._metrics, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._torn = False

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._metrics)
            os.close(self._lock)  # which releases it; the file stays, since removing it would race
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_run(out_dir: Path | str, config: Mapping[str, Any], *, resume: bool) -> RunFolder:
    """Creates and locks the folder, and refuses early whatever would lose work or fail later.

    A folder that already holds a run is opened only with `resume`. Comparing configs on a resume is
    not done here: only the checkpoint that is used knows what it was trained with.
    """
    path = Path(out_dir)
    _create(path)
    lock, note = _take_lock(path)
    notes = [note] if note else []
    try:
        if not resume:
            _refuse_another_run(path, config)
        _probe_disk(path)
        with disk_faults("repair", path / "metrics.jsonl"):
            notes += _repair_metrics(path / "metrics.jsonl") if resume else _set_aside_metrics(path)
        with disk_faults("write in", path):
            return RunFolder(path, lock, tuple(notes))
    except BaseException:
        os.close(lock)
        raise


def need_disk(path: Path | str, nbytes: int) -> None:
    """SystemFault unless the disk that holds (or will hold) `path` has room for `nbytes`."""
    folder = Path(path).absolute()
    with disk_faults("ask for the free space of", folder):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise SystemFault(
            f"{path} needs {show_bytes(nbytes)} of disk and {show_bytes(free)} are free.",
            f"Free {show_bytes(nbytes - free)} there, or choose a folder on another disk.",
        )


def _create(path: Path) -> None:
    try:
        with disk_faults("make the run folder", path):
            existed = path.is_dir()
            try:
                path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise SystemFault(
                    f"Cannot make the run folder {path}: something that is not a folder is in its place.",
                    "Choose another with --out_dir.",
                ) from error
            if not existed:
                sync_folder(path.parent)
    except ValueError as error:  # a NUL, or a character this file system cannot write
        raise SystemFault(
            f"The run folder {str(path)!r} is not a name a file system accepts: {error}.",
            "Choose another with --out_dir.",
        ) from error


def _probe_disk(path: Path) -> None:
    probe = path / f".tmp-probe-{os.getpid()}"
    with disk_faults("write in", path):
        try:
            with open(probe, "wb") as file:
                file.write(b"\0" * _PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def _refuse_another_run(path: Path, config: Mapping[str, Any]) -> None:
    found = step_folders(path / "checkpoints")
    if not found:
        return
    try:
        recorded = recorded_config(path)
    except CheckpointError:
        recorded = None
    settled = {key: value for key, value in config.items() if value != AS_RECORDED.get(key)}
    differences = config_differences(recorded or {}, {**(recorded or {}), **settled})
    if recorded is None:
        comparison = "Its config cannot be read."
    elif not differences:
        comparison = "Its config is the same as this one."
    else:
        hidden = len(differences) - _DIFFERENCES_SHOWN
        comparison = "Its config differs (there → here): " + "; ".join(differences[:_DIFFERENCES_SHOWN])
        comparison += f"; and {hidden} more." if hidden > 0 else "."
    raise UsageError(
        f"{path} already holds a run, with a checkpoint at step {found[-1].step}. {comparison}",
        "To go on with it: --init_from=resume. To start anew: another --out_dir.",
    )


# ---- the lock

def _take_lock(path: Path) -> tuple[int, str | None]:
    """The locked descriptor; on a disk that has no locks, a note instead of a refusal."""
    note = None
    with disk_faults("write in", path):
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with disk_faults("lock", path):
            try:
                _lock_at_once(descriptor)
            except OSError as error:
                if error.errno in _HELD_BY_ANOTHER:
                    raise _already_locked(path, descriptor) from error
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                note = f"The disk of {path} has no file locks: nothing keeps a second trainer out of it."
            owner = {"pid": os.getpid(), "host": socket.gethostname(),
                     "started": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(descriptor, 0)
            os.write(descriptor, (json.dumps(owner) + "\n").encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, note


def _lock_at_once(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _already_locked(path: Path, descriptor: int) -> SystemFault:
    try:
        owner = json.loads(os.read(descriptor, 4096))
        who = f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
        stop = f", or stop it: kill {owner['pid']}"
    except (ValueError, KeyError, TypeError, OSError):  # it has not written its name yet
        who, stop = "another process", ""
    return SystemFault(f"{path} is being trained in by {who}.", f"Choose another --out_dir{stop}")


# ---- metrics

def keep_sample(out_dir: Path | str, step: int, text: str) -> None:
    """For the report. A folder that cannot be written to costs the sample nothing."""
    with suppress(OSError), (Path(out_dir) / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "sample", "step": step, "text": text}) + "\n")


def record_lines(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bool]]:
    """The lines of a record from where the file stands, and of each whether it is to be read.

    Of a very long record only every so manieth step is, but all else and everything near its end: a curve has no more
    points than a page has dots, and whoever looks at the run is not to wait for minutes.
    """
    start = place = file.tell()
    every, number = -(-(size - start) // LONG_RECORD), 0
    while line := file.readline(LONGEST_LINE):
        place += len(line)
        steps_are_enough = every > 1 and place < size - LONGEST_LINE and line.startswith(_STEP_ROW)
        number += steps_are_enough
        yield line, not steps_are_enough or number % every == 0


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The rows as the run now stands, in file order. Lines that are no JSON object are passed over."""
    return read_record(path)[0]


def read_record(path: Path | str) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows as the run now stands, in file order; and the numbers of lines that are no JSON object.

    A row with `start_step` begins a part of the run, which was resumed or went back: the steps, evaluations
    and saves that lay beyond were undone; other things happened nevertheless. Of two such rows of the same
    step the later one counts.
    """
    kept: dict[object, dict[str, Any]] = {}
    broken: list[int] = []
    if not Path(path).exists():
        return [], []
    with open(path, "rb") as file:
        number, begun = 0, False  # begun: a line too long to be one of ours goes on
        for line, wanted in record_lines(file, os.fstat(file.fileno()).st_size):
            rest_of_a_line, begun = begun, not line.endswith(b"\n")
            number += not rest_of_a_line
            if rest_of_a_line or not wanted or not line.strip():
                continue
            try:
                row = _hear_nonfinite(json.loads(line))
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                kept = _with_row(kept, row, number)
            else:
                broken.append(number)
    return list(kept.values()), broken


def _with_row(kept: dict[object, dict[str, Any]], row: dict[str, Any], number: int) -> dict[object, dict[str, Any]]:
    start = row.get("start_step")
    if isinstance(start, int):
        kept = {key: other for key, other in kept.items() if not _undone(other, start)}
    kind, step = row.get("kind"), row.get("step")
    key = (kind, step) if kind in _PROGRESS and isinstance(step, int) else number
    kept.pop(key, None)
    kept[key] = row
    return kept


def _undone(row: Mapping[str, Any], start: int) -> bool:
    """Step 7 leads from 7 steps done to 8; an evaluation or a save at 7 is of 7 steps done."""
    kind, step = row.get("kind"), row.get("step")
    return kind in _PROGRESS and isinstance(step, int) and (step >= start if kind == "step" else step > start)


def speak_nonfinite(value: Any) -> Any:
    """NaN and infinity as words: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): speak_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [speak_nonfinite(item) for item in value]
    return value


def _hear_nonfinite(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _hear_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hear_nonfinite(item) for item in value]
    return value


def _repair_metrics(path: Path) -> list[str]:
    """A last line without its newline was being written when the run was killed: finish it or drop it."""
    if not path.exists() or path.stat().st_size == 0:
        return []
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        tail_start, tail = end, b""
        while tail_start > 0 and b"\n" not in tail:
            tail_start = max(0, tail_start - 65536)
            file.seek(tail_start)
            tail = file.read(end - tail_start)
        torn = tail[tail.rfind(b"\n") + 1:]
        if not torn:
            return []
        try:
            whole = isinstance(json.loads(torn), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole:
            file.seek(end)
            file.write(b"\n")
            return []
        file.truncate(end - len(torn))
        return [f"The last line of {path} was cut short when the run stopped, and was dropped."]


def _set_aside_metrics(path: Path) -> list[str]:
    """A run that never reached a checkpoint left its metrics here: they are not this run's."""
    metrics = path / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_size == 0:
        return []
    number = 1
    while (aside := path / f"metrics-{number}.jsonl").exists():
        number += 1
    metrics.rename(aside)
    return [f"{metrics} was of an earlier run without a checkpoint: it is now {aside.name}."]
