"""The speed estimate: within a few percent of recorded runs, and in the right order elsewhere."""

from __future__ import annotations

import importlib.util
import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fitgpt.config.memory_savers import POLICIES
from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.hardware import gpus
from fitgpt.planning import plan, speed
from fitgpt.planning.budget import platform_for
from fitgpt.planning.measured_speeds import MeasuredSpeed, shipped
from fitgpt.planning.speed import HOPPER, gpu_class

H200, CARD = gpus.find("h200"), gpus.find("4070")
GPT2 = RunConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, batch_size=8, gradient_accumulation_steps=4)


def middle(config: RunConfig, card: gpus.GpuModel = CARD) -> float:
    platform = platform_for(card)
    return speed.modelled(resolve_run(config, platform), card, platform, speed.likely_efficiency(card))


@pytest.mark.parametrize("run", [run for run in shipped() if run.card == "H200"], ids=lambda run: run.source)
def test_every_recorded_run_is_within_10_percent_of_the_roofline(run: MeasuredSpeed) -> None:
    assert middle(run.config, gpus.find(run.card)) == pytest.approx(run.tokens_per_s, rel=0.10)


def test_the_recorded_runs_are_those_of_the_results() -> None:
    """After new results: python tools/recorded.py"""
    path = Path(__file__).parents[2] / "tools" / "recorded.py"
    spec = importlib.util.spec_from_file_location("recorded_tool", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert json.loads(tool.TARGET.read_text()) == tool.document()


def test_recompute_policies_rank_as_measured() -> None:
    runs = [run for run in shipped() if "engine_124m" in run.source]
    assert len(runs) >= 4
    by_measurement = sorted(runs, key=lambda run: run.tokens_per_s)
    for slower, faster in pairwise(by_measurement):
        if faster.tokens_per_s > 1.02 * slower.tokens_per_s:
            assert middle(faster.config, H200) > middle(slower.config, H200)


def test_deterministic_runs_are_slower_as_measured() -> None:
    path = Path(__file__).parents[2] / "bench" / "results" / "deterministic_speed_h200.json"
    for row in json.loads(path.read_text())["rows"]:
        how, dtype = row["case"].split()
        config = replace(GPT2, batch_size=row["batch_size"], gradient_accumulation_steps=2, dtype=dtype,
                         compile=how == "compiled")
        fast, slow = (middle(replace(config, deterministic=on), H200) for on in (False, True))
        assert slow / fast == pytest.approx(row["ratio"], rel=0.02)
    found = speed.estimate(replace(GPT2, deterministic=True), CARD)
    assert found is not None
    assert found.basis.endswith("the cost of --deterministic is that of GPT-2 124M on an H200")


def test_a_measured_run_has_one_figure() -> None:
    run = shipped()[0]
    found = speed.estimate(run.config, gpus.find(run.card))
    assert found is not None
    assert found.low == found.high == run.tokens_per_s
    assert run.source in found.basis


def test_a_recorded_gpu_has_a_narrow_range_and_others_a_wide_one() -> None:
    here = speed.estimate(replace(GPT2, batch_size=3), H200)
    there = speed.estimate(GPT2, CARD)
    assert here is not None
    assert there is not None
    assert 1 < here.high / here.low < 1.3 < there.high / there.low < 2
    assert "recorded on this GPU" in here.basis
    assert "nothing was recorded on this GPU" in there.basis
    assert there.low < there.likely == middle(GPT2) < there.high


def test_a_gpu_without_figures_has_no_estimate() -> None:
    assert speed.estimate(GPT2, None) is None
    assert speed.estimate(GPT2, replace(CARD, tflops=None)) is None


def test_each_recompute_level_that_keeps_less_is_slower() -> None:
    speeds = [middle(replace(GPT2, saved_activations=policy)) for policy in POLICIES]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize(("slower", "faster"), [
    (dict(batch_size=1, gradient_accumulation_steps=32), dict(batch_size=8)),
    (dict(loss_chunk=256), dict(loss_chunk=2048)),
    (dict(compile=False), dict(compile=True)),
    (dict(offload="gradients"), dict(offload="optimizer")),
    (dict(offload="optimizer"), dict(offload="none")),
    (dict(optimizer="muon"), dict(optimizer="adamw")),
    (dict(weights="float32"), dict(weights="bfloat16", optimizer="adam8bit")),
    (dict(residual="float32"), dict(residual="bfloat16")),
    (dict(dtype="float32"), dict(dtype="bfloat16")),
    (dict(dropout=0.1), dict(dropout=0.0)),
])
def test_settings_that_cost_time_are_slower(slower: dict[str, object], faster: dict[str, object]) -> None:
    assert middle(replace(GPT2, **slower)) < middle(replace(GPT2, **faster))  # type: ignore[arg-type]


def test_bitsandbytes_is_estimated_like_our_8_bit_adam_but_has_its_own_key() -> None:
    ours = replace(GPT2, optimizer="adam8bit")
    theirs = replace(ours, adam8bit="bitsandbytes")
    assert middle(theirs) == middle(ours)
    assert speed.speed_key(theirs) != speed.speed_key(ours)


def test_without_cuda_graphs_the_cpu_slows_down_only_fast_gpus() -> None:
    eager_launch = replace(GPT2, cuda_graphs=False)
    assert middle(eager_launch, H200) < 0.9 * middle(GPT2, H200)
    assert middle(eager_launch, CARD) == pytest.approx(middle(GPT2, CARD), rel=0.01)
    assert middle(eager_launch, CARD) < middle(GPT2, CARD)


def test_a_gpu_with_doubled_figures_is_almost_twice_as_fast() -> None:
    assert CARD.tflops is not None
    assert CARD.bandwidth_gbs is not None
    assert CARD.boost_mhz is not None
    twice = replace(CARD, tflops=2 * CARD.tflops, boost_mhz=2 * CARD.boost_mhz, bandwidth_gbs=2 * CARD.bandwidth_gbs)
    assert 1.9 < middle(GPT2, twice) / middle(GPT2, CARD) < 2


def test_estimates_are_near_the_measured_sweeps() -> None:
    """Without CUDA graphs, repeated timings differ by half: only the median is compared there."""
    errors = {True: list[float](), False: list[float]()}
    for row in json.loads((Path(__file__).parents[2] / "bench/results/sweeps_h200.json").read_text())["rows"]:
        for cell in row["cells"]:
            options = {key: value for key, value in cell.items() if hasattr(GPT2, key) and key != "tokens_per_s"}
            config = RunConfig(**{**row["config"], **options}, vocab_size=50304)
            uses_graphs = resolve_run(config, platform_for(H200)).uses_cuda_graphs
            errors[uses_graphs].append(abs(middle(config, H200) / cell["tokens_per_s"] - 1))
    assert len(errors[True]) == 101
    assert len(errors[False]) == 39
    assert max(errors[True]) < 0.11
    assert statistics.median(errors[True]) < 0.026
    assert statistics.median(errors[False]) < 0.052


NANOGPTS = RunConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, batch_size=12, gradient_accumulation_steps=40)


@pytest.mark.parametrize(("card", "tokens_per_s"), [("4090", 106_000), ("4090", 110_000)])
def test_public_figures_of_gpt2_lie_within_the_range(card: str, tokens_per_s: int) -> None:
    """Of a compiled nanoGPT; we are a few percent faster than it. Sources: planning/speed.py."""
    found = speed.estimate(NANOGPTS, gpus.find(card))
    assert found is not None
    assert found.low < tokens_per_s < found.high


@pytest.mark.parametrize(("card", "tflops"), [("T4", 24), ("V100 SXM 16GB", 62.4), ("GTX 1080 Ti", 11.3 * 0.72)])
def test_estimates_before_ampere_stay_below_public_figures(card: str, tflops: float) -> None:
    """T4: cuBLAS alone. V100: Megatron-LM. 1080 Ti: a share of its FP32 rate, eager and without flash attention."""
    found = speed.estimate(NANOGPTS, gpus.find(card))
    assert found is not None
    flops_per_token = 6 * NANOGPTS.gpt_config().count_params() + 12 * 12 * 768 * 1024
    assert found.likely * flops_per_token < 0.9e12 * tflops
    assert found.low < found.likely < found.high


def test_without_flash_attention_the_estimate_is_lower_and_wider() -> None:
    turing = speed.estimate(NANOGPTS, replace(CARD, cc="7.5"))
    ada = speed.estimate(NANOGPTS, CARD)
    assert turing is not None
    assert ada is not None
    assert turing.likely < 0.85 * ada.likely
    assert turing.high / turing.low > ada.high / ada.low
    assert "Turing, without flash attention" in turing.basis


def test_every_gpu_has_a_class_whose_likely_efficiency_is_within_its_range() -> None:
    for card in gpus.load():
        kind = gpu_class(card)
        for least, likely, most in zip(kind.least, kind.likely, kind.most, strict=True):
            assert 0 < least < likely < most < 1


def test_float32_runs_on_the_fp32_units_of_turing() -> None:
    """RTX 2080 Ti: 13.4 TFLOP/s by its spec sheet."""
    assert speed.matmul_peak(gpus.find("2080ti"), "float32") == pytest.approx(13.4e12, rel=0.01)
    assert speed.matmul_peak(gpus.find("3090"), "float32") == pytest.approx(35.5e12, rel=0.01)


def test_plan_has_the_same_speed() -> None:
    found = speed.estimate(GPT2, CARD)
    assert found is not None
    assert plan.expected_speed(GPT2, CARD) == found


def test_recorded_rates_scale_the_efficiencies_of_a_gpu() -> None:
    laptop = gpus.find("4070 laptop")
    slow = replace(laptop, matmul_tflops=20.0, copy_gbs=200.0)
    fast = replace(laptop, matmul_tflops=36.0, copy_gbs=230.0)
    ratio = gpu_class(fast).likely.matmuls / gpu_class(slow).likely.matmuls
    assert ratio == pytest.approx(36 / 20)
    assert gpu_class(laptop).text in gpu_class(slow).text != gpu_class(laptop).text
    h200 = replace(gpus.find("h200"), matmul_tflops=667.9, copy_gbs=4171.2)
    assert gpu_class(h200).likely == pytest.approx(HOPPER.likely)
