"""By the clock: the fastest as timed is taken, a tie goes to the estimate, and what cannot be timed is said."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.nouns import Budget, Fitted, SpeedEstimate, Standing
from fitgpt.planning import timing
from fitgpt.planning.measure import measured


def standing(batch: int, speed: float) -> Standing:
    told = SpeedEstimate(speed, speed, speed, "")
    return Standing(RunConfig(batch_size=batch), (f"--batch_size={batch}",), "free", 10, 90, told)


def fitted() -> Fitted:
    asked = Standing(RunConfig(batch_size=12), (), "free", 20, 80, SpeedEstimate(1, 1, 1, ""))
    return Fitted(Budget("a card", 100, 0, 100, 0), asked, standing(24, 30.0), (),
                  (standing(48, 20.0), standing(6, 10.0)))


def by(seconds: dict[int, float | str]) -> Fitted:
    caps = []

    def timer(config: RunConfig, cap: int) -> float | str:
        caps.append(cap)
        return seconds[config.batch_size]

    found = measured(fitted(), timer)
    assert set(caps) == {100}  # each under the cap of the plan
    return found


def test_the_fastest_by_the_clock_is_chosen_and_the_others_follow_in_order() -> None:
    found = by({24: 100.0, 48: 120.0, 6: 110.0, 12: 90.0})
    assert found.chosen is not None
    assert (found.chosen.config.batch_size, found.chosen.measured) == (48, 120.0)
    assert [each.config.batch_size for each in found.runners_up] == [6, 24, 12]


def test_what_was_asked_for_is_timed_too_and_may_win() -> None:
    found = by({24: 100.0, 48: 100.0, 6: 100.0, 12: 150.0})
    assert found.chosen is not None
    assert found.chosen.flags == ()


def test_two_that_lie_within_the_noise_are_told_apart_by_the_estimate() -> None:
    found = by({24: 100.0, 48: 100.3, 6: 50.0, 12: 50.0})
    assert found.chosen is not None
    assert found.chosen.config.batch_size == 24


def test_a_candidate_that_runs_out_is_not_chosen_and_is_said() -> None:
    found = by({24: "memory ran out: Tried to allocate 2 GiB", 48: 80.0, 6: 50.0, 12: 50.0})
    assert found.chosen is not None
    assert found.chosen.config.batch_size == 48
    assert any("--batch_size=24 could not be timed: memory ran out" in note for note in found.notes)
    nothing = by(dict.fromkeys((24, 48, 6, 12), "no"))
    assert nothing.chosen == fitted().chosen
    assert len(nothing.notes) == 4


@pytest.mark.parametrize(("line", "expected"), [
    ('{"tokens_per_s": 1234.5}', 1234.5), ('{"error": "memory ran out: no"}', "memory ran out: no"),
    ("compiling …", None), ("", None), ("[1]", None), ('{"step": 1}', None),
])
def test_a_line_that_is_no_answer_is_passed_over(line: str, expected: float | str | None) -> None:
    assert timing.answer(line) == expected


def child_that_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for the process that times; the list has the processes that were started."""
    real, started = subprocess.Popen, list[int]()

    def popen(command: list[str], **told: Any) -> subprocess.Popen[str]:
        child = real([sys.executable, "-c", code], **told)
        started.append(child.pid)
        return child

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


ECHO = """
import json, sys
for line in sys.stdin:
    order = json.loads(line)
    print("compiling ...", flush=True)
    told = {"tokens_per_s": order["config"]["batch_size"] + order["cap"]} if order["cap"] else {"error": "ran out"}
    print(json.dumps(told), flush=True)
"""


def test_one_process_times_all_and_a_new_one_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    started = child_that_runs(ECHO, monkeypatch)
    with timing.Clock(1.0) as clock:
        assert [clock.time(RunConfig(batch_size=batch), 100) for batch in (1, 2)] == [101.0, 102.0]
        assert len(started) == 1
        assert clock.time(RunConfig(batch_size=1), 0) == "ran out"
        assert clock.time(RunConfig(batch_size=5), 100) == 105.0
        assert len(started) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(started[-1], 0)


@pytest.mark.parametrize(("code", "words"), [
    ("raise SystemExit(3)", "the process ended with exit code 3."),
    ("raise RuntimeError('broken')", "RuntimeError: broken"),
    ("import os, sys; sys.stdin.readline(); os.abort()", "the process ended with exit code -6."),
])
def test_a_process_that_ends_is_told_by_its_last_words(code: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child_that_runs(code, monkeypatch)
    with timing.Clock(1.0) as clock:
        assert clock.time(RunConfig(), 1) == words


def test_one_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    child_that_runs("import time; time.sleep(60)", monkeypatch)
    monkeypatch.setattr(timing, "STARTS_WITHIN_S", 0.2)
    with timing.Clock(0.0) as clock:
        assert clock.time(RunConfig(), 1) == "it had not finished after 0 s."


def test_a_config_is_really_timed_in_a_child() -> None:
    """On the CPU, where there is no cap to set."""
    tiny = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=32, batch_size=16,
                     gradient_accumulation_steps=3, device="cpu", compile=False, dtype="float32")
    with timing.Clock(0.3) as clock:
        for _ in range(2):
            found = clock.time(tiny, 0)
            assert isinstance(found, float)
            assert 1 < found < 1e7


@pytest.mark.parametrize("two", [0.5, 0.999, 1.0, 1.001, 1.09])
def test_a_micro_step_that_is_lost_in_noise_is_not_timed(two: float) -> None:
    """480 of them: a thousandth of a step too little would be a run twice as fast, or one that goes backwards."""
    told = timing.rate(RunConfig(batch_size=1, gradient_accumulation_steps=480), 1.0, two)
    assert told.keys() == {"error"}
    assert "too noisy" in told["error"]


def test_a_rate_is_of_all_micro_steps_and_one_optimizer_step() -> None:
    config = RunConfig(batch_size=2, block_size=100, gradient_accumulation_steps=5)
    assert timing.rate(config, 1.0, 1.5) == {"tokens_per_s": pytest.approx(1000 / 3)}
    single = RunConfig(batch_size=2, block_size=100, gradient_accumulation_steps=1)
    assert timing.rate(single, 0.5, 0.5) == {"tokens_per_s": pytest.approx(400)}
    beside_the_host = RunConfig(batch_size=2, block_size=100, gradient_accumulation_steps=5, offload="optimizer")
    assert timing.rate(beside_the_host, 1.0, 1.05).keys() == {"tokens_per_s"}  # its optimizer takes most of a step
