"""Time, tokens and utilisation of the steps since the last report. Evaluation and saving do not count as training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..nouns import GPTConfig


def flops_a_token(config: GPTConfig, block: int) -> int:
    """Forward and backward, as PaLM's appendix B counts them and nanoGPT does: 6 per weight, plus attention."""
    return 6 * config.count_params(positions=False) + 12 * config.n_layer * config.n_embd * block


class Meter:
    """`synchronize` waits until the device has done all that it was given."""

    def __init__(self, tokens_a_step: int, synchronize: Callable[[], None]) -> None:
        self._tokens_a_step, self._synchronize = tokens_a_step, synchronize
        self._steps = 0
        self._since = time.perf_counter()
        self._paused = 0.0
        self._smoothed = 0.0

    def stepped(self) -> None:
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training time. Kernels run asynchronously: steps that are still queued belong to
        the time before, and what is queued inside does not belong to the step after it."""
        self._synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._paused += time.perf_counter() - started

    def lap(self) -> tuple[float, float]:
        """(seconds a step, tokens a second) since the last lap; call it when the device has caught up."""
        now = time.perf_counter()
        seconds = max(now - self._since - self._paused, 1e-9) / max(self._steps, 1)
        self._since, self._paused, self._steps = now, 0.0, 0
        self._smoothed = seconds if not self._smoothed else 0.8 * self._smoothed + 0.2 * seconds
        return seconds, self._tokens_a_step / seconds

    def time_left(self, steps: int) -> float:
        """From a smoothed step time, so that one slow step (a suspended laptop) does not frighten anybody."""
        return self._smoothed * steps
