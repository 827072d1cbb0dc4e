"""By the clock: the fastest as timed is taken, a tie goes to the estimate, and what cannot be timed is said."""

from __future__ import annotations

import json

import pytest

from fitgpt import timing
from fitgpt.config import RunConfig
from fitgpt.fit.measure import measured
from fitgpt.nouns import Budget, Fitted, SpeedEstimate, Standing


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


@pytest.mark.parametrize(("said", "complained", "expected"), [
    ('{"tokens_per_s": 1234.5}', "", 1234.5),
    ('compiling …\n{"tokens_per_s": 7.0}\n', "a warning", 7.0),
    ('{"error": "memory ran out: no"}', "", "memory ran out: no"),
    ("", "Traceback\nRuntimeError: broken", "RuntimeError: broken"),
    ("", "", "the process ended with exit code 3."),
    ("no json", "", "the process ended with exit code 3."),
    ("[1]", "", "the process ended with exit code 3."),
])
def test_the_childs_answer_is_its_last_line_or_its_last_words(said: str, complained: str,
                                                              expected: float | str) -> None:
    assert timing.answer(said, complained, 3) == expected


def test_a_config_is_really_timed_in_a_child() -> None:
    """On the CPU, where there is no cap to set."""
    tiny = RunConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32, batch_size=2,
                     gradient_accumulation_steps=3, device="cpu", compile=False, dtype="float32")
    found = timing.in_child(tiny, 0, 0.3)
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


def test_orders_are_one_line_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    sent = []

    def run(command: list[str], **told: object) -> subprocess.CompletedProcess[str]:
        sent.append(json.loads(str(told["input"])))
        return subprocess.CompletedProcess(command, 0, '{"tokens_per_s": 5}', "")

    monkeypatch.setattr(subprocess, "run", run)
    assert timing.in_child(RunConfig(batch_size=3), 1000, 2.0) == 5.0
    assert sent[0]["cap"] == 1000
    assert sent[0]["config"]["batch_size"] == 3
