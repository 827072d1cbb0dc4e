"""--measure: the fastest by timing is chosen if it gains enough, failures are reported."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.planning import measure
from fitgpt.planning.budget import Budget
from fitgpt.planning.fit_goals import FitResult
from fitgpt.planning.fit_search import ScoredConfig
from fitgpt.planning.speed import SpeedEstimate
from fitgpt.training import timing


def scored(batch: int, speed: float) -> ScoredConfig:
    estimate = SpeedEstimate(speed, speed, speed, "")
    return ScoredConfig(RunConfig(batch_size=batch), (f"--batch_size={batch}",), "free", batch, 100 - batch, estimate)


def fitted() -> FitResult:
    given = ScoredConfig(RunConfig(batch_size=12), (), "free", 20, 80, SpeedEstimate(1, 1, 1, ""))
    return FitResult(Budget("a card", 100, 0, 100, 0), given, scored(24, 30.0), (),
                     (scored(48, 20.0), scored(6, 10.0)))


def reranked(tokens_per_s: dict[int, float | str]) -> FitResult:
    caps = []

    def timer(config: RunConfig, cap: int) -> float | str:
        caps.append(cap)
        return tokens_per_s[config.batch_size]

    found = measure.rerank(fitted(), timer)
    assert set(caps) == {100}  # each under the plan's memory limit
    return found


def test_the_fastest_by_timing_is_chosen_and_the_others_follow_in_order() -> None:
    found = reranked({24: 100.0, 48: 120.0, 6: 110.0, 12: 90.0})
    assert found.chosen is not None
    assert (found.chosen.config.batch_size, found.chosen.measured) == (48, 120.0)
    assert [each.config.batch_size for each in found.runners_up] == [6, 24, 12]


def test_the_given_run_is_timed_too_and_may_win() -> None:
    found = reranked({24: 100.0, 48: 100.0, 6: 100.0, 12: 150.0})
    assert found.chosen is not None
    assert found.chosen.flags == ()


def test_the_given_run_stays_unless_others_gain_more_than_two_percent() -> None:
    found = reranked({24: 100.0, 48: 101.5, 6: 50.0, 12: 100.0})
    assert found.chosen is not None
    assert found.chosen.flags == ()


def test_of_equally_fast_ones_the_smallest_is_chosen() -> None:
    found = reranked({24: 100.0, 48: 100.3, 6: 99.5, 12: 50.0})
    assert found.chosen is not None
    assert found.chosen.config.batch_size == 6


def test_a_candidate_that_runs_out_of_memory_is_not_chosen_and_is_noted() -> None:
    found = reranked({24: "out of memory: Tried to allocate 2 GiB", 48: 80.0, 6: 50.0, 12: 50.0})
    assert found.chosen is not None
    assert found.chosen.config.batch_size == 48
    assert any("--batch_size=24 could not be timed: out of memory" in note for note in found.notes)
    nothing = reranked(dict.fromkeys((24, 48, 6, 12), "no"))
    assert nothing.chosen == fitted().chosen
    assert len(nothing.notes) == 4


@pytest.mark.parametrize(("line", "expected"), [
    ('{"tokens_per_s": 1234.5}', 1234.5), ('{"error": "out of memory: no"}', "out of memory: no"),
    ("compiling …", None), ("", None), ("[1]", None), ('{"step": 1}', None),
])
def test_lines_that_are_not_results_are_ignored(line: str, expected: float | str | None) -> None:
    assert measure.parse_result(line) == expected


def child_that_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the timing process; the list has the ids of the processes that were started."""
    real, started = subprocess.Popen, list[int]()

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        child = real([sys.executable, "-c", code], **options)
        started.append(child.pid)
        return child

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print("compiling ...", flush=True)
    cap = request["cap"]
    result = {"tokens_per_s": request["config"]["batch_size"] + cap} if cap else {"error": "ran out"}
    print(json.dumps(result), flush=True)
"""


def test_one_process_times_all_and_a_failure_starts_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started = child_that_runs(ECHO, monkeypatch)
    with measure.TimingProcess(1.0) as process:
        assert [process.time(RunConfig(batch_size=batch), 100) for batch in (1, 2)] == [101.0, 102.0]
        assert len(started) == 1
        assert process.time(RunConfig(batch_size=1), 0) == "ran out"
        assert process.time(RunConfig(batch_size=5), 100) == 105.0
        assert len(started) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(started[-1], 0)


@pytest.mark.parametrize(("code", "message"), [
    ("raise SystemExit(3)", "the process ended with exit code 3."),
    ("raise RuntimeError('broken')", "RuntimeError: broken"),
    ("import os, sys; sys.stdin.readline(); os.abort()", "the process ended with exit code -6."),
])
def test_a_process_that_ends_is_reported_by_its_last_line(code: str, message: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    child_that_runs(code, monkeypatch)
    with measure.TimingProcess(1.0) as process:
        assert process.time(RunConfig(), 1) == message


def test_a_process_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    child_that_runs("import time; time.sleep(60)", monkeypatch)
    monkeypatch.setattr(measure, "STARTS_WITHIN_S", 0.2)
    with measure.TimingProcess(0.0) as process:
        assert process.time(RunConfig(), 1) == "it had not finished after 0 s."


def test_a_config_is_really_timed_in_a_child() -> None:
    """On the CPU, which has no memory limit to set."""
    tiny = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=32, batch_size=16,
                     gradient_accumulation_steps=3, device="cpu", compile=False, dtype="float32")
    with measure.TimingProcess(0.3) as process:
        for _ in range(2):
            found = process.time(tiny, 0)
            assert isinstance(found, float)
            assert 1 < found < 1e7


@pytest.mark.parametrize("two", [0.5, 0.999, 1.0, 1.001, 1.09])
def test_a_micro_step_within_the_noise_is_not_timed(two: float) -> None:
    """Of 480 micro-steps, an error of a thousandth of a step would double the speed or make it negative."""
    result = timing.rate(RunConfig(batch_size=1, gradient_accumulation_steps=480), 1.0, two)
    assert result.keys() == {"error"}
    assert "too noisy" in result["error"]


def test_a_rate_covers_all_micro_steps_and_one_optimizer_step() -> None:
    config = RunConfig(batch_size=2, block_size=100, gradient_accumulation_steps=5)
    assert timing.rate(config, 1.0, 1.5) == {"tokens_per_s": pytest.approx(1000 / 3)}
    single = RunConfig(batch_size=2, block_size=100, gradient_accumulation_steps=1)
    assert timing.rate(single, 0.5, 0.5) == {"tokens_per_s": pytest.approx(400)}
    offloaded = RunConfig(batch_size=2, block_size=100, gradient_accumulation_steps=5, offload="optimizer")
    assert timing.rate(offloaded, 1.0, 1.05).keys() == {"tokens_per_s"}  # its optimizer takes most of a step
