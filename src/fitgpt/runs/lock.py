"""The lock of a run folder: taken by the process that trains there, read by `fitgpt watch`."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import SystemFault
from ..core.files import disk_faults

_MAX_BYTES = 4096              # of the lock file; it has about a hundred
_LOCK_OFFSET = 2**30           # Windows forbids reading locked bytes: lock one far beyond the text
_HELD_BY_ANOTHER = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # some network disks


# ---- taking it

def take_lock(folder: Path) -> tuple[int, str | None]:
    """The locked descriptor, and a note where the disk has no file locks. SystemFault: another process has it."""
    note = None
    with disk_faults("write in", folder):
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with disk_faults("lock", folder):
            try:
                _lock_without_waiting(descriptor)
            except OSError as error:
                if error.errno in _HELD_BY_ANOTHER:
                    raise _already_locked(folder, descriptor) from error
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                note = f"The disk of {folder} has no file locks: nothing prevents a second run in it."
            owner = {"pid": os.getpid(), "host": socket.gethostname(),
                     "started": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(descriptor, 0)
            os.write(descriptor, (json.dumps(owner) + "\n").encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, note


def _lock_without_waiting(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _already_locked(folder: Path, descriptor: int) -> SystemFault:
    owner: dict[str, Any] = {}
    with suppress(OSError):
        owner = _parse_lock(os.read(descriptor, _MAX_BYTES))
    if {"pid", "host", "started"} <= owner.keys():
        who = f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
        stop = f", or stop it: kill {owner['pid']}"
    else:  # it has not written its pid yet
        who, stop = "another process", ""
    return SystemFault(f"{folder} is being trained in by {who}.", f"Choose another --out_dir{stop}")


def _parse_lock(lock: bytes) -> dict[str, Any]:
    """The JSON object in the lock file; empty where it is none."""
    try:
        content = json.loads(lock)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# ---- reading it

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
        content, since = _parse_lock(lock.read_bytes()[:_MAX_BYTES]), lock.stat().st_mtime
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
        return None  # on Windows os.kill(pid, 0) would be Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's: it is alive, and no more can be known
    try:
        held = lock.stat()
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return True  # no /proc, or no permission
    for descriptor in descriptors:
        with suppress(OSError):
            if os.path.samestat(descriptor.stat(), held):
                return True
    return False


def is_running(owner: LockOwner | None) -> bool:
    return owner is not None and owner.alive is True
