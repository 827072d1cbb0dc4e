"""Displays of a training run: plain lines, a live bar that fits any terminal, and streams that fail."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fitgpt.core.units import MiB
from fitgpt.show import progress
from fitgpt.show.progress import eval_line, iter_line, run_header
from tests.training_reports import EVALUATION, FACTS, REPORT


def run_through(display: progress.Display) -> None:
    display.advance(1)
    display.step(replace(REPORT, step=0))
    display.eval_progress(3, 10, "val")
    display.evaluated(EVALUATION, True)
    display.saved("out/checkpoints/000500", 0.83, 927 * MiB)
    display.note("the learning rate is at its floor")
    display.warn("something is [odd] here")
    display.close()
    display.close()


def plain() -> tuple[progress.Display, io.StringIO]:
    stream = io.StringIO()
    return progress.Display(progress.SafeStream(stream), FACTS), stream


def rich_screen(monkeypatch: pytest.MonkeyPatch, columns: int) -> tuple[progress.RichDisplay, io.StringIO]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    return progress.RichDisplay(progress.SafeStream(stream), FACTS), stream


def lines_of(stream: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").split("\n")


def test_without_a_terminal_each_report_is_one_line() -> None:
    display, stream = plain()
    run_through(display)
    output = stream.getvalue().removeprefix(run_header(FACTS) + "\n").splitlines()
    assert output == [
        iter_line(replace(REPORT, step=0)), eval_line(EVALUATION) + " best so far",
        "saved out/checkpoints/000500 (927.0 MiB in 0.8 s)", "the learning rate is at its floor",
        "warning: something is [odd] here"]


@pytest.mark.parametrize("columns", [1, 16, 20, 40, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    display, stream = rich_screen(monkeypatch, columns)
    run_through(display)
    assert max(len(line) for line in lines_of(stream)) <= max(columns, 16)


def test_a_wide_terminal_shows_all_figures_and_a_narrow_one_the_main_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 120)
    run_through(display)
    shown = "\n".join(lines_of(stream))
    for text in ("training", "1/5,000", "3 min 20 s left", "loss 2.3456", "98,304 tokens/s", "mfu 12.34%",
                 "mem 3.21 GiB", "peak 4.56 GiB", "something is [odd] here", "[triton]", "best so far"):
        assert text in shown
    display, stream = rich_screen(monkeypatch, 40)
    run_through(display)
    shown = "\n".join(lines_of(stream))
    assert "1/5,000  0%  3 min 20 s left" in shown
    assert "loss 2.3456" in shown
    assert "peak" not in shown


def drawn(bars: progress.TrainingBars) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=100, force_terminal=False).print(bars)
    return stream.getvalue()


def test_bar_and_time_left_advance_between_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("fitgpt.show.progress.time.monotonic", lambda: now)
    bars = progress.TrainingBars(FACTS)
    assert "first step, compiling" in drawn(bars)
    bars.update(replace(REPORT, step=0))
    bars.update(REPORT)
    assert "101/5,000" in drawn(bars)
    bars.launched = 101 + 810
    now += 810 * REPORT.seconds + 0.01
    assert "911/5,000" in drawn(bars)
    assert "1 min 40 s left" in drawn(bars)


def test_a_slow_step_shows_its_own_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is extrapolated, but never beyond the micro-step under way after the launched ones."""
    now = 1000.0
    monkeypatch.setattr("fitgpt.show.progress.time.monotonic", lambda: now)
    bars = progress.TrainingBars(FACTS)
    bars.update(replace(REPORT, step=0, seconds=60.0))  # the first: kernels were compiled
    bars.launched = 3 + 8 / 32
    now += 5
    assert "3/5,000" in drawn(bars)
    assert "this step 25%" in drawn(bars)
    assert "5.0 s ago" in drawn(bars)
    bars.update(replace(REPORT, seconds=10.0))
    bars.launched = 110
    now += 4
    assert "101/5,000" in drawn(bars)
    assert "this step 40%" in drawn(bars)
    now += 12
    assert "102/5,000" in drawn(bars)
    assert "this step 60%" in drawn(bars)
    bars.launched = 102 + 3 / 32
    now += 60
    assert "102/5,000" in drawn(bars)
    assert "this step 12%" in drawn(bars)  # 4 of 32 micro-steps: the last one is under way


def test_the_bar_shows_the_launched_steps_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 80)
    for done in (1, 2):
        display.step(replace(REPORT, step=done - 1, seconds=3600.0))
    display.advance(7.25)  # a quarter of a step that was then dropped
    display.close()
    assert "7/5,000" in lines_of(stream)[-3]


def test_an_evaluation_has_its_own_bar_while_it_runs() -> None:
    bars = progress.TrainingBars(FACTS)
    bars.evaluating = (40, 200, "val")
    assert "evaluating val" in drawn(bars)
    assert "40/200" in drawn(bars)
    bars.evaluating = None
    assert "evaluating" not in drawn(bars)


def test_the_sparkline_of_a_long_run_keeps_a_bounded_number_of_losses() -> None:
    bars = progress.TrainingBars(FACTS)
    for step in range(20_000):
        bars.update(replace(REPORT, step=step, loss=20_000.0 - step))
    assert len(bars._losses) <= 513
    assert bars._losses[0] == 20_000.0
    assert bars._losses[-1] < 200.0


def test_the_cursor_stays_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 80)
    output = stream.getvalue()
    display.close()
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")


def test_stdout_is_restored_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout
    display, _ = rich_screen(monkeypatch, 80)
    run_through(display)
    assert sys.stdout is before


@pytest.mark.parametrize(("terminal", "term", "kind"), [
    (True, "xterm", progress.RichDisplay),
    (True, "dumb", progress.Display),
    (False, "xterm", progress.Display),
])
def test_only_a_terminal_that_is_not_dumb_gets_a_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str,
                                                     kind: type) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    display = progress.open_display(FACTS, terminal=terminal)
    display.close()
    assert type(display) is kind


def test_columns_0_means_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 0)
    run_through(display)
    assert "loss 2.3456" in "\n".join(lines_of(stream))


def test_no_color_disables_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    display, stream = rich_screen(monkeypatch, 80)
    run_through(display)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue())


# ---- streams that fail


class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")])
def test_a_stream_that_fails_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    run_through(progress.Display(progress.SafeStream(Broken(error)), FACTS))
    monkeypatch.setenv("COLUMNS", "80")
    run_through(progress.RichDisplay(progress.SafeStream(Broken(error)), FACTS))


def test_displays_work_without_stdout() -> None:
    run_through(progress.Display(progress.SafeStream(None), FACTS))


def test_characters_that_the_stream_cannot_encode_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    run_through(progress.Display(progress.SafeStream(stream), FACTS))
    assert b"+/- 0.0021" in raw.getvalue()


def test_a_closed_pipe_gives_exit_code_0_and_no_error_output() -> None:
    script = ("from dataclasses import replace\n"
              "from fitgpt.show import progress\n"
              "from tests.training_reports import FACTS, REPORT\n"
              "display = progress.open_display(FACTS, terminal=False)\n"
              "for step in range(3000): display.step(replace(REPORT, step=step))\n"
              "display.close()\n")
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               cwd=Path(__file__).parents[2])  # where tests.training_reports is found
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), errors) == (0, b"")


def test_plain_display_does_not_import_rich() -> None:
    script = ("import sys; sys.modules['rich'] = None\n"
              "from fitgpt.show import progress\n"
              "from tests.training_reports import FACTS\n"
              "progress.Display(progress.SafeStream(sys.stdout), FACTS).note('fine')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])  # where tests.training_reports is found
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "fine"), done.stderr
