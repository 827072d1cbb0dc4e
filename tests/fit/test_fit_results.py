"""What was measured on a card of what fit decides, as recorded in bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fitgpt.config import RunConfig
from fitgpt.units import GiB

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_smallest_plan_of_a_run_that_fit_refuses_really_runs_out_of_memory() -> None:
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
        assert [getattr(least, knob) for knob in shape] == [row["config"][knob] for knob in shape]


def test_the_largest_model_for_12_gb_trained_for_twenty_steps_under_that_budget() -> None:
    found = read("results/largest_h200.json")
    assert found["params"] > 2.7e9
    assert found["cap"] < 11.4 * GiB
    assert found["peak_reserved"] <= found["cap"]
    assert len(found["losses"]) == 20
    assert found["losses"][0] > 10 > 7 > found["losses"][-1]
    assert found["ran_out"] == []
