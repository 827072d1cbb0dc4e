"""Whose is the folder a dataset is written to, and how is one asked to stop while writing there?"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ..core.errors import SystemFault, UsageError

_LOCK = ".prepare.lock"


def check_free_of_others(folder: Path) -> None:
    """nanoGPT's files are never shadowed nor replaced."""
    for name in ("train.bin", "val.bin"):
        if (folder / name).exists():
            raise UsageError(f"{folder} already holds a dataset in nanoGPT's format ({name}), and fitgpt replaces "
                             "only what it wrote itself.", "Give the new dataset another --name.")


def make(folder: Path) -> list[Path]:
    """The folders that had to be made, the innermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return missing
    except OSError as error:
        raise SystemFault(f"The folder {folder} cannot be made: {error.strerror}.",
                          "Choose another with --out=FOLDER or --name=NAME.") from error


def unmake(folders: list[Path]) -> None:
    """Of those that were made, what holds nothing goes again."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One preparation at a time in a folder. The lock goes with the process, however that ends."""
    path = folder / _LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise SystemFault(f"The folder {folder} cannot be written: {error.strerror}.",
                          "Make it writable for this user, or choose another with --out=FOLDER.") from error
    try:
        _lock(descriptor, folder)
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
        raise SystemFault(f"Another `fitgpt prepare` (process {holder or 'unknown'}) is writing to {folder}.",
                          "Wait until it is done, or give this one another --name.") from error
    except OSError:
        pass  # a network disk without locks


@contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, a hang-up or a polite kill is remembered, to be asked for between documents; the second stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def remember(number: int, _: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("\nStopping; once more stops at once.", file=sys.stderr, flush=True)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What was to be ignored from the start stays ignored: nohup, or a script's background job.
    before = {number: signal.signal(number, remember) for number in numbers
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
