"""`fitgpt train`'s parent process: it never loads torch. It settles what can be settled without a GPU, puts the
allocator's environment in place, starts the process that trains, forwards signals to it, and turns however that
process ends into a sentence and an exit code.

Orders go to the child as one line of JSON on its standard input, which then stays open: if this process dies, the
child reads the end of it, saves and stops. The child's last words come back in a file.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.fields import Assignment
from ..config.run_config import RunConfig
from ..core.errors import (
    STOPPED_AT_ONCE,
    CheckpointError,
    DataError,
    DeviceError,
    DoesNotFit,
    FitError,
    Interrupted,
    NumericsError,
    SystemFault,
    UsageError,
)
from ..hardware.nvidia import check_allocator_env, child_environment
from ..planning import plan_file
from ..planning.resolve import settle
from ..runs.folder import can_resume
from ..show.live import say
from ..show.terminal import can_redraw
from . import memory_check
from .ranks import require_one_process
from .signals import held_signals, stop_signals

# The blank line is for a live bar to draw over.
STOPPING = b"\nStopping: finishing what is under way, then saving. Ctrl-C once more stops at once.\n\n"
RESTARTS = 3  # after a fault of the device that only a new process can clear
# Signals that nobody gets from a fault of its own.
_SENT = ("SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGTERM", "SIGHUP", "SIGINT")
_ERRORS = {kind.exit_code: kind for kind in
           (DoesNotFit, UsageError, DataError, CheckpointError, DeviceError, NumericsError, SystemFault, Interrupted)}


@dataclass(frozen=True)
class Orders:
    """What the child is told."""

    config: dict[str, Any]
    notes: list[str]
    words: str = ""  # the file its last words go to
    others: dict[str, int] = field(default_factory=dict)   # what others hold of each card, by its uuid
    rungs: list[dict[str, Any]] | None = None              # smaller plans, where a plan.json has them
    rehearsal: str = ""                                    # only rehearse, and write this file


def train(assignments: Sequence[Assignment]) -> int:
    require_one_process(os.environ)
    check_allocator_env(os.environ)
    config, notes = settle(assignments)
    if config.fit:
        from ..commands.fit import for_train  # only here: it brings the search with it

        config, why = for_train(config)
        notes = [*notes, *why]
    planned = plan_file.read(config.plan) if config.plan else None
    config = replace(config, plan="")  # what it says is in the config now
    rungs = [rung._asdict() for rung in planned.rungs_of(config)] if planned and planned.rungs is not None else None
    for attempt in range(RESTARTS + 1):
        checked = memory_check.check(config, planned)  # each time: what others hold may be another after hours
        code, words = run_child(Orders(config.to_dict(), notes, others=checked.others, rungs=rungs))
        if not words.get("restart") or attempt == RESTARTS or not can_resume(config.out_dir):
            break
        say(f"fitgpt: {words['what']} Starting again from the last checkpoint ({attempt + 1} of at most {RESTARTS} "
            "times).", warning=True)
        config = replace(config, init_from="resume")
    return conclude(code, words, config)


def run_child(orders: Orders) -> tuple[int, dict[str, Any]]:
    """Starts the process that trains and waits for it: (its exit code, its last words)."""
    with tempfile.TemporaryDirectory(prefix="fitgpt-") as folder:
        words = Path(folder) / "words.json"
        with held_signals():  # until both processes can take them: the child inherits this, and lets them in itself
            # A process group of its own: Ctrl-C reaches the child once, from here, and not twice.
            apart: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
            child = subprocess.Popen([sys.executable, "-P", "-m", "fitgpt.training.worker"], stdin=subprocess.PIPE,
                                     env=child_environment(os.environ), **apart)
            relay = Relay(child)
        assert child.stdin is not None
        with relay:
            with suppress(BrokenPipeError):  # it died before it could listen: its exit code says how
                child.stdin.write(json.dumps({**orders.__dict__, "words": str(words)}).encode() + b"\n")
                child.stdin.flush()
            code = child.wait()
            with suppress(BrokenPipeError):
                child.stdin.close()
        if code < 0:
            show_cursor()
        if relay.killed and code < 0:
            return STOPPED_AT_ONCE, {}
        return code, heard(words)


def heard(words: Path) -> dict[str, Any]:
    """The child's last words; none where it died of saying them, or had no disk to say them on."""
    try:
        told = json.loads(words.read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


class Relay:
    """Passes on to the child what is asked of this process, until it is closed.

    The first request to stop is the child's to obey. A second Ctrl-C ends it on the spot, even where it cannot
    listen: checkpoints are renamed into place, so there is nothing to tear. A second SIGTERM or SIGHUP is no such
    wish: when a terminal closes, both the shell and the kernel send one.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.killed = False
        self._child = child
        self._asked = False
        if os.name == "posix":
            handlers = {**dict.fromkeys(stop_signals(), self._stop), signal.SIGTSTP: self._suspend}
            self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        else:  # the console gives Ctrl-C to both: this process has only to live on
            self._previous = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._asked else handler)  # this process is about to end as asked

    def _stop(self, number: int, frame: object) -> None:
        if self._asked and number == signal.SIGINT:
            self.killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            return
        if not self._asked:
            self._asked = True
            with suppress(OSError):  # the terminal may be what has gone
                os.write(2, STOPPING)  # past Python's buffers, which the interrupted code may be holding
        self._child.send_signal(number)

    def _suspend(self, number: int, frame: object) -> None:
        """Ctrl-Z stops both, and `fg` or `bg` wakes both."""
        self._child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._child.send_signal(signal.SIGCONT)


def show_cursor() -> None:
    """A live display that is killed leaves the terminal's cursor hidden."""
    if can_redraw():
        print("\x1b[?25h", end="", flush=True)


def conclude(code: int, words: Mapping[str, Any], config: RunConfig) -> int:
    """The child's end as this process's: its exit code, or the error that it left words about."""
    if code in (0, STOPPED_AT_ONCE):
        return code
    fix = f"To go on from the last checkpoint: {resume_command(config.out_dir)}" if can_resume(config.out_dir) else ""
    if not words:
        raise death_in_words(code, fix)
    raise _ERRORS.get(words["code"], FitError)(words["what"], words["fix"] or fix)


def resume_command(out_dir: str) -> str:
    return shlex.join(["fitgpt", "train", "--init_from=resume", f"--out_dir={out_dir}"])


def death_in_words(code: int, fix: str) -> FitError:
    if code >= 0:
        return FitError(f"The training process ended with exit code {code} and no last words.", fix)
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    if name == "SIGKILL":
        return SystemFault(
            "The system killed the training process (signal 9). Nearly always that means the machine's RAM, not the "
            "card's memory, ran out; `dmesg | tail` says so.", fix)
    if name == "SIGBUS":
        return DataError("The training process died of a bus error (signal 7): a data file was cut short or its disk "
                         "went away while it was being read.", fix)
    if name in _SENT:
        return SystemFault(f"{name} ended the training process: another program sent it, or a limit of the system did "
                           "(`ulimit -a`).", fix)
    return FitError(f"The training process died of {name} inside a native library: torch, the driver or a kernel.", fix)
