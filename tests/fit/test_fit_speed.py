"""The speed estimate: within a few percent of what was recorded, and in the right order everywhere else."""

from __future__ import annotations

import importlib.util
import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fitgpt.config.memory_savers import LEVELS
from fitgpt.config.run_config import RunConfig
from fitgpt.hardware import gpus
from fitgpt.memory import gpt
from fitgpt.memory.setting import setting_for
from fitgpt.planning import duration, speed
from fitgpt.planning.efficiency import kind_of
from fitgpt.planning.forecast import settled

H200, CARD = gpus.find("h200"), gpus.find("4070")
GPT2 = RunConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, batch_size=8, gradient_accumulation_steps=4)


def middle(config: RunConfig, card: gpus.Card = CARD) -> float:
    setting = setting_for(card)
    return speed.modelled(settled(config, setting), card, setting, speed.reach_of(card))


@pytest.mark.parametrize("run", speed.recorded(), ids=lambda run: run.source)
def test_every_recorded_run_is_within_ten_percent_of_the_roofline(run: speed.Recorded) -> None:
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


def test_recorded_levels_of_one_model_come_in_the_order_that_was_measured() -> None:
    runs = [run for run in speed.recorded() if "engine_124m" in run.source]
    assert len(runs) >= 4
    by_measurement = sorted(runs, key=lambda run: run.tokens_per_s)
    for slower, faster in pairwise(by_measurement):
        if faster.tokens_per_s > 1.02 * slower.tokens_per_s:
            assert middle(faster.config, H200) > middle(slower.config, H200)


def test_a_run_that_was_measured_on_that_card_has_one_figure() -> None:
    run = speed.recorded()[0]
    told = speed.estimate(run.config, gpus.find(run.card))
    assert told is not None
    assert told.low == told.high == run.tokens_per_s
    assert run.source in told.basis


def test_other_settings_of_a_recorded_card_have_a_narrow_range_and_other_cards_a_wide_one() -> None:
    here = speed.estimate(replace(GPT2, batch_size=3), H200)
    there = speed.estimate(GPT2, CARD)
    assert here is not None
    assert there is not None
    assert 1 < here.high / here.low < 1.3 < there.high / there.low < 2
    assert "recorded on this card" in here.basis
    assert "nothing was recorded on this card" in there.basis
    assert there.low < there.likely == middle(GPT2) < there.high


def test_a_card_without_figures_has_no_estimate() -> None:
    assert speed.estimate(GPT2, None) is None
    assert speed.estimate(GPT2, replace(CARD, tflops=None)) is None


def test_each_level_that_keeps_less_is_slower() -> None:
    speeds = [middle(replace(GPT2, recompute=level)) for level in LEVELS]
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
def test_what_costs_time_is_slower(slower: dict[str, object], faster: dict[str, object]) -> None:
    assert middle(replace(GPT2, **slower)) < middle(replace(GPT2, **faster))  # type: ignore[arg-type]


def test_eight_bit_states_of_bitsandbytes_are_expected_to_be_as_fast_as_ours_and_never_taken_for_measured() -> None:
    ours = replace(GPT2, optimizer="adam8bit")
    theirs = replace(ours, adam8bit="bitsandbytes")
    assert middle(theirs) == middle(ours)
    assert speed.speed_key(theirs) != speed.speed_key(ours)


def test_unrecorded_work_is_held_up_by_the_host_only_where_the_card_is_faster_than_it() -> None:
    unrecorded = replace(GPT2, cuda_graphs=False)
    assert middle(unrecorded, H200) < 0.9 * middle(GPT2, H200)
    assert middle(unrecorded, CARD) == pytest.approx(middle(GPT2, CARD), rel=0.01)
    assert middle(unrecorded, CARD) < middle(GPT2, CARD)


def test_a_card_with_twice_of_everything_is_twice_as_fast_but_for_the_gaps() -> None:
    assert CARD.tflops is not None
    assert CARD.bandwidth_gbs is not None
    assert CARD.boost_mhz is not None
    twice = replace(CARD, tflops=2 * CARD.tflops, boost_mhz=2 * CARD.boost_mhz, bandwidth_gbs=2 * CARD.bandwidth_gbs)
    assert 1.9 < middle(GPT2, twice) / middle(GPT2, CARD) < 2


def test_over_the_cells_of_the_measured_sweeps_the_estimate_is_near_where_work_is_recorded() -> None:
    """Where the host launches kernels one by one, timings of one cell differ by half: those only say that it ranks."""
    errors = {True: list[float](), False: list[float]()}
    for row in json.loads((Path(__file__).parents[2] / "bench/results/sweeps_h200.json").read_text())["rows"]:
        for cell in row["cells"]:
            knobs = {key: value for key, value in cell.items() if hasattr(GPT2, key) and key != "tokens_per_s"}
            config = RunConfig(**{**row["config"], **knobs}, vocab_size=50304)
            is_recorded = gpt.records(settled(config, setting_for(H200)))
            errors[is_recorded].append(abs(middle(config, H200) / cell["tokens_per_s"] - 1))
    assert len(errors[True]) == 101
    assert len(errors[False]) == 39
    assert max(errors[True]) < 0.11
    assert statistics.median(errors[True]) < 0.026
    assert statistics.median(errors[False]) < 0.052


NANOGPTS = RunConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, batch_size=12, gradient_accumulation_steps=40)


@pytest.mark.parametrize(("card", "tokens_per_s"), [("4090", 106_000), ("4090", 110_000)])
def test_public_figures_of_gpt2_lie_within_the_range(card: str, tokens_per_s: int) -> None:
    """Of a compiled nanoGPT; we are a few percent faster than it. Sources: fit/reach.py."""
    told = speed.estimate(NANOGPTS, gpus.find(card))
    assert told is not None
    assert told.low < tokens_per_s < told.high


@pytest.mark.parametrize(("card", "tflops"), [("T4", 24), ("V100 SXM 16GB", 62.4), ("GTX 1080 Ti", 11.3 * 0.72)])
def test_no_card_before_ampere_is_expected_to_do_more_than_others_reached_there(card: str, tflops: float) -> None:
    """T4: cuBLAS alone. V100: Megatron-LM. 1080 Ti: not near all of its ordinary units, eager and without flash."""
    told = speed.estimate(NANOGPTS, gpus.find(card))
    assert told is not None
    flops_a_token = 6 * NANOGPTS.gpt_config().count_params() + 12 * 12 * 768 * 1024
    assert told.likely * flops_a_token < 0.9e12 * tflops
    assert told.low < told.likely < told.high


def test_without_flash_attention_a_card_of_the_same_figures_is_slower_and_less_sure() -> None:
    turing = speed.estimate(NANOGPTS, replace(CARD, cc="7.5"))
    ada = speed.estimate(NANOGPTS, CARD)
    assert turing is not None
    assert ada is not None
    assert turing.likely < 0.85 * ada.likely
    assert turing.high / turing.low > ada.high / ada.low
    assert "Turing, without flash attention" in turing.basis


def test_every_card_has_a_kind_and_a_range_that_holds_what_is_likely() -> None:
    for card in gpus.load():
        kind = kind_of(card)
        for least, likely, most in zip(kind.least, kind.likely, kind.most, strict=True):
            assert 0 < least < likely < most < 1


def test_float32_runs_on_turings_ordinary_units() -> None:
    """RTX 2080 Ti: 13.4 TFLOP/s by its spec sheet."""
    assert speed.matrix_rate(gpus.find("2080ti"), "float32") == pytest.approx(13.4e12, rel=0.01)
    assert speed.matrix_rate(gpus.find("3090"), "float32") == pytest.approx(35.5e12, rel=0.01)


def test_plan_tells_the_same_speed() -> None:
    told = speed.estimate(GPT2, CARD)
    assert told is not None
    assert duration.tokens_per_s(GPT2, CARD) == (told.low, told.high)
