"""The speed estimate of nanoGPT's own train.py: near what was recorded, and in the right order everywhere else."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.hardware import gpus
from fitgpt.memory.nanorun import NanoGPTRun
from fitgpt.memory.setting import setting_for
from fitgpt.planning import duration, nanogpt_speed, speed
from fitgpt.planning.forecast import nanogpt_run

H200, CARD = gpus.find("h200"), gpus.find("4070")
GPT2 = RunConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, batch_size=8, gradient_accumulation_steps=5,
                 dtype="bfloat16", compile=True)
NANOGPTS = replace(GPT2, batch_size=12, gradient_accumulation_steps=40)  # train.py's own defaults
RUNS = {run.source.partition(", ")[2]: run for run in nanogpt_speed.recorded()}
FARTHEST = {"characters, eager": 0.094}  # off; all others are nearer than …
OTHERS = 0.043


def modelled(run: NanoGPTRun, card: gpus.Card = CARD) -> float:
    return nanogpt_speed.modelled(run, card, setting_for(card), speed.reach_of(card))


def middle(config: RunConfig, card: gpus.Card = CARD) -> float:
    return modelled(nanogpt_run(config), card)


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_run_is_near_the_roofline(name: str) -> None:
    run = RUNS[name]
    assert modelled(run.run, gpus.find(run.card)) == pytest.approx(run.tokens_per_s, rel=FARTHEST.get(name, OTHERS))


def test_half_of_the_nineteen_recorded_runs_are_within_three_percent() -> None:
    errors = [abs(modelled(run.run, gpus.find(run.card)) / run.tokens_per_s - 1) for run in RUNS.values()]
    assert len(errors) == 19
    assert statistics.median(errors) < 0.0265


def test_a_run_it_was_not_fitted_to_is_near() -> None:
    """docs/log.md: 124M at 4 × 12 × 1024, an H200."""
    assert middle(replace(GPT2, batch_size=12, gradient_accumulation_steps=4), H200) == pytest.approx(481e3, rel=0.02)


def test_a_run_that_was_measured_on_that_card_has_one_figure() -> None:
    run = RUNS["124M, biases and dropout"]
    config = replace(GPT2, batch_size=12, gradient_accumulation_steps=2, bias=True, dropout=0.1, max_iters=5)
    told = nanogpt_speed.estimate(replace(config, dtype="auto", compile="auto", vocab_size=0, dropout=0.2), H200)
    assert told is not None
    assert told.low == told.high == told.likely == run.tokens_per_s
    assert "nanospeed_h200.json, 124M, biases and dropout" in told.basis
    otherwise = nanogpt_speed.estimate(replace(config, dropout=0.0), H200)
    assert otherwise is not None
    assert otherwise.low < otherwise.high


def test_other_settings_of_a_recorded_card_have_the_worst_error_as_their_range_and_other_cards_a_wider_one() -> None:
    here, there = nanogpt_speed.estimate(GPT2, H200), nanogpt_speed.estimate(GPT2, CARD)
    assert here is not None
    assert there is not None
    assert nanogpt_speed.worst_error(H200) == pytest.approx(0.0933, abs=0.0005)
    assert here.high / here.likely - 1 == pytest.approx(nanogpt_speed.worst_error(H200))
    assert here.likely == middle(GPT2, H200)
    assert "within 9 % of 19 runs recorded on this card" in here.basis
    assert there.low < there.likely == middle(GPT2) < there.high
    assert here.high / here.low < 1.3 < there.high / there.low < 2
    assert "nothing was recorded on this card" in there.basis


def test_where_the_host_is_the_limit_another_machines_host_is_a_range_too() -> None:
    """A small run: an H100's arithmetic is an H200's."""
    small = RunConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=65, batch_size=8, block_size=256, dtype="bfloat16",
                      compile=False)
    told = nanogpt_speed.estimate(small, gpus.find("h100 sxm"))
    assert told is not None
    assert told.high / told.low == pytest.approx(1.5 / 0.6, rel=0.01)


def test_what_is_not_known_has_no_estimate() -> None:
    assert nanogpt_speed.estimate(GPT2, None) is None
    assert nanogpt_speed.estimate(GPT2, replace(CARD, tflops=None)) is None
    turing = gpus.find("t4")
    assert nanogpt_speed.estimate(GPT2, turing) is None  # bfloat16, for which it has no units
    assert nanogpt_speed.estimate(replace(GPT2, dtype="auto"), turing) is not None


@pytest.mark.parametrize("card", [CARD, H200])
@pytest.mark.parametrize(("slower", "faster"), [
    (dict(batch_size=1, gradient_accumulation_steps=40), dict(batch_size=8)),
    (dict(gradient_accumulation_steps=1), dict(gradient_accumulation_steps=40)),
    (dict(compile=False), dict(compile=True)),
    (dict(dtype="float32"), dict(dtype="bfloat16")),
    (dict(dropout=0.1), dict(dropout=0.0)),
    (dict(bias=True), dict(bias=False)),
    (dict(block_size=2048, batch_size=4), dict(block_size=1024, batch_size=8)),
    (dict(n_head=32), dict(n_head=12)),
    (dict(vocab_size=100352), dict(vocab_size=50304)),
    (dict(n_layer=13), dict(n_layer=12)),
])
def test_what_costs_time_is_slower(slower: dict[str, object], faster: dict[str, object], card: gpus.Card) -> None:
    assert middle(replace(GPT2, **slower), card) < middle(replace(GPT2, **faster), card)  # type: ignore[arg-type]


def test_dropout_launches_more_where_every_kernel_is_launched_by_itself() -> None:
    def on_host(config: RunConfig) -> float:
        return nanogpt_speed._on_host(nanogpt_run(config))

    eager = replace(GPT2, compile=False)
    assert on_host(replace(eager, dropout=0.1)) > on_host(eager)
    assert on_host(replace(GPT2, dropout=0.1)) == on_host(GPT2)


def test_public_figures_of_a_4090_lie_within_the_range() -> None:
    """106k and 110k tokens/s, compiled: fit/reach.py has the sources."""
    told = nanogpt_speed.estimate(NANOGPTS, gpus.find("4090"))
    assert told is not None
    assert told.low < 106_000 < 110_000 < told.high
    assert told.likely == pytest.approx(106_000, rel=0.05)


def test_fitgpt_is_expected_to_be_somewhat_faster_on_every_card_that_compiles() -> None:
    for card in gpus.load():
        theirs, ours = (duration.likely_speed(replace(NANOGPTS, dtype="auto", compile="auto"), card, trainer)
                        for trainer in ("nanogpt", "fitgpt"))
        assert (theirs is None) == (ours is None)
        if theirs and ours and setting_for(card).compiles:
            assert 1.0 < ours / theirs < 1.35, card.name


def test_plan_tells_the_same_speed() -> None:
    told = nanogpt_speed.estimate(GPT2, CARD)
    assert told is not None
    assert duration.tokens_per_s(GPT2, CARD, "nanogpt") == (told.low, told.high)
    assert duration.likely_speed(GPT2, CARD, "nanogpt") == told.likely
    assert duration.likely_speed(replace(GPT2, eval_only=True), CARD, "nanogpt") is None
