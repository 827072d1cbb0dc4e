"""The written tape against 240 recorded runs of nanoGPT's train.py on an H200: every figure of every run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accuracy import H200, NANOGPT, Figure, is_odd, of_file, table
from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.core.units import MiB
from fitgpt.memory.timeline import replay, reserved_in_other_orders
from fitgpt.tapes.nanogpt import write

RECORDED = Path(__file__).parents[1] / "recorded" / "nanogpt"
TOOLS = Path(__file__).parents[2] / "tools"
SEEN = ("models_30m_to_124m", "dtypes_and_shapes")  # the tape was written from these
UNSEEN = "remedies_and_random"                      # recorded when the tape was as it is
RANDOM = ("common_shapes", "any_shape", "odd_vocabularies", "many_micro_batches", "common_shapes_second")
pytestmark = pytest.mark.xdist_group("recorded")    # one process replays each recorded run once

# All figures of the runs it was written from are forecast to the byte except these, off by this many percent.
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


def recorded_runs(name: str) -> list[dict[str, Any]]:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))["rows"]  # type: ignore[no-any-return]


def cases(name: str) -> list[dict[str, Any]]:
    """The configs that were to be recorded."""
    path = RECORDED / "cases" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["cases"]  # type: ignore[no-any-return]


def figures_of(name: str) -> list[Figure]:
    return of_file(RECORDED / f"{name}.json")[1]


ROWS = [row for name in (*SEEN, UNSEEN) for row in recorded_runs(name) if not row.get("expandable")]


def test_each_run_has_seven_figures_except_five_without_evaluations() -> None:
    assert [len(figures_of(name)) for name in (*SEEN, UNSEEN)] == [7 * 7, 18 * 7, 15 * 7 + 5 * 3]


@pytest.mark.parametrize("name", [UNSEEN, *RANDOM])
def test_every_case_that_was_drawn_is_recorded(name: str) -> None:
    assert [(row["name"], row["config"]) for row in recorded_runs(name)] == [
        (case["name"], case["config"]) for case in cases(name)]


def test_runs_the_tape_was_written_from_are_forecast_to_the_byte_except_listed_figures() -> None:
    figures = [each for name in SEEN for each in figures_of(name)]
    assert {(each.run, each.name): round(each.percent, 3) for each in figures if each.off} == OFF


@pytest.mark.parametrize("name", [*SEEN, UNSEEN])
def test_errors_of_eager_runs_are_within_0_2_percent_and_of_compiled_ones_within_1(name: str) -> None:
    """And never more than 0.5 % below."""
    assert errors_beyond_limits(name)[0] == {}


def test_most_figures_of_unseen_runs_are_forecast_to_the_byte() -> None:
    assert errors_beyond_limits(UNSEEN)[1] == 117


def errors_beyond_limits(name: str, applies: Callable[[dict[str, Any]], bool] = lambda row: True) -> tuple[
        dict[tuple[str, str], float], int, int]:
    """Which, by how many percent; how many figures are to the byte, and of how many. `applies` selects runs."""
    compiled = {row["name"]: row["config"]["compile"] for row in recorded_runs(name) if applies(row)}
    figures = [each for each in figures_of(name) if each.run in compiled]
    beyond = {(each.run, each.name): round(each.percent, 2) for each in figures
              if each.percent < -0.5 or abs(each.percent) > (1.0 if compiled[each.run] else 0.2)}
    return beyond, sum(not each.off for each in figures), len(figures)


def not_odd(row: dict[str, Any]) -> bool:
    return not is_odd(row["config"])


@pytest.mark.parametrize(("name", "expected"), [
    ("common_shapes", ({("usual 21", "train_reserved"): -1.15, ("usual 21", "eval_peak"): -0.72,
                        ("usual 21", "idle"): -0.55}, 225, 259)),
    ("any_shape", ({("wider 02", "train_reserved"): -0.53}, 202, 224)),
    ("common_shapes_second", ({
        ("fresh 03", "eval_first_reserved"): -1.65, ("fresh 03", "train_peak"): -0.34,
        ("fresh 03", "train_reserved"): -1.72, ("fresh 03", "eval_peak"): -0.23, ("fresh 03", "idle"): -0.31,
        ("fresh 12", "train_reserved"): -0.43, ("fresh 12", "eval_peak"): -0.36, ("fresh 12", "idle"): -0.54,
        ("fresh 16", "idle"): -0.91}, 227, 259)),
])
def test_errors_of_random_shapes_are_within_the_limits_except_listed_figures(name: str, expected: Any) -> None:
    """Where the compiler has nothing to pad. Runs that depend on where the driver puts segments (fresh 03 reserved what
    is forecast when it was recorded again), and one in which buffers of two kinds happen to be of one size."""
    assert errors_beyond_limits(name, not_odd) == expected


def test_runs_with_many_micro_batches_are_forecast_within_a_few_percent() -> None:
    """The sensitive ones were chosen because their memory depends on addresses."""
    assert errors_beyond_limits("many_micro_batches", lambda row: row["name"].startswith("many")) == (
        {("many 01", "train_reserved"): 0.36, ("many 14", "eval_first_reserved"): -0.79,
         ("many 16", "train_peak"): 0.29}, 155, 168)
    assert errors_beyond_limits("many_micro_batches", lambda row: row["name"].startswith("sensitive")) == ({
        ("sensitive 30", "train_reserved"): 1.96, ("sensitive 32", "train_reserved"): 1.44,
        ("sensitive 38", "eval_peak"): -0.32, ("sensitive 38", "idle"): -0.5}, 92, 112)


def test_large_odd_vocabularies_are_forecast_within_1_percent_except_one_figure() -> None:
    """Which matmuls are padded is what an H200 found faster when runs were recorded: nothing that can be computed."""
    large = {row["name"] for row in recorded_runs("odd_vocabularies") if row["config"]["vocab_size"] > 8000}
    figures = [each for each in figures_of("odd_vocabularies") if each.run in large]
    assert {(each.run, each.name) for each in figures if abs(each.percent) > 1} == {("odd 17", "train_reserved")}
    assert len(figures) == 140


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_forecast_range_contains_measured_reserved_memory(row: dict[str, Any]) -> None:
    tape = write(resolve_run(RunConfig(**row["config"]), H200, NANOGPT), H200)
    found = replay(tape).reserved, *reserved_in_other_orders(tape)
    low, high = min(found), max(found)
    assert low * (1 - 0.003) <= row["train_reserved"] <= high + (2 * MiB if row in recorded_runs(UNSEEN) else 0)


def test_accuracy_md_shows_these_figures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert [name for name in (*SEEN, UNSEEN) if table(figures_of(name)) not in page] == []


def test_a_forecast_loads_neither_torch_nor_numpy() -> None:
    script = (f"import sys, json; sys.path.insert(0, {str(TOOLS)!r}); from accuracy import compare\n"
              f"compare(json.load(open({str(RECORDED / f'{SEEN[0]}.json')!r}))['rows'][:1])\n"
              "assert not {'torch', 'numpy'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
