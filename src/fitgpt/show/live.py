"""What a person sees while a run trains: a live bar on a terminal, nanoGPT's lines anywhere else.

Only ever writes: no terminal attribute is touched, so a run may sit in a background process group.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from ..core.units import NEAREST_SIGNS, show_bytes, show_seconds
from ..nouns import Evaluation, RunFacts, StepReport
from . import text
from .terminal import is_dumb

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

REFRESHES_PER_SECOND = 4  # each takes a few milliseconds of the host, which also feeds the device
SLOW_STEP_S = 1.0         # a step that takes longer shows how far it is
OLD_FIGURES_S = 3.0       # figures that are older say so
_CURVE_POINTS = 512       # losses kept for the sparkline; then every other one is dropped


class Display(Protocol):
    def start(self, facts: RunFacts) -> None: ...
    def advance(self, steps: float) -> None:
        """So many steps are handed to the device. Called at every micro-step: must cost nothing."""
    def step(self, report: StepReport) -> None: ...
    def eval_progress(self, done: int, total: int, split: str) -> None: ...
    def evaluated(self, evaluation: Evaluation, best: bool) -> None: ...
    def saved(self, path: str, seconds: float, nbytes: int) -> None: ...
    def note(self, sentence: str) -> None: ...
    def warn(self, sentence: str) -> None: ...
    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""


def open_display(facts: RunFacts, *, terminal: bool) -> Display:
    """A display that has said what the run is. `terminal`: whether a person watches standard output."""
    stream = Unbreakable(sys.stdout)
    moving = terminal and not is_dumb()
    display: Display = RichDisplay(stream) if moving else PlainDisplay(stream)
    display.start(facts)
    return display


class Unbreakable:
    """A stream that no reader can break: once it is closed or its reader is gone, what is written is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, words: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(words.encode(self.encoding, NEAREST_SIGNS).decode(self.encoding))
            except (OSError, ValueError):
                self._give_up()
        return len(words)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    def _give_up(self) -> None:
        stream, self._stream = self._stream, None
        try:  # what the buffer still holds must go somewhere, or Python complains of it when it exits
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, cast(TextIO, stream).fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass


def say(words: str, *, warning: bool = False) -> None:
    """Words beside a display: to standard output, or as a warning to standard error, as long as somebody reads it."""
    stream = Unbreakable(sys.stderr if warning else sys.stdout)
    stream.write(words + "\n")
    stream.flush()


class PlainDisplay:
    """One line a report, in nanoGPT's shape."""

    def __init__(self, stream: Unbreakable) -> None:
        self._stream = stream

    def start(self, facts: RunFacts) -> None:
        self._say(text.run_header(facts))

    def advance(self, steps: float) -> None:
        pass

    def step(self, report: StepReport) -> None:
        self._say(text.iter_line(report))

    def eval_progress(self, done: int, total: int, split: str) -> None:
        pass

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        self._say(text.eval_line(evaluation) + (" best so far" if best else ""))

    def saved(self, path: str, seconds: float, nbytes: int) -> None:
        self._say(text.saved_line(path, seconds, nbytes))

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def warn(self, sentence: str) -> None:
        self._say(f"warning: {sentence}")

    def close(self) -> None:
        self._stream.flush()

    def _say(self, words: str) -> None:
        self._stream.write(words + "\n")
        self._stream.flush()


class RichDisplay:
    """A bar that moves between reports, with evaluations and checkpoints as lines above it."""

    def __init__(self, stream: Unbreakable) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=cast(TextIO, stream), force_terminal=True, highlight=False, markup=False)
        if min(self._console.size) < 1:  # COLUMNS=0: rich takes it at its word, the standard library asks the terminal
            self._console.size = shutil.get_terminal_size()
        self._gauge = _Gauge()
        self._live = Live(self._gauge, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)

    def start(self, facts: RunFacts) -> None:
        from rich.table import Table

        rows = Table.grid(padding=(0, 2))
        for label, words in text.header_rows(facts):
            rows.add_row(f"[cyan]{label}[/]", _escaped(words))
        self._console.print(rows, markup=True)
        self._gauge.begin(facts)
        self._live.start()
        self._console.show_cursor(True)  # rich hides it, and a run that is killed could not bring it back

    def advance(self, steps: float) -> None:
        self._gauge.handed_over = steps

    def step(self, report: StepReport) -> None:
        self._gauge.take(report)

    def eval_progress(self, done: int, total: int, split: str) -> None:
        self._gauge.evaluating = (done, total, split)

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        self._gauge.evaluating = None
        self._say(text.eval_line(evaluation) + (" best so far" if best else ""), "bold green" if best else "bold")

    def saved(self, path: str, seconds: float, nbytes: int) -> None:
        self._say(text.saved_line(path, seconds, nbytes), "dim")

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def warn(self, sentence: str) -> None:
        self._say(f"warning: {sentence}", "yellow")

    def close(self) -> None:
        self._gauge.evaluating, self._gauge.settled = None, True
        self._live.stop()

    def _say(self, words: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(words, style))  # a style given to print would colour the bar below, too


class _Gauge:
    """The moving lines: a bar, the figures of the last report, and a bar of the evaluation while one runs.

    Written by the training thread, drawn by rich's: each field is replaced whole, so neither waits for the other.
    """

    def __init__(self) -> None:
        self.handed_over = 0.0  # steps, to the device
        self.settled = False    # the device has done them all
        self.evaluating: tuple[int, int, str] | None = None
        self._facts: RunFacts | None = None
        self._report: StepReport | None = None
        self._losses: tuple[float, ...] = ()
        self._every = 1  # one report in so many is kept for the curve
        self._reports = 0
        self._since = time.monotonic()  # the run's start, then the last report

    def begin(self, facts: RunFacts) -> None:
        self._facts, self.handed_over, self._since = facts, facts.start_step, time.monotonic()

    def take(self, report: StepReport) -> None:
        if self._reports % self._every == 0:
            self._losses += (report.loss,)
        self._reports += 1
        if len(self._losses) > _CURVE_POINTS:
            self._losses, self._every = self._losses[::2], self._every * 2
        self.handed_over = max(self.handed_over, report.step + 1)
        self._report, self._since = report, time.monotonic()

    def steps_done(self, facts: RunFacts) -> float:
        """As many as the last report's pace makes likely by now, but no more than the host has handed over and the
        micro-step after that: only the device knows, and to ask it would make it wait. The first report's pace is that
        of kernels being compiled, and says nothing."""
        report = self._report
        if self.settled or report is None or report.seconds <= 0 or self._reports < 2:
            return self.handed_over
        by_now = report.step + 1 + (time.monotonic() - self._since) / report.seconds
        under_way = 0 if self.evaluating else 1 / max(int(facts.config.get("gradient_accumulation_steps", 1)), 1)
        return min(by_now, self.handed_over + under_way, facts.max_iters)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self._facts is None:
            return
        width = max(options.max_width, 16)
        unicode = not options.ascii_only
        yield self._bar_line(self._facts, width)
        evaluating = self.evaluating
        if self._report is not None or evaluating is None:
            yield self._figures_line(self._facts, width, unicode)
        if evaluating is not None:
            done, total, split = evaluating
            yield _line(width, f"evaluating {split}", done, total, [(0, f"{done:,}/{total:,}")], "green")

    def _bar_line(self, facts: RunFacts, width: int) -> RenderableType:
        done, total, report = self.steps_done(facts), facts.max_iters, self._report
        whole = int(done)
        figures = [(0, f"{whole:,}/{total:,}"), (3, f"{int(100 * done / total)}%" if total else "")]
        if report is not None and report.seconds >= SLOW_STEP_S and done < total:
            figures.append((2, f"this step {done - whole:>3.0%}"))
        if report is not None and math.isfinite(report.seconds_left):
            since = done - (report.step + 1)
            left = max(report.seconds_left - since * report.seconds, 0.0)
            figures.append((1, f"{show_seconds(left)} left" if done < total else "done"))
        return _line(width, "training", done, total, figures, "cyan")

    def _figures_line(self, facts: RunFacts, width: int, unicode: bool) -> RenderableType:
        from rich.text import Text

        report = self._report
        if report is None:
            waited = show_seconds(time.monotonic() - self._since)
            return Text(f"first step{', compiling' if facts.compiled else ''}: {waited}", style="dim", no_wrap=True)
        memory, age = report.memory, time.monotonic() - self._since
        counted = text.has_counters(memory)
        curve = text.sparkline(self._losses, 12 if width < 100 else 24) if unicode else ""
        parts = [(0, "bold", f"loss {report.loss:.4f}"),
                 (3, "cyan", curve),
                 (1, "green", f"{report.tokens_per_s:,.0f} tok/s"),
                 (4, "", f"mfu {text.show_mfu(report.mfu)}"),
                 (2, "", f"mem {show_bytes(memory.reserved)}" if counted else ""),
                 (5, "", f"peak {show_bytes(memory.peak_reserved)}" if counted else ""),
                 (2, "yellow", f"skipped {report.skipped}" if report.skipped else ""),
                 (6, "dim", f"{show_seconds(age)} ago" if age > OLD_FIGURES_S else "")]
        shown = text.fit_parts([(rank, words) for rank, _, words in parts if words], width)
        styles = [style for _, style, words in parts if words]
        return Text("  ", no_wrap=True).join(
            Text(words, style=style) for words, style in zip(shown, styles, strict=True) if words)


def _line(width: int, label: str, done: float, total: int, figures: list[tuple[int, str]],
          style: str) -> RenderableType:
    """A label, a bar over the room that is left, figures; the label goes first where there is little room."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = 10  # below this a bar says nothing
    shown = [words for words in text.fit_parts([*figures, (9, label)], width - bar - 2) if words]
    named = label in shown
    shown = [words for words in shown if words != label]
    room = width - sum(len(words) + 2 for words in shown) - (len(label) + 2 if named else 0)
    row = Table.grid(padding=(0, 2, 0, 0))
    cells: list[RenderableType] = [label] if named else []
    cells.append(ProgressBar(total=max(total, 1), completed=min(done, total), width=room, complete_style=style,
                             finished_style=style))
    for _ in (*cells, *shown):
        row.add_column(no_wrap=True)
    row.add_row(*cells, *shown)
    return row


def _escaped(words: str) -> str:
    from rich.markup import escape

    return escape(words)
