"""The lines that training prints: header, reports, evaluations, closing."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from fitgpt.runs.metrics import Evaluation, MemoryReading, SplitLoss
from fitgpt.show.progress import closing, eval_line, iter_line, run_header
from fitgpt.show.terminal import fit_parts, sparkline
from tests.training_reports import EVALUATION, FACTS, REPORT

# nanoGPT's own patterns, as scripts that plot its logs have them
NANOGPT_ITER = re.compile(r"iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu (-?\d+\.\d\d)%")
NANOGPT_EVAL = re.compile(r"step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})")


def test_iter_line_starts_like_nanogpts_and_adds_figures() -> None:
    line = iter_line(REPORT)
    found = NANOGPT_ITER.match(line)
    assert found is not None
    assert found.groups() == ("100", "2.3456", "123.45", "12.34")
    assert line[found.end():] == ", 98,304 tokens/s, mem 3.21 GiB peak 4.56 GiB, left 3 min 20 s"


def test_iter_line_leaves_out_unknown_figures() -> None:
    line = iter_line(replace(REPORT, mfu=None, memory=MemoryReading(), seconds_left=float("inf")))
    assert line == "iter 100: loss 2.3456, time 123.45ms, mfu n/a, 98,304 tokens/s"


def test_iter_line_shows_skipped_steps_and_loss_scale_only_if_any() -> None:
    assert "skipped" not in iter_line(REPORT)
    line = iter_line(replace(REPORT, skipped=3, loss_scale=1024.0))
    assert ", skipped 3, scale 1024," in line


def test_eval_line_starts_like_nanogpts_and_adds_standard_errors_and_block_size() -> None:
    line = eval_line(EVALUATION)
    found = NANOGPT_EVAL.match(line)
    assert found is not None
    assert found.groups() == ("500", "1.2345", "1.3456")
    assert line[found.end():] == " (± 0.0021, ± 0.0034, block 1024, 412,345 tokens/s)"


def test_eval_line_shows_both_block_sizes_if_they_differ() -> None:
    train, val = EVALUATION.losses
    assert "block 1024 and 512" in eval_line(replace(EVALUATION, losses=(train, replace(val, block=512))))


def test_header_shows_model_device_data_steps_and_notes() -> None:
    header = run_header(FACTS)
    for text in ("77.36M parameters", "width 576", "NVIDIA GeForce RTX 4070 (cuda:0), bfloat16, compiled", "9.04B",
                 "4.40M", "5,000, of 524,288 tokens = 32 × 16 × 1024", "58.3 TFLOP/s", *FACTS.notes):
        assert text in header
    assert "not compiled" in run_header(replace(FACTS, compiled=False))
    assert "from step 1,500 to 5,000" in run_header(replace(FACTS, start_step=1500))
    assert "nothing to train: step 6,000 of 5,000\n" in run_header(replace(FACTS, start_step=6000))
    assert max(map(len, run_header(FACTS, width=60).splitlines())) <= 60
    assert "TFLOP/s" not in run_header(replace(FACTS, peak_flops=None))


def test_header_works_without_a_config() -> None:
    assert "77.36M parameters\n" in run_header(replace(FACTS, config={}))


def test_closing_shows_best_loss_run_folder_and_hints() -> None:
    text = closing("out/demo", 5000, 200.0, EVALUATION.of("val"), ["fitgpt sample out/demo"])
    assert text == ("5,000 steps in 3 min 20 s; best val loss 1.3456 ± 0.0034 at block 1024\n"
                    "The run is in out/demo.\nfitgpt sample out/demo")
    assert closing("out", 1, 1.0, None, []).startswith("1 step in 1.0 s\n")


@pytest.mark.parametrize(("values", "width", "drawn"), [
    ([8, 7, 6, 5, 4, 3, 2, 1], 8, "█▇▆▅▄▃▂▁"), ([4, 4, 2, 2], 2, "█▁"), ([1.0], 5, "▁"), ([], 5, ""),
    ([2, float("nan"), 1], 5, "█▁"), ([1, 2], 0, ""),
])
def test_sparkline(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_an_evaluation_of_one_window_has_no_standard_error() -> None:
    one = SplitLoss("val", 1.5, math.inf, 1, 1024)
    assert eval_line(Evaluation(5, (one,), 100.0, MemoryReading())) == (
        "step 5: val loss 1.5000 (block 1024, 100 tokens/s)")
    assert "best val loss 1.5000 at block 1024" in closing("out", 5, 1.0, one, [])


def test_fit_parts_keeps_the_lowest_ranks_in_their_order() -> None:
    parts = [(1, "bbbb"), (0, "aaaa"), (2, "cccc")]
    assert fit_parts(parts, 16) == ["bbbb", "aaaa", "cccc"]
    assert fit_parts(parts, 15) == ["bbbb", "aaaa", ""]
    assert fit_parts(parts, 9) == ["", "aaaa", ""]
    assert fit_parts(parts, 3) == ["", "", ""]
