"""Training runs recorded in bench/results: GPT-2 XL in 12 GB, step times, a neighbour that takes memory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core.units import GiB

ROOT = Path(__file__).resolve().parents[2]


def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / name).read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "batches"), [("capped_xl_on_h200.json", (2, 8)),
                                               ("capped_xl_exact_on_h200.json", (2,))])
def test_gpt2_xl_trains_evaluates_saves_and_resumes_in_12_gb(name: str, batches: Sequence[int]) -> None:
    found = recorded(name)
    assert found["cap_bytes"] <= 11.3 * GiB + 1
    for batch, row in zip(batches, found["rows"], strict=True):
        assert f"--batch_size={batch}" in row["flags"]
        assert "error" not in row
        assert row["steps"] == [0, 1, 2, 3]        # the last one after a resume
        assert len(row["save_s"]) == 2
        assert max(row["train_reserved"], row["eval_reserved"]) <= found["cap_bytes"]
        assert row["losses"] == sorted(row["losses"], reverse=True)


def test_reports_after_an_evaluation_show_the_same_step_time_as_the_others() -> None:
    """bench/step_times.py: before queued steps were waited for, they showed as little as 42 % of it."""
    rows = recorded("step_times_h200.json")["rows"]
    assert {(row["compile"], row["log_interval"]) for row in rows} == {
        (compiled, interval) for compiled in (True, False) for interval in (1, 3, 10)}
    for compiled in (True, False):
        reports = [report for row in rows if row["compile"] == compiled for report in row["reports"]]
        usual = statistics.median(report["seconds"] for report in reports if not report["evaluation"])
        after = [report["seconds"] for report in reports if report["evaluation"]]
        assert len(after) >= 15
        assert all(abs(seconds / usual - 1) < 0.06 for seconds in after)
        assert max(report["mfu"] for report in reports) < 0.5


def test_a_run_continues_when_another_process_takes_the_gpu_memory() -> None:
    found = recorded("neighbour_h200.json")
    beside = found["beside"]
    assert beside["exit_code"] == 0
    assert beside["neighbour"]["took_bytes"] > 130 * GiB
    assert beside["steps_in_order"] == list(range(found["steps"]))
    failed = [row["phase"] for row in beside["events"] if row["kind"] == "oom"]
    assert failed.count("train") >= 1
    assert failed.count("eval") >= 1
    assert [row["kind"] for row in beside["events"] if row["kind"].startswith("step_")] == ["step_down", "step_up"]
    assert found["largest_difference_of_a_loss_after"] < 1.5 * found["largest_difference_of_a_loss_before"]
