"""The process that trains: reads its config, handles signals, and writes an error report for the supervisor."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import STOPPED_AT_ONCE, DeviceError, FitError, Interrupted, SystemFault, UsageError
from ..core.extras import install_command
from ..core.files import disk_faults
from ..hardware.torch_install import failed_import
from ..planning.plan_file import FallbackPlan
from . import trackers
from .liveness import Heartbeat, register_stack_dump

REPORT, HEARTBEAT, STACKS = "report.json", "heartbeat", "stacks"  # files of one worker
_OUT_OF_RAM = "DefaultCPUAllocator"  # in torch's message when malloc fails


# ---- signals

def stop_signals() -> list[signal.Signals]:
    """The signals that request a stop. One that was ignored at the start stays ignored: `nohup` ignores SIGHUP, and a
    shell without job control ignores SIGINT for what it starts in the background."""
    known = (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP"))
    return [number for number in known if number and signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def blocked_stop_signals() -> Iterator[None]:
    """Stop signals that arrive inside are delivered at the end."""
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Set by a signal or by the supervisor's death. A second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self._requested = False

    def __call__(self) -> bool:
        return self._requested

    def listen(self, supervisor_pipe: int, heartbeat: Heartbeat) -> None:
        """`supervisor_pipe`: a file descriptor whose other end only the supervisor has open. A worker whose supervisor
        died finishes its step and saves; one that waits for something is ended after a time of grace."""
        numbers = stop_signals()
        for number in numbers:
            signal.signal(number, self._on_signal)
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # blocked by the supervisor until now
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # sent by `stty tostop` to background groups that write
        threading.Thread(target=self._wait_for_end_of, args=(supervisor_pipe, heartbeat), daemon=True).start()

    def close(self) -> None:
        """Ignores stop signals from now on: one during Python's own shutdown would print a traceback."""
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._requested and number == signal.SIGINT:
            os._exit(STOPPED_AT_ONCE)  # checkpoints are renamed into place, so none can be left incomplete
        self._requested = True

    def _wait_for_end_of(self, supervisor_pipe: int, heartbeat: Heartbeat) -> None:
        while os.read(supervisor_pipe, 4096):
            pass
        self._requested = True
        died = time.monotonic()
        while not heartbeat.grace_is_over(died):
            time.sleep(0.2)
        os._exit(Interrupted.exit_code)


# ---- the process

def main() -> int:
    line = sys.stdin.readline()
    if not line:  # the supervisor has ended already
        return Interrupted.exit_code
    given = json.loads(line)
    stop = StopRequest()
    here = Path(given["report"]).parent
    try:
        with disk_faults("write in", here):
            heartbeat = Heartbeat(here / HEARTBEAT, given["stuck_s"], given["config"]["log_interval"])
            register_stack_dump(here / STACKS)
    except FitError as error:
        return write_report(given["report"], error)
    stop.listen(sys.stdin.fileno(), heartbeat)
    try:
        from .run import rehearse_only, run

        if given["rehearsal"]:
            rehearse_only(given["config"], given["notes"], given["others"], given["rehearsal"])
        else:
            fallbacks = None if given["fallbacks"] is None else [FallbackPlan(**each) for each in given["fallbacks"]]
            run(given["config"], given["notes"], stop, others=given["others"], fallbacks=fallbacks, heartbeat=heartbeat)
    except FitError as error:
        return write_report(given["report"], error)
    except ModuleNotFoundError as error:
        needed = UsageError(f"Training needs {error.name}, which is not installed here.", install_command("train"))
        return write_report(given["report"], needed)
    except Exception as error:
        return write_report(given["report"], *as_fit_error(error))
    finally:
        stop.close()
    return 0


def as_fit_error(error: Exception) -> tuple[FitError, dict[str, Any] | None]:
    """(an unexpected error as one for the user, the options with which a new process may get further; None: none)."""
    broken = failed_import(error)
    if broken is not None:
        return broken, None
    import torch

    from ..engine.device import compiler_message
    from ..engine.oom import is_out_of_memory

    message = str(error)
    if isinstance(error, MemoryError) or _OUT_OF_RAM in message:
        return SystemFault("Out of CPU RAM (not GPU memory).",
                           "Close other programs, or try a smaller --batch_size."), None
    if is_out_of_memory(error):
        return DeviceError(f"Out of GPU memory: {message.splitlines()[0]}",
                           "Try a smaller --batch_size with more --gradient_accumulation_steps, --loss_chunk=512, "
                           "or --grad_checkpoint."), None
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return DeviceError("torch.compile reached its recompile limit for one function: too many different shapes.",
                           "Resume without it: --resume --compile=False"), None
    if said := compiler_message(error):
        return DeviceError(f"torch.compile failed: {said}.", "--compile=False"), {"compile": False}
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(f"The GPU reported an error that only a new process can clear: {error}"), {}
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return SystemFault(f"{where}{error.strerror or message}."), None
    return FitError("This is a bug in fitgpt or in torch:\n" + "".join(traceback.format_exception(error))), None


def write_report(path: str, error: FitError, restart_with: dict[str, Any] | None = None) -> int:
    """Writes the error for the supervisor; returns the exit code. `restart_with`: options for a new process."""
    report: dict[str, Any] = {"code": error.exit_code, "what": error.what, "fix": error.fix,
                              "restart_with": restart_with, "lost_rank": type(error).__name__ == "LostRank"}
    try:
        Path(path).write_text(json.dumps(report))
    except OSError:  # the disk of the temporary folder is full, for example: the supervisor refers to this
        print(f"{error.what}\n  {error.fix}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    code = main()
    if (code and int(os.environ.get("WORLD_SIZE") or 1) > 1) or trackers.stuck:
        # Without Python's shutdown: that would wait for collectives in which other ranks take part no more, or for a
        # tracker that hangs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
