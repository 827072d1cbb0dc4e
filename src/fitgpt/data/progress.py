"""How far is the preparation? A bar where there is a terminal, a line every few seconds where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.units import show_bytes, show_count, show_seconds

_LINE_EVERY_S = 5.0
_BAR_EVERY_S = 0.1

Told = Callable[[int, int], None]   # bytes of text read, tokens written: both from the very beginning


class Pace:
    """How much of the whole is done, and how long the rest takes. The whole is the tokens asked for or the
    size of the text, whichever is reached first; unknown if neither is."""

    def __init__(self, text_bytes: int | None, max_tokens: int | None, read: int, tokens: int) -> None:
        self._text_bytes, self._max_tokens = text_bytes, max_tokens
        self._started, self._tokens_before = time.monotonic(), tokens
        self._done_before = self.done(read, tokens) or 0.0

    def done(self, read: int, tokens: int) -> float | None:
        parts = [part / whole for part, whole in ((read, self._text_bytes), (tokens, self._max_tokens)) if whole]
        return min(1.0, max(parts)) if parts else None

    def words(self, read: int, tokens: int) -> str:
        seconds = max(1e-9, time.monotonic() - self._started)
        words = [f"{show_count(tokens)} tokens", f"{show_bytes(read)} of text",
                 f"{show_count(round((tokens - self._tokens_before) / seconds))} tokens/s"]
        done = self.done(read, tokens)
        if done is not None and done > self._done_before:
            left = seconds * (1 - done) / (done - self._done_before)
            words = [f"{done:4.0%}", *words, f"{show_seconds(left)} left"]
        return " · ".join(words)


@contextmanager
def shown(pace: Pace) -> Iterator[Told]:
    """A function that may be called after every document."""
    if sys.stderr.isatty():
        with _bar(pace) as told:
            yield told
    else:
        yield _every(_LINE_EVERY_S, lambda read, tokens: print(pace.words(read, tokens), file=sys.stderr, flush=True))


@contextmanager
def _bar(pace: Pace) -> Iterator[Told]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=30), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def draw(read: int, tokens: int) -> None:
            done = pace.done(read, tokens)
            progress.update(task, description=pace.words(read, tokens), completed=done,
                            total=None if done is None else 1.0)

        yield _every(_BAR_EVERY_S, draw)


def _every(seconds: float, act: Told) -> Told:
    last = time.monotonic()

    def told(read: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            act(read, tokens)

    return told
