"""The written tape against recorded runs of our own engine on an H200: every figure of every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitgpt.memory.accuracy import Figure, by_run, compare_own
from fitgpt.memory.setting import Setting

GOLDEN = Path(__file__).parents[1] / "golden"
H200 = Setting((9, 0), "2.11")


def read(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))["rows"]  # type: ignore[no-any-return]


ROWS = read("h200_kernels.json")
FIGURES = compare_own(ROWS, H200)


def named(figure: Figure) -> str:
    return f"{figure.run} {figure.name}"


def test_every_kernel_that_was_chosen_was_recorded() -> None:
    chosen = json.loads((GOLDEN / "kernels.json").read_text(encoding="utf-8"))["cases"]
    assert [(row["kernel"], row["config"]) for row in ROWS] == [(case["kernel"], case["config"]) for case in chosen]
    assert all("phases" in row and "out_of_memory" not in row for row in ROWS)


@pytest.mark.parametrize("figure", FIGURES, ids=named)
def test_a_recorded_run_is_forecast_to_within_a_few_kib(figure: Figure) -> None:
    """Scalars that only a trace of the GPU shows are not on the tape."""
    assert abs(figure.off) <= 16 * 1024, f"{figure.predicted:,} for {figure.measured:,}: {figure.percent:+.3f} %"


def test_reserved_is_forecast_to_the_byte() -> None:
    assert all(figure.off == 0 for figure in FIGURES if figure.name.endswith("reserved"))


def test_the_page_on_accuracy_shows_these_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert by_run(FIGURES, {row["name"]: row["config"] for row in ROWS}) in page
