"""Which signals ask a run to save and stop, and how they are held back while nobody could obey them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def stop_signals() -> list[signal.Signals]:
    """What asks a run to save and stop; but what was ignored when we began stays so, as `nohup` needs."""
    known = (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP"))
    return [number for number in known if number and signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def held_signals() -> Iterator[None]:
    """Requests to stop that come meanwhile wait until the end of it."""
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
