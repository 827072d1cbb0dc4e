"""Time candidates on the GPU of this machine, and choose the fastest by measurement.

A child process builds each config, trains it for a few seconds on random tokens and reports tokens per second. The
parent does not load torch. The child process is training/timing.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from ..config.run_config import RunConfig
from ..hardware.allocator_env import child_environment
from .fit_goals import FitResult
from .fit_search import PERMISSIONS, ScoredConfig
from .speed import MEASURED_ERROR

Timer = Callable[[RunConfig, int], "float | str"]  # config, memory limit → tokens per second, or what went wrong
SECONDS_EACH = 2.0     # for steps of one micro-step, and as much for steps of two
STARTS_WITHIN_S = 300  # compiling a large model takes a minute or two


def rerank(fitted: FitResult, timer: Timer, say: Callable[[str], None] = lambda text: None) -> FitResult:
    """The result with the choice by measurement: the given settings, unless others are faster by more than the error of
    two measurements; of those as fast as the fastest, the ones that need least. Candidates that could not be timed come
    last."""
    if fitted.chosen is None:
        return fitted
    unchanged = (fitted.given,) if fitted.given.headroom >= 0 and fitted.chosen.flags else ()
    timed, failed, notes = [], [], []
    candidates = (fitted.chosen, *fitted.runners_up, *unchanged)
    say(f"timing {len(candidates)} plans, each for a few seconds once it is compiled …")
    for number, scored in enumerate(candidates, 1):
        found = timer(scored.config, fitted.budget.reserve_limit)
        if isinstance(found, str):
            failed.append(scored)
            notes.append(f"{_name(scored)} could not be timed: {found}")
        else:
            timed.append(scored._replace(measured=found))
            say(f"{number} of {len(candidates)}: {_name(scored)}: {found:,.0f} tokens/s")
    if not timed:
        return fitted._replace(notes=(*fitted.notes, *notes))
    chosen = next((each for each in timed if each.config == fitted.given.config), None)
    for permission in PERMISSIONS:  # more permission must gain more than the error of two measurements
        better = [each for each in timed if each.permission == permission and _gains(each, chosen)]
        near = [each for each in better if not any(_gains(other, each) for other in better)]
        chosen = min(near, key=lambda each: each.needs, default=chosen)
    others = sorted((each for each in timed if each is not chosen), key=lambda each: -(each.measured or 0))
    return fitted._replace(chosen=chosen, runners_up=(*others, *failed), step_up=None, error=MEASURED_ERROR,
                           notes=(*fitted.notes, *notes))


def _gains(scored: ScoredConfig, other: ScoredConfig | None) -> bool:
    return other is None or (scored.measured or 0) > (1 + MEASURED_ERROR) * (other.measured or 0)


def _name(scored: ScoredConfig) -> str:
    return " ".join(scored.flags) or "as given"


class TimingProcess:
    """Times one config after another in one child process, so that torch loads once. After a failure the next config
    gets a new process."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[str] | None = None
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, below

    def __enter__(self) -> TimingProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stop()
        self._errors.close()

    def time(self, config: RunConfig, cap: int) -> float | str:
        """Tokens per second under a memory limit of the allocator; or a sentence on why there are none."""
        child = self._child = self._child or self._start()
        timeout = threading.Timer(STARTS_WITHIN_S + 10 * self._seconds, child.kill)
        began = time.monotonic()
        timeout.start()
        try:
            result = self._request(child, {"config": config.to_dict(), "cap": cap, "seconds": self._seconds})
        finally:
            timeout.cancel()
        if child.poll() is not None and time.monotonic() - began >= timeout.interval:
            result = f"it had not finished after {timeout.interval:.0f} s."
        if isinstance(result, str):
            self._stop()
        return result

    def _request(self, child: subprocess.Popen[str], request: dict[str, Any]) -> float | str:
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        except OSError:
            pass  # it has ended: its stderr says why
        for line in child.stdout:
            result = parse_result(line)
            if result is not None:
                return result
        code = child.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"the process ended with exit code {code}."

    def _start(self) -> subprocess.Popen[str]:
        self._errors.seek(0)
        self._errors.truncate()
        return subprocess.Popen([sys.executable, "-P", "-m", "fitgpt.training.timing"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=self._errors, text=True,
                                env=child_environment(os.environ))

    def _stop(self) -> None:
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None


def parse_result(line: str) -> float | str | None:
    """The result in a line of the child's output; None if the line is something else."""
    try:
        result = json.loads(line)
        return float(result["tokens_per_s"]) if "tokens_per_s" in result else str(result["error"])
    except (ValueError, KeyError, TypeError):
        return None
