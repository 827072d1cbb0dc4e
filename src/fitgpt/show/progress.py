"""Progress of a training run: nanoGPT's lines, or a live bar on a terminal; a header before and a closing after them.

Displays only write, and change no terminal attribute, so that a run may be in a background process group.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO, cast

from ..core.units import NEAREST_SIGNS, show_bytes, show_count, show_seconds, show_steps
from ..planning.forecast import MemoryPlan
from ..runs.metrics import PHASES, Evaluation, MemoryReading, PhaseMemory, RunFacts, SplitLoss, StepReport
from .plan_text import phase_table, verdict
from .terminal import LABEL_WIDTH, bar, fit_parts, is_dumb, known_width, labelled_rows, sparkline, table, wrap

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

REFRESHES_PER_SECOND = 4  # each takes a few milliseconds of CPU time, and the CPU also launches the GPU's kernels
SLOW_STEP_S = 1.0         # longer steps show how far they are
OLD_FIGURES_S = 3.0       # older figures show their age
MAX_CURVE_POINTS = 512    # losses kept for the sparkline; beyond that every other one is dropped
MIN_BAR = 10              # columns


# ---- text


def run_header(facts: RunFacts, width: int | None = None) -> str:
    """A labelled row per fact, wrapped to `width` if one is given."""
    rows = header_rows(facts)
    return labelled_rows(rows, width) if width else "\n".join(f"{label:<{LABEL_WIDTH}}{text}" for label, text in rows)


def header_rows(facts: RunFacts) -> list[tuple[str, str]]:
    """(label, text), the notes last, each in a row of its own."""
    config = facts.config
    shape = ", ".join(f"{name} {config[option]}" for name, option in (
        ("layers", "n_layer"), ("heads", "n_head"), ("width", "n_embd"), ("block", "block_size")) if option in config)
    compiled = "compiled" if facts.compiled else "not compiled"
    batch = (f" = {config['gradient_accumulation_steps']} × {config['batch_size']} × {config['block_size']}"
             if {"gradient_accumulation_steps", "batch_size", "block_size"} <= config.keys() else "")
    resumed = f"from step {facts.start_step:,} " if facts.start_step else ""
    steps = (f"{resumed}to {facts.max_iters:,}, of {facts.tokens_per_step:,} tokens{batch}"
             if facts.start_step < facts.max_iters
             else f"nothing to train: step {facts.start_step:,} of {facts.max_iters:,}")
    rows = [
        ("model", f"{show_count(facts.params)} parameters" + (f": {shape}" if shape else "")),
        ("device", f"{facts.devices}, {facts.dtype}, {compiled}"),
        ("data", f"{show_count(facts.train_tokens)} tokens to train on, {show_count(facts.val_tokens)} to validate"),
        ("steps", steps),
    ]
    if facts.peak_flops:
        rows.append(("mfu", f"of {facts.peak_source}"))
    return rows + [("note", note) for note in facts.notes]


def memory_plan(plan: MemoryPlan) -> str:
    """The verdict, and the forecast of each phase."""
    return f"{'memory':<{LABEL_WIDTH}}{verdict(plan)}\n{phase_table(plan)}"


def plan_vs_measured(planned: Mapping[str, PhaseMemory], measured: Mapping[str, PhaseMemory]) -> str:
    """Measured and forecast memory, phase by phase; '=' where they agree to the byte."""
    def compared(found: int, forecast: int) -> tuple[str, str, str]:
        return show_bytes(found), show_bytes(forecast), difference(found, forecast)

    rows = [("", "allocated", "forecast", "", "reserved", "forecast", "")]
    rows += [(PHASES.get(phase, phase), *compared(memory.allocated, planned[phase].allocated),
              *compared(memory.reserved, planned[phase].reserved))
             for phase, memory in measured.items() if phase in planned]
    return "memory, measured against forecast\n" + table(rows)


def difference(found: int | None, forecast: int | None) -> str:
    """+1.20 %; "=" where both are the same; empty where one is unknown."""
    if found is None or not forecast:
        return ""
    return "=" if found == forecast else f"{100 * (found / forecast - 1):+.2f} %"


def iter_line(report: StepReport) -> str:
    """nanoGPT's line, so that scripts that parse its logs work, with more figures at its end."""
    parts = [f"iter {report.step}: loss {report.loss:.4f}", f"time {report.seconds * 1000:.2f}ms",
             f"mfu {show_mfu(report.mfu)}", f"{report.tokens_per_s:,.0f} tokens/s"]
    if report.memory != MemoryReading():  # else this device has no counters
        parts.append(f"mem {show_bytes(report.memory.reserved)} peak {show_bytes(report.memory.peak_reserved)}")
    if report.skipped:
        parts.append(f"skipped {report.skipped}")
    if report.loss_scale != 1.0:
        parts.append(f"scale {report.loss_scale:g}")
    if math.isfinite(report.seconds_left):
        parts.append(f"left {show_seconds(report.seconds_left)}")
    return ", ".join(parts)


def eval_line(evaluation: Evaluation) -> str:
    """nanoGPT's line, then standard errors and block sizes: losses at different block sizes do not compare."""
    losses = ", ".join(f"{loss.split} loss {loss.mean:.4f}" for loss in evaluation.losses)
    blocks = " and ".join(dict.fromkeys(str(loss.block) for loss in evaluation.losses))
    errors = [error for loss in evaluation.losses if (error := _standard_error(loss))]
    return f"step {evaluation.step}: {losses} ({', '.join([*errors, f'block {blocks}'])}, " \
           f"{evaluation.tokens_per_s:,.0f} tokens/s)"


def _standard_error(loss: SplitLoss) -> str:
    """Empty if it was not measured: one window has no standard error."""
    return f"± {loss.stderr:.4f}" if math.isfinite(loss.stderr) else ""


def closing(run_dir: str, steps: int, seconds: float, best: SplitLoss | None, hints: Sequence[str]) -> str:
    """How many steps the run made, its best loss, where it is, and hints on what to do next."""
    loss = ""
    if best:
        error = _standard_error(best)
        loss = f"; best {best.split} loss {best.mean:.4f}{f' {error}' if error else ''} at block {best.block}"
    return "\n".join([f"{show_steps(steps)} in {show_seconds(seconds)}{loss}", f"The run is in {run_dir}.", *hints])


def show_mfu(mfu: float | None) -> str:
    return "n/a" if mfu is None else f"{mfu:.2%}"


# ---- streams


class SafeStream:
    """A stream that never raises: once it is closed or its reader is gone, everything written to it is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, NEAREST_SIGNS).decode(self.encoding))
            except (OSError, ValueError):
                self._drop()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._drop()

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        try:  # Python flushes the buffer on exit, and must not fail then
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, cast(TextIO, stream).fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass


def say(text: str, *, warning: bool = False) -> None:
    """Print text to standard output, or a warning to standard error, even if nobody reads it any more."""
    stream = SafeStream(sys.stderr if warning else sys.stdout)
    stream.write(wrap_log(text) + "\n")
    stream.flush()


def wrap_log(text: str) -> str:
    """Text whose lines fit the width, if that is known. nanoGPT's part of a line is short and comes first, so that
    scripts read it unchanged."""
    width = known_width()
    if width is None:
        return text
    return "\n".join(part for line in text.splitlines()
                     for part in (wrap(line, width, indent=2) if len(line) > width else [line]))


# ---- displays


def open_display(facts: RunFacts, *, terminal: bool) -> Display:
    """A display that has printed the run's header. `terminal`: whether standard output is one."""
    stream = SafeStream(sys.stdout)
    return RichDisplay(stream, facts) if terminal and not is_dumb() else Display(stream, facts)


class Display:
    """The run's header, then one line per report, as nanoGPT prints them."""

    def __init__(self, stream: SafeStream, facts: RunFacts) -> None:
        self._stream = stream
        self._start(facts)

    def _start(self, facts: RunFacts) -> None:
        self._stream.write(run_header(facts, known_width()) + "\n")

    def advance(self, steps: float) -> None:
        """`steps` have been launched on the device. Called at every micro-step: must be cheap."""

    def step(self, report: StepReport) -> None:
        self._print(iter_line(report))

    def eval_progress(self, done: int, total: int, split: str) -> None:
        """`done` of `total` windows have been evaluated."""

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        self._print(eval_line(evaluation) + (" best so far" if best else ""), "bold green" if best else "bold")

    def saved(self, path: str, seconds: float, nbytes: int) -> None:
        self._print(f"saved {path} ({show_bytes(nbytes)} in {show_seconds(seconds)})", "dim")

    def note(self, sentence: str) -> None:
        self._print(sentence)

    def warn(self, sentence: str) -> None:
        self._print(f"warning: {sentence}", "yellow")

    def close(self) -> None:
        """Restore the terminal. May be called twice."""
        self._stream.flush()

    def _print(self, text: str, style: str = "") -> None:
        """`style`: one of rich's, where colours can be shown."""
        self._stream.write(wrap_log(text) + "\n")
        self._stream.flush()


class RichDisplay(Display):
    """A progress bar that moves between reports, with evaluations and checkpoints as lines above it."""

    def _start(self, facts: RunFacts) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text

        self._console = Console(file=cast(TextIO, self._stream), force_terminal=True, highlight=False, markup=False)
        if min(self._console.size) < 1:  # COLUMNS=0: rich uses it as it is, the standard library asks the terminal
            self._console.size = shutil.get_terminal_size()
        rows = Table.grid(padding=(0, 2))
        for label, text in header_rows(facts):
            rows.add_row(Text(label, "cyan"), Text(text))
        self._console.print(rows)
        self._bars = TrainingBars(facts)
        self._live = Live(self._bars, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start()
        self._console.show_cursor(True)  # rich hides it, and a killed run could not show it again

    def advance(self, steps: float) -> None:
        self._bars.launched = steps

    def step(self, report: StepReport) -> None:
        self._bars.update(report)

    def eval_progress(self, done: int, total: int, split: str) -> None:
        self._bars.evaluating = (done, total, split)

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        self._bars.evaluating = None
        super().evaluated(evaluation, best)

    def close(self) -> None:
        self._bars.evaluating, self._bars.closed = None, True
        self._live.stop()

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style))  # a style given to print would also colour the bar below


class TrainingBars:
    """The redrawn lines: a bar, the figures of the last report, and a bar of the evaluation while one runs.

    The training thread writes the fields and rich's thread draws them. Each field is replaced as a whole, so no lock is
    needed.
    """

    def __init__(self, facts: RunFacts) -> None:
        self.launched: float = facts.start_step  # steps that the CPU has launched on the device
        self.closed = False   # the device has finished them all
        self.evaluating: tuple[int, int, str] | None = None
        self._facts = facts
        self._report: StepReport | None = None
        self._losses: tuple[float, ...] = ()
        self._every = 1       # every n-th report's loss is kept for the sparkline
        self._reports = 0
        self._since = time.monotonic()  # the run's start, then the last report

    def update(self, report: StepReport) -> None:
        if self._reports % self._every == 0:
            self._losses += (report.loss,)
        self._reports += 1
        if len(self._losses) > MAX_CURVE_POINTS:
            self._losses, self._every = self._losses[::2], self._every * 2
        self.launched = max(self.launched, report.step + 1)
        self._report, self._since = report, time.monotonic()

    def steps_done(self) -> float:
        """Steps that the device has probably finished, extrapolated from the last report's speed.

        At most what the CPU has launched, plus the micro-step under way. Asking the device would synchronise with it.
        The first report is not used: its time includes compilation.
        """
        report = self._report
        if self.closed or report is None or report.seconds <= 0 or self._reports < 2:
            return self.launched
        by_now = report.step + 1 + (time.monotonic() - self._since) / report.seconds
        under_way = 0 if self.evaluating else 1 / max(int(self._facts.config.get("gradient_accumulation_steps", 1)), 1)
        return min(by_now, self.launched + under_way, self._facts.max_iters)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = max(options.max_width, 16)
        unicode = not options.ascii_only
        yield self._training_line(width, unicode)
        evaluating = self.evaluating
        if self._report is not None or evaluating is None:
            yield self._figures_line(width, unicode)
        if evaluating is not None:
            done, total, split = evaluating
            yield _bar_line(width, f"evaluating {split}", done, total, [(0, f"{done:,}/{total:,}")], "green", unicode)

    def _training_line(self, width: int, unicode: bool) -> RenderableType:
        done, total, report = self.steps_done(), self._facts.max_iters, self._report
        whole = int(done)
        figures = [(0, f"{whole:,}/{total:,}"), (3, f"{int(100 * done / total)}%" if total else "")]
        if report is not None and report.seconds >= SLOW_STEP_S and done < total:
            figures.append((2, f"this step {done - whole:>3.0%}"))
        if report is not None and math.isfinite(report.seconds_left):
            since = done - (report.step + 1)
            left = max(report.seconds_left - since * report.seconds, 0.0)
            figures.append((1, f"{show_seconds(left)} left" if done < total else "done"))
        return _bar_line(width, "training", done, total, figures, "cyan", unicode)

    def _figures_line(self, width: int, unicode: bool) -> RenderableType:
        from rich.text import Text

        report = self._report
        if report is None:
            waited = show_seconds(time.monotonic() - self._since)
            compiling = ", compiling" if self._facts.compiled else ""
            return Text(f"first step{compiling}: {waited}", style="dim", no_wrap=True)
        memory, age = report.memory, time.monotonic() - self._since
        counted = memory != MemoryReading()
        curve = sparkline(self._losses, 12 if width < 100 else 24) if unicode else ""
        parts = [(rank, style, text) for rank, style, text in (
            (0, "bold", f"loss {report.loss:.4f}"),
            (3, "cyan", curve),
            (1, "green", f"{report.tokens_per_s:,.0f} tokens/s"),
            (4, "", f"mfu {show_mfu(report.mfu)}"),
            (2, "", f"mem {show_bytes(memory.reserved)}" if counted else ""),
            (5, "", f"peak {show_bytes(memory.peak_reserved)}" if counted else ""),
            (2, "yellow", f"skipped {report.skipped}" if report.skipped else ""),
            (6, "dim", f"{show_seconds(age)} ago" if age > OLD_FIGURES_S else "")) if text]
        shown = fit_parts([(rank, text) for rank, _, text in parts], width)
        return Text("  ", no_wrap=True).join(
            Text(text, style=style) for text, (_, style, _) in zip(shown, parts, strict=True) if text)


def _bar_line(width: int, label: str, done: float, total: int, figures: list[tuple[int, str]], style: str,
              unicode: bool) -> RenderableType:
    """A label, a bar over the remaining width, figures; with little room the label is left out first."""
    from rich.text import Text

    label, *shown = fit_parts([(9, label), *figures], width - MIN_BAR - 2)
    texts = [text for text in shown if text]
    room = width - sum(len(text) + 2 for text in (label, *texts) if text)
    drawn = Text(bar(done / total if total else 1.0, room, unicode=unicode), style)
    return Text("  ", no_wrap=True).join([*([Text(label)] if label else []), drawn, *map(Text, texts)])
