"""What people see: nanoGPT's shapes where lines are parsed, a bar that fits any terminal, and never a crash."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from fitgpt.core.units import GiB, MiB
from fitgpt.nouns import Evaluation, MemoryReading, RunFacts, SplitLoss, StepReport
from fitgpt.show import live, text

FACTS = RunFacts(
    config=dict(n_layer=12, n_head=12, n_embd=576, block_size=1024, batch_size=16, gradient_accumulation_steps=32),
    params=77_360_000, device="cuda:0", device_name="NVIDIA GeForce RTX 4070", dtype="bfloat16", compiled=True,
    peak_flops=58.3e12, peak_source="RTX 4070, 58.3 TFLOP/s dense half precision (formula)", tokens_per_step=524288,
    train_tokens=9_040_000_000, val_tokens=4_400_000, start_step=0, max_iters=5000, versions={},
    notes=("compile: on, because [triton] can run here.",))
REPORT = StepReport(
    step=100, loss=2.34561, lr=1e-3, grad_norm=1.0, seconds=0.12345, tokens_per_s=98304.4, mfu=0.1234, skipped=0,
    loss_scale=1.0, memory=MemoryReading(3 * GiB, int(3.21 * GiB), 4 * GiB, int(4.56 * GiB)), seconds_left=200.0)
EVALUATION = Evaluation(500, (SplitLoss("train", 1.23454, 0.0021, 1600, 1024),
                              SplitLoss("val", 1.34561, 0.0034, 1600, 1024)), 412345.0, MemoryReading())

# nanoGPT's own patterns, as scripts that plot its logs have them
NANOGPT_ITER = re.compile(r"iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu (-?\d+\.\d\d)%")
NANOGPT_EVAL = re.compile(r"step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})")


# Lines.

def test_an_iter_line_begins_as_nanogpts_and_goes_on_with_ours() -> None:
    line = text.iter_line(REPORT)
    found = NANOGPT_ITER.match(line)
    assert found is not None
    assert found.groups() == ("100", "2.3456", "123.45", "12.34")
    assert line[found.end():] == ", 98,304 tok/s, mem 3.21 GiB peak 4.56 GiB, left 3 min 20 s"


def test_what_is_not_known_is_not_made_up() -> None:
    line = text.iter_line(replace(REPORT, mfu=None, memory=MemoryReading(), seconds_left=float("inf")))
    assert line == "iter 100: loss 2.3456, time 123.45ms, mfu n/a, 98,304 tok/s"


def test_skipped_steps_and_a_loss_scale_are_told_only_when_there_are_any() -> None:
    assert "skipped" not in text.iter_line(REPORT)
    line = text.iter_line(replace(REPORT, skipped=3, loss_scale=1024.0))
    assert ", skipped 3, scale 1024," in line


def test_an_evaluation_line_begins_as_nanogpts_and_carries_error_and_block() -> None:
    line = text.eval_line(EVALUATION)
    found = NANOGPT_EVAL.match(line)
    assert found is not None
    assert found.groups() == ("500", "1.2345", "1.3456")
    assert line[found.end():] == " (± 0.0021, ± 0.0034, block 1024, 412,345 tok/s)"


def test_losses_at_different_blocks_say_both() -> None:
    train, val = EVALUATION.losses
    assert "block 1024 and 512" in text.eval_line(replace(EVALUATION, losses=(train, replace(val, block=512))))


def test_the_header_says_model_device_data_steps_and_every_note() -> None:
    header = text.run_header(FACTS)
    for words in ("77.36M parameters", "width 576", "NVIDIA GeForce RTX 4070 (cuda:0), bfloat16, compiled", "9.04B",
                  "4.40M", "5,000, of 524,288 tokens = 32 × 16 × 1024", "58.3 TFLOP/s", *FACTS.notes):
        assert words in header
    assert "not compiled" in text.run_header(replace(FACTS, compiled=False))
    assert "from step 1,500 to 5,000" in text.run_header(replace(FACTS, start_step=1500))
    assert "TFLOP/s" not in text.run_header(replace(FACTS, peak_flops=None))


def test_a_header_needs_no_config_beyond_the_facts() -> None:
    assert "77.36M parameters\n" in text.run_header(replace(FACTS, config={}))


def test_the_closing_says_where_the_run_is_and_what_to_type() -> None:
    said = text.closing("out/demo", 5000, 200.0, EVALUATION.of("val"), ["fitgpt sample out/demo"])
    assert said == ("5,000 steps in 3 min 20 s; best val loss 1.3456 ± 0.0034 at block 1024\n"
                    "The run is in out/demo.\nfitgpt sample out/demo")
    assert text.closing("out", 1, 1.0, None, []).startswith("1 step in 1.0 s\n")


@pytest.mark.parametrize(("values", "width", "drawn"), [
    ([8, 7, 6, 5, 4, 3, 2, 1], 8, "█▇▆▅▄▃▂▁"), ([4, 4, 2, 2], 2, "█▁"), ([1.0], 5, "▁"), ([], 5, ""),
    ([2, float("nan"), 1], 5, "█▁"), ([1, 2], 0, ""),
])
def test_a_sparkline_falls_as_the_loss_does(values: list[float], width: int, drawn: str) -> None:
    assert text.sparkline(values, width) == drawn


def test_of_one_window_no_error_is_told() -> None:
    one = SplitLoss("val", 1.5, math.inf, 1, 1024)
    assert text.eval_line(Evaluation(5, (one,), 100.0, MemoryReading())) == (
        "step 5: val loss 1.5000 (block 1024, 100 tok/s)")
    assert "best val loss 1.5000 at block 1024" in text.closing("out", 5, 1.0, one, [])


def test_a_narrow_line_keeps_what_ranks_first_in_its_own_order() -> None:
    parts = [(1, "bbbb"), (0, "aaaa"), (2, "cccc")]
    assert text.fit_parts(parts, 16) == ["bbbb", "aaaa", "cccc"]
    assert text.fit_parts(parts, 15) == ["bbbb", "aaaa", ""]
    assert text.fit_parts(parts, 9) == ["", "aaaa", ""]
    assert text.fit_parts(parts, 3) == ["", "", ""]


# Displays.

def run_through(display: live.Display) -> None:
    display.start(FACTS)
    display.advance(1)
    display.step(replace(REPORT, step=0))
    display.eval_progress(3, 10, "val")
    display.evaluated(EVALUATION, True)
    display.saved("out/checkpoints/000500", 0.83, 927 * MiB)
    display.note("the learning rate is at its floor")
    display.warn("something is [odd] here")
    display.close()
    display.close()


def plain() -> tuple[live.PlainDisplay, io.StringIO]:
    stream = io.StringIO()
    return live.PlainDisplay(live.Unbreakable(stream)), stream


def rich_screen(monkeypatch: pytest.MonkeyPatch, columns: int) -> tuple[live.RichDisplay, io.StringIO]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    return live.RichDisplay(live.Unbreakable(stream)), stream


def lines_of(stream: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").split("\n")


def test_without_a_terminal_there_is_one_line_a_report() -> None:
    display, stream = plain()
    run_through(display)
    said = stream.getvalue().removeprefix(text.run_header(FACTS) + "\n").splitlines()
    assert said == [
        text.iter_line(replace(REPORT, step=0)), text.eval_line(EVALUATION) + " best so far",
        "saved out/checkpoints/000500 (927.0 MiB in 0.8 s)", "the learning rate is at its floor",
        "warning: something is [odd] here"]


@pytest.mark.parametrize("columns", [1, 16, 20, 40, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    display, stream = rich_screen(monkeypatch, columns)
    run_through(display)
    assert max(len(line) for line in lines_of(stream)) <= max(columns, 16)


def test_a_wide_bar_shows_all_and_a_narrow_one_what_matters_most(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 120)
    run_through(display)
    shown = "\n".join(lines_of(stream))
    for words in ("training", "1/5,000", "3 min 20 s left", "loss 2.3456", "98,304 tok/s", "mfu 12.34%",
                  "mem 3.21 GiB", "peak 4.56 GiB", "something is [odd] here", "[triton]", "best so far"):
        assert words in shown
    display, stream = rich_screen(monkeypatch, 40)
    run_through(display)
    shown = "\n".join(lines_of(stream))
    assert "1/5,000  0%  3 min 20 s left" in shown
    assert "loss 2.3456" in shown
    assert "peak" not in shown


def drawn(gauge: live._Gauge) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=100, force_terminal=False).print(gauge)
    return stream.getvalue()


def test_the_bar_moves_between_reports_and_the_time_left_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("fitgpt.show.live.time.monotonic", lambda: now)
    gauge = live._Gauge()
    gauge.begin(FACTS)
    assert "first step, compiling" in drawn(gauge)
    gauge.take(replace(REPORT, step=0))
    gauge.take(REPORT)
    assert "101/5,000" in drawn(gauge)
    gauge.handed_over = 101 + 810
    now += 810 * REPORT.seconds + 0.01
    assert "911/5,000" in drawn(gauge)
    assert "1 min 40 s left" in drawn(gauge)


def test_a_slow_step_moves_the_bar_while_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is many steps ahead of the device, and nobody asks the device; or it is not, and no step is invented."""
    now = 1000.0
    monkeypatch.setattr("fitgpt.show.live.time.monotonic", lambda: now)
    gauge = live._Gauge()
    gauge.begin(FACTS)
    gauge.take(replace(REPORT, step=0, seconds=60.0))  # the first: kernels were compiled
    gauge.handed_over = 3 + 8 / 32
    now += 5
    assert "3/5,000" in drawn(gauge)
    assert "this step 25%" in drawn(gauge)
    assert "5.0 s ago" in drawn(gauge)
    gauge.take(replace(REPORT, seconds=10.0))
    gauge.handed_over = 110
    now += 4
    assert "101/5,000" in drawn(gauge)
    assert "this step 40%" in drawn(gauge)
    now += 12
    assert "102/5,000" in drawn(gauge)
    assert "this step 60%" in drawn(gauge)
    gauge.handed_over = 102 + 3 / 32
    now += 60
    assert "102/5,000" in drawn(gauge)
    assert "this step 12%" in drawn(gauge)  # 4 of 32 micro-steps: the last one is under way


def test_a_bar_that_is_left_standing_says_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 80)
    display.start(FACTS)
    for done in (1, 2):
        display.step(replace(REPORT, step=done - 1, seconds=3600.0))
    display.advance(7.25)  # a quarter of a step that was then dropped
    display.close()
    assert "7/5,000" in lines_of(stream)[-3]


def test_an_evaluation_has_a_bar_of_its_own_while_it_runs() -> None:
    gauge = live._Gauge()
    gauge.begin(FACTS)
    gauge.evaluating = (40, 200, "val")
    assert "evaluating val" in drawn(gauge)
    assert "40/200" in drawn(gauge)
    gauge.evaluating = None
    assert "evaluating" not in drawn(gauge)


def test_the_loss_curve_of_a_long_run_stays_small_and_keeps_its_shape() -> None:
    gauge = live._Gauge()
    for step in range(20_000):
        gauge.take(replace(REPORT, step=step, loss=20_000.0 - step))
    assert len(gauge._losses) <= 513
    assert gauge._losses[0] == 20_000.0
    assert gauge._losses[-1] < 200.0


def test_the_cursor_is_visible_while_the_bar_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 80)
    display.start(FACTS)
    said = stream.getvalue()
    display.close()
    assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l")


def test_stdout_is_itself_again_after_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout
    display, _ = rich_screen(monkeypatch, 80)
    run_through(display)
    assert sys.stdout is before


@pytest.mark.parametrize(("terminal", "term", "kind"), [
    (True, "xterm", live.RichDisplay), (True, "dumb", live.PlainDisplay), (False, "xterm", live.PlainDisplay),
])
def test_only_a_terminal_that_can_move_its_cursor_gets_a_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str,
                                                             kind: type) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    display = live.open_display(FACTS, terminal=terminal)
    display.close()
    assert isinstance(display, kind)


def test_columns_0_asks_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream = rich_screen(monkeypatch, 0)
    run_through(display)
    assert "loss 2.3456" in "\n".join(lines_of(stream))


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    display, stream = rich_screen(monkeypatch, 80)
    run_through(display)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue())


# Streams that fail.

class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, words: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")])
def test_a_reader_that_went_away_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    run_through(live.PlainDisplay(live.Unbreakable(Broken(error))))
    monkeypatch.setenv("COLUMNS", "80")
    run_through(live.RichDisplay(live.Unbreakable(Broken(error))))


def test_without_any_stdout_the_run_goes_on() -> None:
    run_through(live.PlainDisplay(live.Unbreakable(None)))


def test_letters_the_stream_does_not_have_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    run_through(live.PlainDisplay(live.Unbreakable(stream)))
    assert b"+/- 0.0021" in raw.getvalue()


def test_a_pipe_cut_in_the_middle_leaves_exit_code_0_and_silence() -> None:
    script = ("from tests.test_show import *\n"
              "display = live.open_display(FACTS, terminal=False)\n"
              "for step in range(3000): display.step(replace(REPORT, step=step))\n"
              "display.close()\n")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), complaint) == (0, b"")


def test_lines_need_no_rich() -> None:
    script = ("import sys; sys.modules['rich'] = None\n"
              "from fitgpt.show import live, text\n"
              "live.PlainDisplay(live.Unbreakable(sys.stdout)).note('fine')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
