"""The written tape against recorded runs of our own engine on an H200: every figure of every run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from accuracy import Figure, by_run, compare_own
from fitgpt.config.resolve import resolve_run
from fitgpt.config.run_config import RunConfig
from fitgpt.memory.platform import Platform
from fitgpt.memory.timeline import needs
from fitgpt.planning.forecast import write_tape

GOLDEN = Path(__file__).parents[2] / "golden"
H200 = Platform((9, 0), "2.11")


def read(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))["rows"]  # type: ignore[no-any-return]


ROWS = read("h200_kernels.json")
DRAWN = read("h200.json")
CAPPED = {"caps": read("h200_capped.json"), "fresh_caps": read("h200_fresh_capped.json")}
OTHERS = {name: read(f"h200_{name}.json") for name in ("fresh", "switches", "notes", "bitsandbytes")}
SINGLE = read("h200_single.json")
FIGURES_OF_SINGLE = compare_own(SINGLE, H200)
FIGURES_OF_OTHERS = {name: compare_own(rows, H200) for name, rows in OTHERS.items()}
FIGURES = compare_own(ROWS, H200)
FIGURES_OF_DRAWN = compare_own(DRAWN, H200)


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


# ---- runs drawn at random


def test_every_run_that_was_drawn_was_recorded_the_good_ones_and_the_bad() -> None:
    drawn = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))["cases"]
    assert len(drawn) >= 40
    assert [(row["name"], row["config"]) for row in DRAWN] == [(case["name"], case["config"]) for case in drawn]
    assert all("phases" in row and "out_of_memory" not in row and "error" not in row for row in DRAWN)


@pytest.mark.parametrize("figure", [each for each in FIGURES_OF_DRAWN if "sample" not in each.name], ids=named)
def test_a_run_drawn_at_random_is_forecast(figure: Figure) -> None:
    """Asked for: within 2 %, the median within 0.5 %, never more than 1 % below."""
    assert abs(figure.percent) <= 0.01, f"{figure.predicted:,} for {figure.measured:,}: {figure.percent:+.3f} %"


def test_what_runs_drawn_at_random_reserve_is_forecast_to_the_byte() -> None:
    reserved = [each for each in FIGURES_OF_DRAWN if each.name.endswith("reserved") and "sample" not in each.name]
    assert len(reserved) == 6 * len(DRAWN)
    assert all(each.off == 0 for each in reserved)
    assert statistics.median(abs(each.percent) for each in FIGURES_OF_DRAWN) == 0


# ---- drawn wider; with savers off that are on by themselves; the runs of docs/memory.md and their remedies


@pytest.mark.parametrize("name", OTHERS)
def test_all_of_these_were_recorded_and_what_they_reserve_was_forecast_to_the_byte(name: str) -> None:
    drawn = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    assert [(row["name"], row["config"]) for row in OTHERS[name]] == [(case["name"], case["config"]) for case in drawn]
    reserved = [each for each in FIGURES_OF_OTHERS[name] if each.name.endswith("reserved")]
    assert len(reserved) >= 6 * len(drawn) >= 18
    assert all(each.off == 0 for each in reserved)
    assert max(abs(each.percent) for each in FIGURES_OF_OTHERS[name]) <= 0.004


def test_one_sequence_and_one_head_are_forecast_with_every_kernel() -> None:
    """Inductor times variants of reductions over fewer than 256 numbers, with a buffer as large as the L2 cache, which
    is not on the tape: it shows where a model is as small as that."""
    chosen = json.loads((GOLDEN / "single.json").read_text(encoding="utf-8"))["cases"]
    assert [(row["name"], row["config"]) for row in SINGLE] == [(case["name"], case["config"]) for case in chosen]
    assert {row["kernel"] for row in SINGLE if "kernel" in row} == {"flash", "efficient", "math"}
    reserved = [each for each in FIGURES_OF_SINGLE if each.name.endswith("reserved")]
    assert len(reserved) == 6 * len(chosen)
    assert all(each.off == 0 for each in reserved)
    assert {named(each) for each in FIGURES_OF_SINGLE if abs(each.percent) > 0.004} == {
        "one head of 128, compiled first_eval allocated"}


# ---- under a cap


@pytest.mark.parametrize("name", CAPPED)
def test_two_percent_less_than_a_run_needs_is_too_little_and_two_percent_more_is_enough(name: str) -> None:
    drawn = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    assert [(row["name"], row["config"], row["cap"]) for row in CAPPED[name]] == [
        (case["name"], case["config"], case["cap"]) for case in drawn]
    below, above = ([row for row in CAPPED[name] if row["name"].endswith(word)] for word in ("below", "above"))
    assert len(below) == len(above) == 20
    assert all("out_of_memory" in row for row in below)
    assert all("out_of_memory" not in row and not row.get("recording_failed") and "save" in row["phases"]
               for row in above)


@pytest.mark.parametrize("name", CAPPED)
def test_the_caps_lie_around_what_the_runs_are_said_to_need_today(name: str) -> None:
    for row in CAPPED[name]:
        wanted = needs(write_tape(resolve_run(RunConfig(**row["config"]), H200), H200), expandable=True)
        assert row["cap"] == round(wanted * (0.98 if row["name"].endswith("below") else 1.02))


def test_the_page_on_accuracy_shows_these_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    others = [(FIGURES_OF_OTHERS[name], rows) for name, rows in OTHERS.items()]
    for figures, rows in ((FIGURES, ROWS), (FIGURES_OF_DRAWN, DRAWN), (FIGURES_OF_SINGLE, SINGLE), *others):
        assert by_run(figures, {row["name"]: row["config"] for row in rows}) in page
