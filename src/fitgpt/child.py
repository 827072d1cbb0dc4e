"""The process that trains: takes its orders, listens for signals, and leaves its last words for the supervisor."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

from .errors import STOPPED_AT_ONCE, DeviceError, FitError, UsageError


class StopRequest:
    """Set by the first signal, or by the supervisor's death; a second signal ends the process on the spot."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def listen(self, lifeline: IO[str]) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._on_signal)
        threading.Thread(target=self._on_end_of, args=(lifeline,), daemon=True).start()

    def _on_signal(self, number: int, frame: object) -> None:
        if self._asked:
            os._exit(STOPPED_AT_ONCE)  # checkpoints are renamed into place: there is nothing to tear
        self._asked = True
        # Written past Python's buffers, which the interrupted code may be holding.
        os.write(2, b"\nStopping: finishing what is under way, then saving. Once more stops at once.\n")

    def _on_end_of(self, lifeline: IO[str]) -> None:
        lifeline.read()
        self._asked = True


def main() -> int:
    orders = json.loads(sys.stdin.readline())
    stop = StopRequest()
    stop.listen(sys.stdin)
    try:
        from .run import run

        run(orders["config"], orders["notes"], stop)
    except FitError as error:
        return leave_words(orders["words"], error, restart=False)
    except ModuleNotFoundError as error:
        needed = UsageError(f"Training needs {error.name}, which is not installed here.", "pip install 'fitgpt[train]'")
        return leave_words(orders["words"], needed, restart=False)
    except Exception as error:
        return leave_words(orders["words"], *described(error))
    return 0


def described(error: Exception) -> tuple[FitError, bool]:
    """An error nobody foresaw, in words; and whether a new process may get further."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(f"The card's memory ran out: {str(error).splitlines()[0]}",
                           "Try a smaller --batch_size with more --gradient_accumulation_steps, --loss_chunk=512, "
                           "or --grad_checkpoint."), False
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(f"The GPU reported a fault that only a new process can clear: {error}"), True
    return FitError("fitgpt has a bug, or torch does:\n" + "".join(traceback.format_exception(error))), False


def leave_words(path: str, error: FitError, restart: bool) -> int:
    words: dict[str, Any] = {"what": error.what, "fix": error.fix, "restart": restart}
    Path(path).write_text(json.dumps(words))
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
