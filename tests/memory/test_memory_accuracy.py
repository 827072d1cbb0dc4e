"""The written tape against 25 recorded runs of nanoGPT's train.py on an H200: every figure of every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitgpt.memory.accuracy import Figure, compare, table
from fitgpt.memory.allocator import replay, reserved_in_other_orders
from fitgpt.memory.nanogpt import write
from fitgpt.memory.nanorun import NanoGPTRun

RESULTS = Path(__file__).parents[2] / "bench" / "results"
RECORDS = [RESULTS / "nanogpt_h200.json", RESULTS / "nanogpt_more_h200.json"]


def rows_of(record: Path) -> list[dict[str, Any]]:
    return json.loads(record.read_text(encoding="utf-8"))["rows"]  # type: ignore[no-any-return]


ROWS = [row for record in RECORDS for row in rows_of(record)]
TABLES = [compare(rows_of(record)) for record in RECORDS]
FIGURES = [figure for figures in TABLES for figure in figures]

# All figures are forecast to the byte but for these, which are so many percent off.
OFF = {
    ("30M eager", "train_peak"): -0.044,
    ("30M eager", "eval_peak"): -0.006,
    ("124M bias batch 8 eager", "train_peak"): -0.007,
    ("gpt2 dropout eager", "eval_first_reserved"): -0.027,
    ("124M compiled", "train_first_peak"): -0.027,
    ("124M compiled", "train_peak"): +0.063,
    ("124M compiled", "train_reserved"): +0.259,
    ("124M compiled", "eval_peak"): +0.024,
    ("124M compiled", "idle"): +0.047,
    ("30M compiled", "train_peak"): +0.026,
    ("30M float32 compiled", "eval_peak"): +0.027,
    ("30M float32 compiled", "idle"): +0.063,
    ("shakespeare compiled", "train_peak"): +0.034,
}


def named(figure: Figure) -> str:
    return f"{figure.run} {figure.name}"


def test_the_records_have_seven_figures_of_each_of_25_runs() -> None:
    assert [len(figures) for figures in TABLES] == [7 * 7, 18 * 7]


@pytest.mark.parametrize("figure", FIGURES, ids=named)
def test_a_run_is_forecast_to_the_byte_but_for_the_figures_named_here(figure: Figure) -> None:
    off = OFF.get((figure.run, figure.name), 0.0)
    assert figure.percent == pytest.approx(off, abs=0.001 if off else 0)


@pytest.mark.parametrize("figure", FIGURES, ids=named)
def test_none_is_farther_off_than_promised(figure: Figure) -> None:
    """Compiled within 1 %, eager within 0.2 %, never more than 0.5 % below."""
    assert figure.percent >= -0.5
    assert abs(figure.percent) <= (0.2 if figure.run.endswith("eager") else 1.0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_range_of_what_is_reserved_holds_the_measured_figure(row: dict[str, Any]) -> None:
    tape = write(NanoGPTRun(**row["config"]))
    found = replay(tape).reserved, *reserved_in_other_orders(tape)
    low, high = min(found), max(found)
    assert low * (1 - 0.003) <= row["train_reserved"] <= high


@pytest.mark.parametrize("figures", TABLES, ids=["first", "more"])
def test_the_page_on_accuracy_shows_these_figures(figures: list[Figure]) -> None:
    page = Path(__file__).parents[2] / "docs" / "accuracy.md"
    assert table(figures) in page.read_text(encoding="utf-8")


def test_a_forecast_loads_neither_torch_nor_numpy() -> None:
    script = (f"import sys, json; from fitgpt.memory.accuracy import compare\n"
              f"compare(json.load(open({str(RECORDS[0])!r}))['rows'][:1])\n"
              "assert not {'torch', 'numpy'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
