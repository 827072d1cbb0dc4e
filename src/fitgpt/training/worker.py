"""The process that trains: takes its orders, listens for signals, and leaves its last words for the supervisor."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from ..core.errors import STOPPED_AT_ONCE, DeviceError, FitError, Interrupted, SystemFault, UsageError
from ..nouns import Rung
from .signals import stop_signals

_OUT_OF_RAM = "DefaultCPUAllocator"  # torch's words where malloc gave nothing


class StopRequest:
    """Set by a signal, or by the supervisor's death; a second Ctrl-C ends the process on the spot."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def listen(self, lifeline: int) -> None:
        """`lifeline`: a file descriptor of which the supervisor alone holds the other end."""
        heard = stop_signals()
        for number in heard:
            signal.signal(number, self._on_signal)
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)  # the supervisor held them back until now
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # of a terminal that stops background groups that write
        threading.Thread(target=self._on_end_of, args=(lifeline,), daemon=True).start()

    def close(self) -> None:
        """Nothing that is asked from now on matters, but Python's own shutdown would die of it."""
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._asked and number == signal.SIGINT:
            os._exit(STOPPED_AT_ONCE)  # checkpoints are renamed into place: there is nothing to tear
        self._asked = True

    def _on_end_of(self, lifeline: int) -> None:
        while os.read(lifeline, 4096):
            pass
        self._asked = True


def main() -> int:
    line = sys.stdin.readline()
    if not line:  # the supervisor is gone already
        return Interrupted.exit_code
    orders = json.loads(line)
    stop = StopRequest()
    stop.listen(sys.stdin.fileno())
    try:
        rungs = [Rung(**rung) for rung in orders["rungs"]] if orders["rungs"] is not None else None
        if orders["rehearsal"]:
            from ..commands.rehearse import rehearse_here

            rehearse_here(orders["config"], orders["notes"], orders["others"], orders["rehearsal"])
        else:
            from .run import run

            run(orders["config"], orders["notes"], stop, others=orders["others"], rungs=rungs)
    except FitError as error:
        return leave_words(orders["words"], error, restart=False)
    except ModuleNotFoundError as error:
        needed = UsageError(f"Training needs {error.name}, which is not installed here.", "pip install -e '.[train]'")
        return leave_words(orders["words"], needed, restart=False)
    except Exception as error:
        return leave_words(orders["words"], *described(error))
    finally:
        stop.close()
    return 0


def described(error: Exception) -> tuple[FitError, bool]:
    """An error nobody foresaw, in words; and whether a new process may get further."""
    import torch

    from ..engine.oom import is_out_of_memory

    said = str(error)
    if isinstance(error, MemoryError) or _OUT_OF_RAM in said:
        return SystemFault("The machine's RAM ran out, not the card's memory.",
                           "Close other programs, or try a smaller --batch_size."), False
    if is_out_of_memory(error):
        return DeviceError(f"The card's memory ran out: {said.splitlines()[0]}",
                           "Try a smaller --batch_size with more --gradient_accumulation_steps, --loss_chunk=512, "
                           "or --grad_checkpoint."), False
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return DeviceError("torch's compiler reached its limit of graphs for one function: too many shapes were met.",
                           "Go on without it: --resume --compile=False"), False
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(f"The GPU reported a fault that only a new process can clear: {error}"), True
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return SystemFault(f"{where}{error.strerror or said}."), False
    return FitError("fitgpt has a bug, or torch does:\n" + "".join(traceback.format_exception(error))), False


def leave_words(path: str, error: FitError, restart: bool) -> int:
    words: dict[str, Any] = {"code": error.exit_code, "what": error.what, "fix": error.fix, "restart": restart}
    Path(path).write_text(json.dumps(words))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
