"""Stored traces of scripts against recorded runs of them on a GPU."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from statistics import median

import pytest

from fitgpt.tracing.bitsandbytes import OUTLIERS
from fitgpt.tracing.patches import NO_FAST_PATH
from fitgpt.tracing.plan import PLANNED, UNPLANNED, plan_trace
from fitgpt.tracing.script import trace_script
from real_messages import trace_path, traced_now
from traces import (
    BITSANDBYTES,
    COMPILED_GROUP,
    CONVOLUTION,
    FORECAST,
    H200,
    HELD_OUT,
    INT8_LAYERS,
    LANGUAGE,
    RECORDED,
    TracedRun,
    allocations,
    forecasts,
    held_out_runs,
    runs,
    stored,
    traced,
)

CASES = Path(__file__).parents[2] / "bench" / "trace_cases"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("recorded")]  # one process replays each trace once


def named(name: str) -> TracedRun:
    return next(run for run in runs() if run.name == name)


def test_every_case_was_recorded_or_has_a_forecast_before_it_is() -> None:
    cases = json.loads((CASES / "cases.json").read_text(encoding="utf-8"))
    found = {"cases": {run.name for run in runs()},
             **{name: {run.name for run in held_out_runs(name)} for name in HELD_OUT},
             **{name: {row["name"] for row in forecasts(name)} for name in FORECAST}}
    assert {name: {case["name"] for case in of_set} for name, of_set in cases.items()} == found


@pytest.mark.parametrize("name", FORECAST)
def test_a_forecast_is_the_peak_of_its_stored_trace(name: str) -> None:
    for row in forecasts(name):
        trace = stored(RECORDED / name / "stored" / f"{row['name'].replace(' ', '_')}.json.xz")
        assert plan_trace(trace, H200).peak._asdict() == row["peak"]


def test_stored_traces_name_no_folder_of_the_machine_that_made_them() -> None:
    found = [path for path in (Path(__file__).parents[1]).rglob("*.json.xz")
             if re.search(r'"(/|[A-Z]:)', lzma.decompress(path.read_bytes()).decode())]
    assert found == []


def test_at_least_40_runs_of_12_architectures_of_language_models_are_traced() -> None:
    found = traced(LANGUAGE)
    assert len(found) >= 40
    assert len({run.architecture for run in found}) >= 12


def test_reserved_memory_of_language_models_is_within_1_percent_and_never_half_a_percent_low() -> None:
    errors = {run.name: run.percents()[0] for run in traced(LANGUAGE)}
    assert {name: error for name, error in errors.items() if not -0.5 <= error <= 1} == {}


def test_reserved_memory_of_most_language_models_is_exact() -> None:
    assert median(abs(run.errors()[0]) for run in traced(LANGUAGE)) == 0


def test_allocated_memory_of_language_models_is_within_a_fifth_of_a_percent() -> None:
    errors = {run.name: run.percents()[1] for run in traced(LANGUAGE)}
    assert {name: error for name, error in errors.items() if abs(error) > 0.2} == {}


def test_bitsandbytes_optimizers_and_4_bit_layers_are_within_the_same_bounds() -> None:
    errors = {run.name: run.percents() for run in traced(BITSANDBYTES)}
    assert len(errors) == 11
    assert {name: error for name, error in errors.items() if not -0.5 <= error[0] <= 1 or abs(error[1]) > 0.2} == {}


def test_8_bit_layers_are_within_2_percent_and_say_what_is_not_in_the_plan() -> None:
    found = traced(INT8_LAYERS)
    assert found
    assert {run.name: run.percents() for run in found if max(map(abs, run.percents())) > 2} == {}
    assert all(OUTLIERS in run.trace.notes for run in found if run.trace)


@pytest.mark.ci
def test_held_out_language_models_are_within_the_same_bounds() -> None:
    found = [run for name in HELD_OUT for run in held_out_runs(name) if run.group == LANGUAGE]
    errors = {run.name: run.percents() for run in found if run.trace and NO_FAST_PATH not in run.trace.notes}
    assert len(errors) > 0.9 * len(found)
    assert {name: error for name, error in errors.items() if not -0.5 <= error[0] <= 1 or abs(error[1]) > 0.2} == {}


def test_reserved_memory_of_convolutional_models_is_within_3_percent() -> None:
    errors = {run.name: run.percents()[0] for run in traced(CONVOLUTION)}
    assert {name: error for name, error in errors.items() if abs(error) > 3} == {}


def test_compiled_runs_are_in_the_stated_range() -> None:
    found = [*runs(), *(run for name in HELD_OUT for run in held_out_runs(name))]
    shares = [(run.trace.planned, run.measured.reserved_bytes / run.timeline.reserved) for run in found
              if run.group == COMPILED_GROUP and run.trace]
    assert len(shares) >= 10
    for planned, share in shares:
        low, high = PLANNED if planned else UNPLANNED
        assert low <= share <= high


@pytest.mark.ci
@pytest.mark.parametrize("name", ["modern gpt float32", "nn.Transformer"])
def test_a_script_traced_here_has_the_allocations_of_the_stored_trace(name: str) -> None:
    """With another version of torch. Scripts with rms_norm under autocast differ: 2.12 casts it to float32."""
    run = named(name)
    assert run.trace is not None
    here = trace_script([str(CASES / run.row["script"]), *run.row["args"]], gpu="h200", steps=99, torch="2.11")
    assert allocations(here) == allocations(run.trace)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["transformers-2784", "simpletransformers-500"])
def test_the_script_of_a_real_message_traced_here_has_the_allocations_of_the_stored_trace(name: str) -> None:
    """The others: python tools/real_messages.py --check."""
    pytest.importorskip("transformers")
    assert allocations(traced_now(name)) == allocations(stored(trace_path(name)))
