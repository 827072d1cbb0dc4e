"""How a file or a folder gets onto the disk whole or not at all, and how a JSON file knows it is whole."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from .errors import SystemFault, UsageError

_WINDOWS_PATIENCE_S = 2.5  # a virus scanner holds a fresh file for about this long at worst

PAGE_MARK = '<meta name="generator" content="fitgpt">'  # in the head of every page that show.charts makes
_LONGEST_OWN = 16 * 2**20  # characters: no file that is written here is longer

_ELSEWHERE = "Choose another folder (--out_dir; for prepare, fit and export, -o)."
_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk, or choose another.",
    errno.EDQUOT: "Your quota on that disk is used up: remove something, or choose another.",
    errno.EACCES: "Make it writable for this user, or choose another folder.",
    errno.EPERM: "Make it writable for this user, or choose another folder.",
    errno.EROFS: "That disk is mounted read-only: choose another.",
    errno.EIO: "The disk reports a fault: look at `dmesg`, and choose another disk.",
    errno.EMFILE: "Raise the limit of open files: ulimit -n 4096",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f unlimited), or choose a disk that holds such files: FAT "
                 "ends at 4 GiB.",
}


@contextmanager
def disk_faults(doing: str, path: Path) -> Iterator[None]:
    """Any OSError inside becomes a SystemFault that says what was being done to which path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = _REMEDIES.get(error.errno or 0, _ELSEWHERE)
        raise SystemFault(f"Cannot {doing} {path}: {reason}.", fix) from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """After a crash at any moment, `path` holds the old content or the new, never a mixture."""
    data = content.encode() if isinstance(content, str) else content
    with disk_faults("write", path):
        replace_file(path, path.with_name(f".tmp-{path.name}-{os.getpid()}"), data)


def write_over(path: Path, content: str) -> str:
    """The file's name, in words that say whether it replaced another. What may be replaced, `refuse_foreign` says."""
    replaced = path.exists()
    write_atomically(path, content)
    return f"{path} (it replaced the one that was there)" if replaced else str(path)


def refuse_foreign(path: Path, is_ours: Callable[[str], bool], verb: str, flag: str, said: Path | None = None) -> None:
    """What somebody else wrote is not replaced. `said`: the name after the flag, where the file is called after it."""
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
                ours = is_ours(file.read(_LONGEST_OWN))
    if not ours:
        named = said or path
        others = (named.with_name(f"{named.stem}_{verb}{number or ''}{named.suffix}") for number in count())
        free = next(name for name in others if not name.exists())
        raise UsageError(f"{path} is there already, and `fitgpt {verb}` did not write it.",
                         f"Choose another name: {flag} {shlex.quote(str(free))}")


def is_own_page(text: str) -> bool:
    return PAGE_MARK in text[:4096]


def is_own_json(text: str, *keys: str) -> bool:
    """Whether it is a document with a schema and these keys."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(told, dict) and {"schema", *keys} <= told.keys()


def replace_file(path: Path, temporary: Path, *parts: bytes | memoryview) -> None:
    """Writes `temporary` beside `path`, makes it durable, and only then lets it take the name."""
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()  # fsync sees only what has left Python's buffer
            os.fsync(file.fileno())
        patiently_rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def folder_atomically(target: Path, temporary: Path) -> Iterator[Path]:
    """Yields `temporary` (beside `target`) to fill; then every file is synced and the folder renamed.

    If anything fails inside, the temporary folder is removed and `target` stays as it was, or absent.
    """
    displaced = temporary.with_name(f"{temporary.name}-old")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            with open(file, "rb+") as opened:
                os.fsync(opened.fileno())
        sync_folder(temporary)
        if target.exists():
            patiently_rename(target, displaced)
        patiently_rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if displaced.exists() and not target.exists():
            patiently_rename(displaced, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(displaced, ignore_errors=True)


def patiently_rename(source: Path, target: Path) -> None:
    """os.replace; on Windows a scanner that has the file open is waited for."""
    may_be_held, deadline = sys.platform == "win32", time.monotonic() + _WINDOWS_PATIENCE_S
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if not may_be_held or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def sync_folder(folder: Path) -> None:
    """Makes a rename or a new name in `folder` survive a power cut; Windows has no such call."""
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


def seal_json(document: dict[str, Any]) -> str:
    """Valid JSON that carries the checksum of its own content; infinities and NaN survive the round trip."""
    body = _tag_nonfinite(document)
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1, allow_nan=False) + "\n"


def unseal_json(text: str | bytes) -> dict[str, Any]:
    """The document `seal_json` was given; ValueError if a single character of its content differs."""
    sealed = json.loads(text)
    if not isinstance(sealed, dict) or sealed.pop("checksum", None) != _checksum(sealed):
        raise ValueError("its content does not match its own checksum")
    document: dict[str, Any] = _untag_nonfinite(sealed)
    return document


def _checksum(body: Any) -> str:
    import hashlib  # here: it takes a while to load, and a plan never asks for it

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
