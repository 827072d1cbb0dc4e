"""What `fit` chooses and rejects, run on a GPU, as recorded in bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_smallest_plan_of_a_run_that_fit_rejects_is_out_of_memory() -> None:
    rows = read("results/refused_h200.json")["rows"]
    drawn = [triple for triple in read("triples.json")["triples"] if not triple["accepted"]]
    assert [(row["config"], row["budget"]) for row in rows] == [(each["config"], each["budget"]) for each in drawn]
    assert len(rows) == 20
    for row in rows:
        assert row["allow"] == "lossy"
        assert 3 * GiB <= row["budget"] <= 12 * GiB
        assert row["cap"] < row["needs"]
        assert "out_of_memory" in row
        least = RunConfig(**row["least"])
        shape = ("n_layer", "n_head", "n_embd", "block_size")
        assert [getattr(least, option) for option in shape] == [row["config"][option] for option in shape]


def test_the_largest_model_for_12_gb_trained_for_twenty_steps_under_that_budget() -> None:
    found = read("results/largest_h200.json")
    assert found["params"] > 2.7e9
    assert found["cap"] < 11.4 * GiB
    assert found["peak_reserved"] <= found["cap"]
    assert len(found["losses"]) == 20
    assert found["losses"][0] > 10 > 7 > found["losses"][-1]
    assert found["ran_out"] == []


def test_sixty_random_runs_that_fit_accepts_train_save_and_resume_without_oom() -> None:
    rows = read("results/triples_h200.json")["rows"]
    drawn = [triple for triple in read("triples.json")["triples"] if triple["accepted"]]
    assert [(row["config"], row["budget"]) for row in rows] == [(each["config"], each["budget"]) for each in drawn]
    assert len(rows) == 60
    for row in rows:
        assert row["passed"], row["name"]
        assert row["exit_codes"] == [0, 0, 0]
        assert row["ran_out"] == []
        assert len(row["losses"]) == 6
        assert row["needs"] <= row["cap"] < row["budget"] <= 12 * GiB


def test_measured_memory_of_the_accepted_runs_is_as_forecast() -> None:
    """The figures of docs/accuracy.md."""
    pairs = {figure: [(row["foreseen"][phase][figure], row["measured"][phase][figure])
                      for row in read("results/triples_h200.json")["rows"] for phase in row["measured"]]
             for figure in ("allocated_bytes", "reserved_bytes")}
    errors = {figure: [predicted / measured - 1 for predicted, measured in found] for figure, found in pairs.items()}
    assert len(errors["reserved_bytes"]) == 360
    assert sum(error == 0 for error in errors["reserved_bytes"]) == 350
    assert max(errors["reserved_bytes"]) < 0.00071
    assert min(errors["reserved_bytes"]) > -0.005
    assert max(map(abs, errors["allocated_bytes"])) < 0.0001


def test_what_fit_chooses_is_within_5_percent_of_the_best_of_a_measured_sweep() -> None:
    rows = read("results/sweeps_h200.json")["rows"]
    assert len(rows) == 10
    for row in rows:
        assert row["timed"] >= 12
        others = [cell["tokens_per_s"] for cell in row["cells"][1:-1]]
        chosen = (row["cells"][0]["tokens_per_s"] + row["cells"][-1]["tokens_per_s"]) / 2
        assert chosen >= 0.95 * max(others), row["name"]
    assert sum(row["share_of_best"] >= 0.98 for row in rows) >= 9


@pytest.mark.parametrize("case", ["124m", "77m"])
def test_in_12_gb_the_fitted_run_is_faster_than_plain_torch_at_any_batch_that_fits(case: str) -> None:
    found = read(f"results/fitted_{case}_h200.json")
    assert found["cap_bytes"] <= 11.3 * GiB
    rates = {row["contender"]: row["tokens_per_s"] for row in found["rows"]}
    plain = [rate for contender, rate in rates.items() if contender.startswith("plain")]
    assert len(plain) == 3
    assert rates["fitted"] >= 1.10 * max(plain)
    assert all(row["reserved_with_eval"] <= found["cap_bytes"] for row in found["rows"])
