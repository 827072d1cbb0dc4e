"""Whether a run makes progress: the worker writes down what it is doing, and the supervisor ends one that is stuck.

The worker says with each entry how long it may be silent: LEAST_S or TIMES median steps in a training step, much longer
where it compiles, captures CUDA graphs, rehearses, evaluates or saves. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

LEAST_S = 60.0   # of silence, before a training step counts as stuck; tests give a worker less
TIMES = 20       # median steps of silence
PATIENT = 30     # times LEAST_S, for anything but a training step
FEW_REPORTS = 3  # the first steps compile and capture
GRACE_S = 10.0   # for a worker whose supervisor has died, and STEPS_OF_GRACE steps, to finish its step …
STEPS_OF_GRACE = 3
SAVING_S = 600.0 # … and to save
SAVING = "saving a checkpoint"
WIDTH = 160      # bytes of an entry: a new one covers the one before it


class Entry(NamedTuple):
    """What a worker was doing when it last wrote."""

    number: int = 0
    limit: float = PATIENT * LEAST_S  # seconds it may be silent from then on
    step: int = -1                    # steps completed; -1: none yet
    doing: str = "starting"


class Heartbeat:
    """The worker's entries. Without a file nothing is written: the worker still knows what it is doing."""

    def __init__(self, path: str | Path = "", least: float = LEAST_S, log_interval: int = 1) -> None:
        self._file = open(path, "wb", buffering=0) if path else None  # noqa: SIM115 (open as long as the process)
        self._least = least
        self._seconds: deque[float] = deque(maxlen=50)  # per step, of the last reports
        self.log_interval = log_interval  # steps are queued on the GPU between two reports, which wait for them
        self._now = Entry(limit=PATIENT * least)

    def begin(self, doing: str) -> None:
        """Something else than a training step begins."""
        self._write(PATIENT * self._least, self._now.step, doing)

    def beat(self) -> None:
        """What has begun continues."""
        self._write(self._now.limit, self._now.step, self._now.doing)

    def advanced(self, steps: float) -> None:
        """After a micro-step: steps completed so far."""
        self._write(self.limit(), int(steps), "a training step")

    def reported(self, seconds: float) -> None:
        """What a step takes, measured where the CPU waits for the GPU."""
        self._seconds.append(seconds)

    def forget(self) -> None:
        """The next steps compute in another way: they may compile first."""
        self._seconds.clear()
        self.begin("going on after out of memory")

    def limit(self) -> float:
        if len(self._seconds) < FEW_REPORTS:
            return PATIENT * self._least
        return max(self._least, max(TIMES, 2 * self.log_interval) * median(self._seconds))

    def grace_is_over(self, since: float) -> bool:
        """Whether a worker whose supervisor died at `since` (time.monotonic) should not wait for its step any more."""
        waited = time.monotonic() - since
        if self._now.doing == SAVING:
            return waited > SAVING_S
        return waited > GRACE_S + STEPS_OF_GRACE * (median(self._seconds) if self._seconds else 0)

    def _write(self, limit: float, step: int, doing: str) -> None:
        self._now = Entry(self._now.number + 1, limit, step, doing)
        if self._file:
            with suppress(OSError):  # such as a full disk: then the supervisor waits longer, or says so
                self._file.seek(0)
                self._file.write(f"{self._now.number} {limit:.3f} {step} {doing}".ljust(WIDTH).encode())


def read_entry(path: Path) -> Entry:
    """The last entry; the first one if there is none yet."""
    try:
        number, limit, step, doing = path.read_text(encoding="utf-8").split(maxsplit=3)
        return Entry(int(number), float(limit), int(step), doing.strip())
    except (OSError, ValueError):
        return Entry()


class Watch:
    """The supervisor's side. Only time in which this process runs counts: Ctrl-Z stops both."""

    def __init__(self, path: Path, poll_s: float) -> None:
        self._path, self._poll_s = path, poll_s
        self.entry, self.quiet = Entry(), 0.0
        self._looked = time.monotonic()

    def is_stuck(self) -> bool:
        """Called every `poll_s` seconds."""
        now = time.monotonic()
        entry = read_entry(self._path)
        self.quiet = 0.0 if entry.number != self.entry.number else self.quiet + min(now - self._looked,
                                                                                     2 * self._poll_s)
        self.entry, self._looked = entry, now
        return self.quiet > entry.limit


def register_stack_dump(path: Path) -> None:
    """From now on SIGUSR2 writes the stacks of all threads there, whatever they are doing."""
    import faulthandler
    import signal

    if os.name == "posix":
        # a descriptor and no file object, which Python would report as unclosed at its end
        faulthandler.register(signal.SIGUSR2, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), all_threads=True)


def dump_stacks(pid: int, path: Path, *, wait_s: float = 3.0) -> str:
    """Makes a worker write its stacks, also one that was stopped by SIGSTOP; returns them, empty if it did not."""
    import signal

    if os.name != "posix":
        return ""
    with suppress(OSError):
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGCONT)
    ends, text = time.monotonic() + wait_s, ""
    while time.monotonic() < ends:
        time.sleep(0.1)
        with suppress(OSError):
            before, text = text, path.read_text(encoding="utf-8", errors="replace")
            if text and text == before:
                break
    return text
