"""Atomic writes of files and folders, errors of the disk, and JSON with a checksum."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

from .errors import SystemFault, UsageError
from .units import show_bytes

_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
_WINDOWS_RETRY_S = 2.5  # a virus scanner keeps a new file open for at most about this long

PAGE_MARK = '<meta name="generator" content="fitgpt">'  # in the head of every page of show.charts
MAX_JSON_BYTES = 64 * 2**20  # of a JSON file that is read: the manifest of 400,000 shards, for example
_MAX_LENGTH = 16 * 2**20  # characters of a file that fitgpt writes
_LOCK_OFFSET = 2**30      # Windows forbids reading locked bytes: lock one far beyond the text

_TEMPORARY = "fitgpt-tmp-"  # folders in TMPDIR
_UNLOCKED_S = 60.0        # a folder that is being made may not be locked yet
_OLD = "-old"             # ends the name of an earlier folder that is being replaced
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)

_OTHER_FOLDER = "Choose another folder (--out_dir; for prepare, fit and export, -o)."
_FIXES = {
    errno.ENOSPC: "Free some space on that disk, or choose another.",
    errno.EDQUOT: "Your quota on that disk is used up: remove something, or choose another.",
    errno.EACCES: "Make it writable for this user, or choose another folder.",
    errno.EPERM: "Make it writable for this user, or choose another folder.",
    errno.EROFS: "That disk is mounted read-only: choose another.",
    errno.EIO: "The disk reports an error: see `dmesg`, and choose another disk.",
    errno.EMFILE: "Raise the limit of open files: ulimit -n 4096",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f unlimited), or choose a disk that allows such files: on "
                 "FAT they end at 4 GiB.",
}


def data_home() -> Path:
    """The folder of what is measured on this machine."""
    given = os.environ.get("FITGPT_HOME")
    if given:
        return Path(os.path.expanduser(given))  # where Path.expanduser raises, it leaves ~nobody as it is, like a shell
    return Path(os.environ.get("XDG_DATA_HOME") or home() / ".local" / "share") / "fitgpt"


def home() -> Path:
    """The user's home directory. A user that the system does not know, as in some containers, has none: then /, as
    Docker sets HOME, and not a folder called ~ in the current directory."""
    found = os.path.expanduser("~")
    return Path("/" if found == "~" else found)


# ---- reading

def open_at_once(path: Path | str) -> BufferedReader:
    """Opens a file, a pipe or a device for reading. A pipe that no process writes to reads as empty, where `open` would
    wait for one."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(file.fileno(), True)
    return file


def open_regular(path: Path | str) -> BufferedReader:
    """Opens a file for reading. OSError if it is a pipe or a device: reading those may block, or never end."""
    file = open_at_once(path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return file


def read_limited(path: Path | str, limit: int, *, pipes: bool = False) -> bytes:
    """The content of a file; ValueError if it has more than `limit` bytes, of which no more are read. With `pipes` it
    may be a pipe or a device, for a path that the user typed: `--plan <(…)`."""
    with open_at_once(path) if pipes else open_regular(path) as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        content = b"" if size > limit else file.read(limit + 1)
    if stat.S_ISFIFO(status.st_mode) and not content:
        raise ValueError("it is a pipe that nothing was written to")
    if max(size, len(content)) > limit:
        raise ValueError(f"it is larger than {show_bytes(limit)}, the limit")
    return content


# ---- writing

@contextmanager
def disk_faults(doing: str, path: Path) -> Iterator[None]:
    """Turns any OSError inside into a SystemFault with the operation and the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = _FIXES.get(error.errno or 0, _OTHER_FOLDER)
        raise SystemFault(f"Cannot {doing} {path}: {reason}.", fix) from error


def open_own(path: Path | str, flags: int) -> int:
    """Opens a file that is written in place → its descriptor. SystemFault unless it is a regular file or missing: an
    archive of a run may contain a link, and writing to it would change the file that it points to."""
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind != stat.S_IFREG:
            name = shlex.quote(str(path))
            raise SystemFault(f"{path} is {_KINDS.get(kind, 'a device')}, and fitgpt writes only to a file there.",
                              f"Rename it: mv {name} {name}.old")
    # O_NOFOLLOW, O_NONBLOCK: what takes the name after this check is not followed or waited for; not on Windows
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes a file so that after a crash at any moment it has the old content or the new."""
    data = content.encode() if isinstance(content, str) else content
    with disk_faults("write", path):
        replace_file(path, path.with_name(f".tmp-{path.name}-{os.getpid()}"), data)


def write_over(path: Path, content: str) -> str:
    """Writes the file. → its name, with a remark if it replaced one. Call `check_overwrite` first."""
    replaced = path.exists()
    write_atomically(path, content)
    return f"{path} (it replaced the one that was there)" if replaced else str(path)


def check_overwrite(path: Path, is_ours: Callable[[str], bool], verb: str, flag: str,
                    given: Path | None = None) -> None:
    """UsageError if the file exists and fitgpt did not write it. `given`: the name after the flag, if it differs."""
    with disk_faults("look at", path):
        if not path.exists():
            return
        if path.is_dir():
            inside = path / f"{verb}{'.html' if is_ours is is_own_page else '.json'}"
            raise UsageError(f"{flag} {path} is a folder, and `fitgpt {verb}` writes a file.",
                             f"{flag} {shlex.quote(str(inside))}")
        ours = False
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace") as file:
                ours = is_ours(file.read(_MAX_LENGTH))
    if not ours:
        named = given or path
        others = (named.with_name(f"{named.stem}_{verb}{number or ''}{named.suffix}") for number in count())
        free = next(name for name in others if not name.exists())
        raise UsageError(f"{path} is there already, and `fitgpt {verb}` did not write it.",
                         f"Choose another name: {flag} {shlex.quote(str(free))}")


def is_own_page(text: str) -> bool:
    return PAGE_MARK in text[:4096]


def is_own_json(text: str, *keys: str) -> bool:
    """Whether the text is a JSON object with a schema and these keys."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {"schema", *keys} <= document.keys()


def replace_file(path: Path, temporary: Path, *parts: bytes | memoryview) -> None:
    """Writes and syncs `temporary`, then renames it to `path`."""
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()  # fsync does not see Python's buffer
            os.fsync(file.fileno())
        rename_with_retry(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def folder_atomically(target: Path, temporary: Path) -> Iterator[Path]:
    """Yields `temporary` (beside `target`) to fill; then every file is synced and the folder renamed.

    If anything fails inside, the temporary folder is removed and `target` stays as it was, or absent. An earlier folder
    is exchanged with the new one in one operation. Where the file system cannot do that it is renamed to `…-old` first,
    and `recover_folder` undoes a kill in between.
    """
    displaced = temporary.with_name(f"{temporary.name}{_OLD}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            with open(file, "rb+") as opened:
                os.fsync(opened.fileno())
        sync_folder(temporary)
        if not (target.exists() and _exchange(temporary, target)):
            if target.exists():
                rename_with_retry(target, displaced)
            rename_with_retry(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if displaced.exists() and not target.exists():
            rename_with_retry(displaced, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(temporary, ignore_errors=True)  # the earlier folder, if they were exchanged
    shutil.rmtree(displaced, ignore_errors=True)


def recover_folder(target: Path) -> None:
    """Undoes what a killed `folder_atomically` left, whose temporary folder was `.tmp-NAME-PID`: brings back an earlier
    folder that was already renamed, and removes the rest."""
    name = re.compile(rf"\.tmp-{re.escape(target.name)}-(\d{{1,9}})({_OLD})?")
    found = [(match, path) for path in target.parent.glob(".tmp-*") if (match := name.fullmatch(path.name))]
    for match, path in sorted(found, key=lambda each: not each[0][2]):  # earlier folders first
        if is_alive(int(match[1])):
            continue
        if match[2] and not target.exists():
            rename_with_retry(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether a process on this machine has this pid; True where that cannot be known."""
    if os.name != "posix":
        return True  # on Windows os.kill(pid, 0) would be Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders atomically, with Linux's renameat2; False where the system or the file system
    does not support it. Another error is raised: the exchange may have happened all the same (NFS)."""
    if sys.platform != "linux":
        return False
    import ctypes  # slow to import

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library older than 2018
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def rename_with_retry(source: Path, target: Path) -> None:
    """os.replace; on Windows it retries while a scanner has the file open."""
    may_retry, deadline = sys.platform == "win32", time.monotonic() + _WINDOWS_RETRY_S
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if not may_retry or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def sync_folder(folder: Path) -> None:
    """Makes a rename or a new file in `folder` survive a power cut. Windows has no such call."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks cannot sync a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a new folder in TMPDIR, which is removed at the end; and first those that killed processes left: the lock
    of a folder in use is taken."""
    import tempfile  # slow to import

    for lock in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*/lock"):
        with suppress(OSError), open(lock, "rb+") as file:
            is_new = time.time() - os.fstat(file.fileno()).st_mtime < _UNLOCKED_S
            if not is_new and try_lock(file.fileno()):
                shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as folder, open(Path(folder) / "lock", "wb") as file:
        with suppress(OSError):  # a disk without locks
            try_lock(file.fileno())
        yield Path(folder)


def try_lock(descriptor: int) -> bool:
    """Locks an open file until it is closed, without waiting. → whether it did: False where another process has it.

    OSError where the disk has no file locks, as some network disks have none.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file → its object; empty where it is missing or is not an object."""
    try:
        found = json.loads(read_limited(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def seal_json(document: dict[str, Any], *, indent: int | None = 1) -> str:
    """A document → JSON with the checksum of its content. Infinities and NaN survive the round trip."""
    body = _tag_nonfinite(document)
    separators = (",", ":") if indent is None else None
    return json.dumps({**body, "checksum": _checksum(body)}, indent=indent, separators=separators,
                      allow_nan=False) + "\n"


def unseal_json(text: str | bytes) -> dict[str, Any]:
    """The document of `seal_json`; ValueError if its content was changed."""
    sealed = json.loads(text)
    if not isinstance(sealed, dict) or sealed.pop("checksum", None) != _checksum(sealed):
        raise ValueError("its content does not match its own checksum")
    document: dict[str, Any] = _untag_nonfinite(sealed)
    return document


def _checksum(body: Any) -> str:
    import hashlib  # slow to import, and not needed by every command

    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _tag_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, dict):
        return {str(key): _tag_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tag_nonfinite(item) for item in value]
    return value


def _untag_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in ("inf", "-inf", "nan"):
            return float(value["float"])
        return {key: _untag_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untag_nonfinite(item) for item in value]
    return value
