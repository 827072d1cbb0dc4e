"""The run folder: which run it contains, its lock, and opening it for the one process that trains in it.

    OUT/lock            held by the process that trains here, and names it
    OUT/run.json        the resolved config of the run
    OUT/metrics.jsonl   one JSON object per line (metrics.py)
    OUT/samples.jsonl   text that `fitgpt sample` generated, likewise
    OUT/checkpoints/    step-00000500/ … (contents: training/checkpoint.py)
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..config.run_config import AS_RECORDED
from ..core.errors import CheckpointError, FitError, SystemFault, UsageError
from ..core.files import (
    MAX_JSON_BYTES,
    disk_faults,
    is_alive,
    open_own,
    read_json_object,
    read_limited,
    seal_json,
    sync_folder,
    try_lock,
    unseal_json,
    write_atomically,
)
from ..core.units import show_bytes
from . import metrics

SCHEMA = 1
_RUN_FILES = ("metrics.jsonl", "lock", "run.json")
STATE = "state.json"           # of a checkpoint: all but its tensors, among it the run's config
_PROBE_BYTES = 64 * 1024       # a full disk may still accept fewer bytes, in its metadata
_DIFFERENCES_SHOWN = 10
_STEP_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # some network disks


# ---- what is in the folder

class StepFolder(NamedTuple):
    """A checkpoint's folder. Sorts from oldest to newest: a later branch (after a rollback) is newer."""

    branch: int
    step: int
    path: Path


def step_folder_name(step: int, branch: int) -> str:
    return f"step-{step:08d}" + (f"-{branch}" if branch > 1 else "")


def step_folders(checkpoints: Path) -> list[StepFolder]:
    """Every checkpoint folder, by its name only, oldest first."""
    if not checkpoints.is_dir():
        return []
    named = ((_STEP_FOLDER.fullmatch(path.name), path) for path in checkpoints.iterdir())
    return sorted(StepFolder(int(match[2] or 1), int(match[1]), path) for match, path in named if match)


def holds_run(out_dir: Path | str) -> bool:
    return bool(step_folders(Path(out_dir) / "checkpoints"))


def can_resume(out_dir: Path | str) -> bool:
    return holds_run(out_dir) or (Path(out_dir) / "ckpt.pt").is_file()


def recorded_config(out_dir: Path | str) -> dict[str, Any] | None:
    """The config in run.json; where there is no such file, in the last checkpoint; None where there is neither."""
    path = Path(out_dir) / "run.json"
    try:
        with disk_faults("read", path):
            if not path.exists():
                return _config_of_last_checkpoint(path.parent / "checkpoints")
            document = unseal_json(read_limited(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or was edited: {error}.",
            f"Remove it (rm {path}): each checkpoint contains the config too.",
        ) from error
    if document.get("schema") != SCHEMA or not isinstance(document.get("config"), dict):
        written_by = document.get("fitgpt", "unknown")
        raise CheckpointError(
            f"{path} was written by fitgpt {written_by} in a format that fitgpt {__version__} does not know.",
            f"Use fitgpt {written_by} or newer.",
        )
    config: dict[str, Any] = document["config"]
    return config


def _config_of_last_checkpoint(checkpoints: Path) -> dict[str, Any] | None:
    for slot in reversed(step_folders(checkpoints)):
        with suppress(OSError, ValueError, RecursionError):  # damaged: `resume` does not use it either
            state = unseal_json(read_limited(slot.path / STATE, MAX_JSON_BYTES)).get("state")
            if isinstance(state, dict) and isinstance(config := state.get("config"), dict):
                return config
    return None


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _RUN_FILES)


def runs_near(folder: Path) -> list[Path]:
    """Run folders at, directly below, and in runs/ below a folder; the one written to last first."""
    candidates = [folder]
    for parent in (folder, folder / "runs"):
        with suppress(OSError):
            candidates += [path for path in parent.iterdir() if path.is_dir()]
    found: dict[Path, float] = {}
    for candidate in candidates:
        with suppress(OSError):  # removed meanwhile, or not readable
            if is_run(candidate):
                files = [candidate / name for name in _RUN_FILES]
                found[candidate] = max(file.stat().st_mtime for file in files if file.exists())
    return sorted(found, key=lambda candidate: -found[candidate])


# ---- the lock

def take_lock(folder: Path) -> tuple[int, str | None]:
    """The locked descriptor, and a note where the disk has no file locks. SystemFault: another process has it."""
    note = None
    with disk_faults("write in", folder):
        descriptor = open_own(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        with disk_faults("lock", folder):
            try:
                locked = try_lock(descriptor)
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                locked, note = True, f"The disk of {folder} has no file locks: nothing prevents a second run in it."
            if not locked:
                owner = read_json_object(folder / "lock")
                who, fix = "another process", "Choose another --out_dir"  # it has not written its pid yet
                if {"pid", "host", "started"} <= owner.keys():
                    who = f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
                    fix += f", or stop it: kill {owner['pid']}"
                raise SystemFault(f"{folder} is being trained in by {who}.", fix)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(descriptor, 0)
            os.write(descriptor, (json.dumps(owner) + "\n").encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, note


@dataclass(frozen=True)
class LockOwner:
    """The process that took the lock last."""

    pid: int
    host: str
    since: float                # seconds since 1970
    alive: bool | None = None   # None: not known, on another machine or on Windows

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.here else f" on {self.host}")


def lock_owner(folder: Path) -> LockOwner | None:
    """From the text of the lock file. The lock itself is not tried: that could stop a trainer as it starts."""
    lock = folder / "lock"
    try:
        content, since = read_json_object(lock), lock.stat().st_mtime
    except OSError:
        return None
    pid, host = content.get("pid"), content.get("host")
    if not isinstance(pid, int) or not isinstance(host, str) or not 0 < pid < 2**31:
        return None
    alive = _holds(pid, lock) if host == socket.gethostname() else None
    return LockOwner(pid, host, since, alive)


def _holds(pid: int, lock: Path) -> bool | None:
    """Whether the process is alive and has the file open: its pid may have been reused by another process."""
    if os.name != "posix":
        return None
    if not is_alive(pid):
        return False
    try:
        held = lock.stat()
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return True  # no /proc, or another user's process: no more can be known
    for descriptor in descriptors:
        with suppress(OSError):
            if os.path.samestat(descriptor.stat(), held):
                return True
    return False


def is_running(owner: LockOwner | None) -> bool:
    return owner is not None and owner.alive is True


# ---- opening

class RunFolderLost(FitError):
    """The folder is no longer this run's: it was removed or renamed, or another run has taken its name. Unlike a full
    disk this ends the run at once, so it is no SystemFault."""

    exit_code = SystemFault.exit_code


class RunFolder:
    """A run folder that is locked by this process until it is closed. Before every write, `check_ours`."""

    def __init__(self, path: Path, lock: int, notes: tuple[str, ...]) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.notes = notes  # what was repaired or is not available, each a sentence
        self._lock = lock
        self._metrics = _open_metrics(path)
        self._torn = False  # the last append failed midway

    def check_ours(self) -> None:
        """Raises RunFolderLost unless the folder's lock is still the file that this process locked."""
        with disk_faults("look at", self.path):
            try:
                if os.path.samestat(os.stat(self.path / "lock"), os.fstat(self._lock)):
                    return
            except FileNotFoundError:
                pass
        place = _path_of(self._lock)
        if place is not None and place.name == "lock" and place.parent != self.path.absolute():
            raise RunFolderLost(f"{self.path} was renamed to {place.parent} while this run trained in it. Its "
                                "checkpoints are there; what was trained since the last one is lost.",
                                f"To resume: {_resume_command(place.parent)}")
        owner = lock_owner(self.path)
        if is_running(owner):
            raise RunFolderLost(f"{self.path} was removed or replaced while this run trained in it, and {owner} trains "
                                "there now. Nothing of this run was written into it.",
                                "Start this run again with another --out_dir.")
        if holds_run(self.path):
            raise RunFolderLost(f"The lock of {self.path} was removed while this run trained there: another run could "
                                "have begun in it. Its checkpoints are kept; what was trained since the last one is "
                                "lost.", f"To resume: {_resume_command(self.path)}")
        raise RunFolderLost(f"{self.path} was removed while this run trained in it, and its checkpoints with it.",
                            "Stop a run (Ctrl-C) before you remove its folder.")

    def record(self, config: Mapping[str, Any]) -> None:
        """Writes run.json atomically."""
        self.check_ours()
        document = {"schema": SCHEMA, "fitgpt": __version__, "config": dict(config)}
        write_atomically(self.path / "run.json", seal_json(document))

    def append_metrics(self, row: Mapping[str, Any]) -> str:
        """Appends one line to metrics.jsonl, in one write. → a note if that is a new file, because the earlier one was
        moved or removed; else empty."""
        self.check_ours()
        line, note, file = metrics.encode_row(row), "", self.path / "metrics.jsonl"
        with disk_faults("append to", file):
            if not file.exists() or not os.path.samestat(file.stat(), os.fstat(self._metrics)):
                opened = _open_metrics(self.path)
                os.close(self._metrics)
                self._metrics, self._torn = opened, False
                note = f"{file} was moved or removed: from here on the metrics are in a new file."
            if self._torn:
                line = b"\n" + line
            self._torn = True
            written = os.write(self._metrics, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._torn = False
        return note

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._metrics)
            os.close(self._lock)  # which releases it; the file stays, since removing it would race
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _resume_command(folder: Path) -> str:
    return shlex.join(["fitgpt", "train", "--resume", f"--out_dir={folder}"])


def _open_metrics(folder: Path) -> int:
    return open_own(folder / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _path_of(descriptor: int) -> Path | None:
    """Where an open file is now; None where that is not known, or nowhere."""
    try:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        return Path(place) if os.path.samestat(os.stat(place), os.fstat(descriptor)) else None
    except OSError:
        return None


def open_run(out_dir: Path | str, config: Mapping[str, Any], *, resume: bool) -> RunFolder:
    """Creates and locks the folder. Raises at once what would lose work or fail later.

    A folder that already holds a run is opened only with `resume`. Comparing configs on a resume is
    not done here: only the checkpoint that is used knows what it was trained with.
    """
    path = Path(out_dir)
    _create(path)
    lock, note = take_lock(path)
    notes = [note] if note else []
    try:
        if not resume:
            _check_same_run(path, config)
        for leftover in path.glob(".tmp-*"):  # of a process that was killed as it started
            with suppress(OSError):
                leftover.unlink()
        _probe_disk(path)
        with disk_faults("repair", path / "metrics.jsonl"):
            notes += metrics.repair(path / "metrics.jsonl") if resume else metrics.set_aside(path)
        with disk_faults("write in", path):
            return RunFolder(path, lock, tuple(notes))
    except BaseException:
        os.close(lock)
        raise


def need_disk(path: Path | str, nbytes: int) -> None:
    """SystemFault unless the disk of `path`, which need not exist yet, has `nbytes` free."""
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
                    f"Cannot make the run folder {path}: a file of that name is in its place.",
                    "Choose another with --out_dir.",
                ) from error
            if not existed:
                sync_folder(path.parent)
    except ValueError as error:  # a NUL, or a character this file system cannot write
        raise SystemFault(
            f"The run folder {str(path)!r} is not a name that the file system accepts: {error}.",
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


def _check_same_run(path: Path, config: Mapping[str, Any]) -> None:
    found = step_folders(path / "checkpoints")
    if not found:
        return
    try:
        recorded = recorded_config(path)
    except CheckpointError:
        recorded = None
    if recorded is None:
        comparison = "Its config cannot be read."
    else:
        differences = [f"{key}: {recorded.get(key, 'absent')!r} → {value!r}" for key, value in sorted(config.items())
                       if value not in (AS_RECORDED.get(key), recorded.get(key, "absent"))]
        hidden = len(differences) - _DIFFERENCES_SHOWN
        comparison = "Its config differs (there → here): " + "; ".join(differences[:_DIFFERENCES_SHOWN])
        comparison += f"; and {hidden} more." if hidden > 0 else "."
        if not differences:
            comparison = "Its config is the same as this one."
    raise UsageError(
        f"{path} already holds a run, with a checkpoint at step {found[-1].step}. {comparison}",
        "To resume it: --resume. To start another run: choose another --out_dir.",
    )
