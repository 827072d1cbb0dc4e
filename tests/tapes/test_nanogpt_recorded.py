"""The written tape against 240 recorded runs of nanoGPT's train.py on an H200: every figure of every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accuracy import H200, NANOGPT, Figure, compare, is_odd, table
from fitgpt.config.resolve import resolve_run
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import MiB
from fitgpt.memory.timeline import replay, reserved_in_other_orders
from fitgpt.tapes.nanogpt import write

RECORDED = Path(__file__).parents[1] / "recorded" / "nanogpt"
TOOLS = Path(__file__).parents[2] / "tools"
SEEN = ("models_30m_to_124m", "dtypes_and_shapes")  # the tape was written from these


def recorded_runs(name: str) -> list[dict[str, Any]]:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))["rows"]  # type: ignore[no-any-return]


def cases(name: str) -> list[dict[str, Any]]:
    """The configs that were to be recorded."""
    path = RECORDED / "cases" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["cases"]  # type: ignore[no-any-return]


UNSEEN = recorded_runs("remedies_and_random")  # recorded when the tape was as it is
ROWS = [row for rows in (*map(recorded_runs, SEEN), UNSEEN) for row in rows if not row.get("expandable")]
TABLES = [compare(rows) for rows in (*map(recorded_runs, SEEN), UNSEEN)]
FIGURES = [figure for figures in TABLES[:2] for figure in figures]
DRAWN = {name: recorded_runs(name)
         for name in ("common_shapes", "any_shape", "odd_vocabularies", "many_micro_batches", "common_shapes_second")}

# All figures of the runs it was written from are forecast to the byte but for these, so many percent off.
OFF = {
    ("shakespeare eager", "eval_first_peak"): -0.022,
    ("124M bias batch 8 eager", "train_peak"): -0.007,
    ("gpt2 dropout eager", "eval_first_reserved"): -0.027,
    ("124M compiled", "train_first_peak"): -0.037,
    ("124M compiled", "train_peak"): +0.012,
    ("124M compiled", "train_reserved"): +0.259,
    ("124M compiled", "eval_peak"): +0.010,
    ("124M compiled", "idle"): +0.019,
}


def run_and_name(figure: Figure) -> str:
    return f"{figure.run} {figure.name}"


def test_each_run_has_seven_figures_except_five_without_evaluations() -> None:
    assert [len(figures) for figures in TABLES] == [7 * 7, 18 * 7, 15 * 7 + 5 * 3]


def test_every_remedy_and_random_run_is_recorded() -> None:
    drawn = cases("remedies_and_random")
    assert [(row["name"], row["config"]) for row in UNSEEN] == [
        (case["name"], case["config"]) for case in drawn]


@pytest.mark.parametrize("figure", FIGURES, ids=run_and_name)
def test_runs_the_tape_was_written_from_are_forecast_to_the_byte_except_listed_figures(figure: Figure) -> None:
    off = OFF.get((figure.run, figure.name), 0.0)
    assert figure.percent == pytest.approx(off, abs=0.001 if off else 0)


@pytest.mark.parametrize("figure", FIGURES, ids=run_and_name)
def test_errors_of_runs_the_tape_was_written_from_are_within_the_promised_limits(figure: Figure) -> None:
    """Compiled within 1 %, eager within 0.2 %, never more than 0.5 % below."""
    assert figure.percent >= -0.5
    assert abs(figure.percent) <= (0.2 if figure.run.endswith("eager") else 1.0)


def test_errors_of_unseen_runs_are_within_the_promised_limits() -> None:
    compiled = {row["name"]: row["config"]["compile"] for row in UNSEEN}
    assert all(each.percent >= -0.5 and abs(each.percent) <= (1.0 if compiled[each.run] else 0.2) for each in TABLES[2])
    assert sum(not each.off for each in TABLES[2]) == 118


@pytest.mark.parametrize("name", DRAWN)
def test_every_random_run_of_each_kind_is_recorded(name: str) -> None:
    drawn = cases(name)
    assert [(row["name"], row["config"]) for row in DRAWN[name]] == [(case["name"], case["config"]) for case in drawn]


def errors_beyond_limits(rows: list[dict[str, Any]]) -> tuple[dict[tuple[str, str], float], int, int]:
    """Which, how many percent; how many figures are to the byte, and of how many."""
    compiled, figures = {row["name"]: row["config"]["compile"] for row in rows}, compare(rows)
    beyond = {(each.run, each.name): round(each.percent, 2) for each in figures
              if each.percent < -0.5 or abs(each.percent) > (1.0 if compiled[each.run] else 0.2)}
    return beyond, sum(not each.off for each in figures), len(figures)


def test_errors_of_random_shapes_are_within_the_limits_except_listed_figures() -> None:
    """Where the compiler has nothing to pad. Runs that depend on where the driver puts segments (fresh 03 reserved what
    is forecast when it was recorded again), and one in which buffers of two kinds happen to be of one size."""
    rows = [row for name in ("common_shapes", "any_shape") for row in DRAWN[name] if not is_odd(row["config"])]
    assert errors_beyond_limits(rows) == ({
        ("usual 21", "train_reserved"): -1.15, ("usual 21", "eval_peak"): -0.72, ("usual 21", "idle"): -0.55,
        ("wider 02", "train_reserved"): -0.53}, 429, 483)
    fresh = [row for row in DRAWN["common_shapes_second"] if not is_odd(row["config"])]
    assert errors_beyond_limits(fresh) == ({
        ("fresh 03", "eval_first_reserved"): -1.65, ("fresh 03", "train_peak"): -0.34,
        ("fresh 03", "train_reserved"): -1.72, ("fresh 03", "eval_peak"): -0.23, ("fresh 03", "idle"): -0.31,
        ("fresh 12", "train_reserved"): -0.43, ("fresh 12", "eval_peak"): -0.36, ("fresh 12", "idle"): -0.54,
        ("fresh 16", "idle"): -0.91}, 231, 259)


def test_runs_with_many_micro_batches_are_forecast_within_a_few_percent() -> None:
    """Two compiled ones of the latter kind, and what lies where."""
    drawn, sensitive = DRAWN["many_micro_batches"][:24], DRAWN["many_micro_batches"][24:]
    assert errors_beyond_limits(drawn) == (
        {("many 01", "train_reserved"): 0.36, ("many 14", "eval_first_reserved"): -0.79,
         ("many 16", "train_peak"): 0.29}, 155, 168)
    assert errors_beyond_limits(sensitive) == ({
        ("sensitive 30", "train_reserved"): 1.96, ("sensitive 32", "train_reserved"): 1.44,
        ("sensitive 38", "eval_peak"): -0.32, ("sensitive 38", "idle"): -0.5}, 91, 112)


def test_large_odd_vocabularies_are_forecast_within_1_percent_except_one_figure() -> None:
    """Which products are padded is what an H200 found quicker when runs were recorded: nothing that can be computed."""
    figures = compare(row for row in DRAWN["odd_vocabularies"] if row["config"]["vocab_size"] > 8000)
    beyond = {(each.run, each.name) for each in figures if abs(each.percent) > 1}
    assert beyond == {("odd 17", "train_reserved")}
    assert len(figures) == 140


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_forecast_range_contains_measured_reserved_memory(row: dict[str, Any]) -> None:
    tape = write(resolve_run(RunConfig(**row["config"]), H200, NANOGPT), H200)
    found = replay(tape).reserved, *reserved_in_other_orders(tape)
    low, high = min(found), max(found)
    assert low * (1 - 0.003) <= row["train_reserved"] <= high + (2 * MiB if row in UNSEEN else 0)


@pytest.mark.parametrize("figures", TABLES, ids=[*SEEN, "remedies_and_random"])
def test_accuracy_md_shows_these_figures(figures: list[Figure]) -> None:
    page = Path(__file__).parents[2] / "docs" / "accuracy.md"
    assert table(figures) in page.read_text(encoding="utf-8")


def test_a_forecast_loads_neither_torch_nor_numpy() -> None:
    script = (f"import sys, json; sys.path.insert(0, {str(TOOLS)!r}); from accuracy import compare\n"
              f"compare(json.load(open({str(RECORDED / f'{SEEN[0]}.json')!r}))['rows'][:1])\n"
              "assert not {'torch', 'numpy'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
