"""The speed estimate of nanoGPT's train.py: near recorded runs, and in the right order elsewhere."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.hardware import gpus
from fitgpt.planning import nanogpt_speed, plan, speed
from fitgpt.planning.budget import platform_for
from fitgpt.planning.measured_speeds import shipped

H200, CARD = gpus.find("h200"), gpus.find("4070")
GPT2 = RunConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, batch_size=8, gradient_accumulation_steps=5,
                 dtype="bfloat16", compile=True)
NANOGPTS = replace(GPT2, batch_size=12, gradient_accumulation_steps=40)  # train.py's own defaults
RUNS = {run.source.partition(", ")[2]: run for run in shipped("nanogpt")}
FARTHEST = {"characters, eager": 0.094}  # off; all others are nearer than …
OTHERS = 0.043


def modelled(run: RunConfig, card: gpus.GpuModel = CARD) -> float:
    return nanogpt_speed.modelled(run, card, platform_for(card), speed.likely_efficiency(card))


def middle(config: RunConfig, card: gpus.GpuModel = CARD) -> float:
    return modelled(config, card)


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_run_is_near_the_roofline(name: str) -> None:
    run = RUNS[name]
    assert modelled(run.config, gpus.find(run.card)) == pytest.approx(run.tokens_per_s, rel=FARTHEST.get(name, OTHERS))


def test_half_of_the_nineteen_recorded_runs_are_within_three_percent() -> None:
    errors = [abs(modelled(run.config, gpus.find(run.card)) / run.tokens_per_s - 1) for run in RUNS.values()]
    assert len(errors) == 19
    assert statistics.median(errors) < 0.0265


def test_a_run_not_used_to_fit_the_roofline_is_near_it() -> None:
    """docs/log.md: 124M at 4 × 12 × 1024, an H200."""
    assert middle(replace(GPT2, batch_size=12, gradient_accumulation_steps=4), H200) == pytest.approx(481e3, rel=0.02)


def test_a_measured_run_has_one_figure() -> None:
    run = RUNS["124M, biases and dropout"]
    config = replace(GPT2, batch_size=12, gradient_accumulation_steps=2, bias=True, dropout=0.1, max_iters=5)
    found = nanogpt_speed.estimate(replace(config, dtype="auto", compile="auto", vocab_size=0, dropout=0.2), H200)
    assert found is not None
    assert found.low == found.high == found.likely == run.tokens_per_s
    assert "nanospeed_h200.json, 124M, biases and dropout" in found.basis
    otherwise = nanogpt_speed.estimate(replace(config, dropout=0.0), H200)
    assert otherwise is not None
    assert otherwise.low < otherwise.high


def test_a_recorded_gpu_has_the_worst_error_as_range_and_others_a_wider_one() -> None:
    not_recorded = replace(GPT2, n_layer=11)
    here, there = nanogpt_speed.estimate(not_recorded, H200), nanogpt_speed.estimate(GPT2, CARD)
    assert here is not None
    assert there is not None
    assert here.high / here.likely - 1 == pytest.approx(0.0933, abs=0.0005)  # the worst of the recorded runs
    assert here.likely == middle(not_recorded, H200)
    assert "within 9 % of 19 runs recorded on this GPU" in here.basis
    assert there.low < there.likely == middle(GPT2) < there.high
    assert here.high / here.low < 1.3 < there.high / there.low < 2
    assert "nothing was recorded on this GPU" in there.basis


def test_where_the_cpu_is_the_limit_its_speed_is_a_range() -> None:
    """A small run: an H100's arithmetic is an H200's."""
    small = RunConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=65, batch_size=8, block_size=256, dtype="bfloat16",
                      compile=False)
    found = nanogpt_speed.estimate(small, gpus.find("h100 sxm"))
    assert found is not None
    assert found.high / found.low == pytest.approx(1.5 / 0.6, rel=0.01)


def test_a_gpu_without_figures_or_bfloat16_has_no_estimate() -> None:
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
def test_settings_that_cost_time_are_slower(slower: dict[str, object], faster: dict[str, object],
                                            card: gpus.GpuModel) -> None:
    assert middle(replace(GPT2, **slower), card) < middle(replace(GPT2, **faster), card)  # type: ignore[arg-type]


def test_dropout_launches_more_kernels_only_in_eager_mode() -> None:
    on_cpu = nanogpt_speed.seconds_on_cpu
    eager = replace(GPT2, compile=False)
    assert on_cpu(replace(eager, dropout=0.1)) > on_cpu(eager)
    assert on_cpu(replace(GPT2, dropout=0.1)) == on_cpu(GPT2)


def test_public_figures_of_a_4090_lie_within_the_range() -> None:
    """106k and 110k tokens/s, compiled: planning/speed.py has the sources."""
    found = nanogpt_speed.estimate(NANOGPTS, gpus.find("4090"))
    assert found is not None
    assert found.low < 106_000 < 110_000 < found.high
    assert found.likely == pytest.approx(106_000, rel=0.05)


def test_fitgpt_is_estimated_faster_on_every_gpu_that_compiles() -> None:
    config = replace(NANOGPTS, dtype="auto", compile="auto")
    for card in gpus.load():
        faster = plan.relative_speed(config, "fitgpt", config, "nanogpt", card)
        assert (faster is None) == (not speed.has_figures(card))
        if faster and platform_for(card).compiles:
            assert 1.0 < faster < 1.35, card.name


def test_plan_has_the_same_speed() -> None:
    found = nanogpt_speed.estimate(GPT2, CARD)
    assert found is not None
    assert plan.expected_speed(GPT2, CARD, "nanogpt") == found
    evaluation = replace(GPT2, eval_only=True)
    assert plan.relative_speed(evaluation, "nanogpt", GPT2, "nanogpt", CARD) is None
