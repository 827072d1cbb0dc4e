"""Fallback plans: each trains the same, needs less than the one before it, and is a little slower."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from fitgpt.config.optimizers import host_bytes
from fitgpt.config.run_config import FALLBACK_OPTIONS, RunConfig, resolve_run
from fitgpt.core.units import MiB
from fitgpt.data.sample_order import positions_for
from fitgpt.hardware import gpus
from fitgpt.memory.platform import Platform
from fitgpt.memory.timeline import replay
from fitgpt.planning import speed
from fitgpt.planning.fallback_ladder import MOST_PLANS, fallback_plans, fastest_within
from fitgpt.planning.fit_search import similar_gpu
from fitgpt.planning.forecast import replay_run, write_tape
from fitgpt.planning.plan_file import FallbackPlan

HERE = Platform((8, 9), "2.13", sms=46)  # an RTX 4070
CASES: dict[str, dict[str, Any]] = {
    "124M": dict(),
    "77M eager": dict(n_embd=576, batch_size=16, gradient_accumulation_steps=32, dtype="float16", compile=False),
    "odd batch": dict(n_layer=4, batch_size=15, gradient_accumulation_steps=3),
    "mixed policies": dict(n_layer=4, saved_activations="1*input,3*matmuls"),
    "large evaluation": dict(n_layer=4, batch_size=2, eval_batch_size=32),
    "lossy": dict(n_layer=4, optimizer="adam8bit", weights="bfloat16"),
    "at once": dict(n_layer=4, step_in_backward=True, grad_clip=0.0, gradient_accumulation_steps=1),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[RunConfig, tuple[FallbackPlan, ...]]:
    config = resolve_run(RunConfig(**CASES[request.param]), HERE)
    return config, fallback_plans(config, HERE)


def test_each_plan_needs_less_and_its_needs_are_exact(case: tuple[RunConfig, tuple[FallbackPlan, ...]]) -> None:
    config, plans = case
    needs = [replay_run(config, HERE).needs, *(plan.needs for plan in plans)]
    assert len(plans) >= 2
    assert needs == sorted(set(needs), reverse=True)
    last = replace(config, **plans[-1].changes)
    assert plans[-1].needs == replay_run(last, HERE).needs
    for limit, completes in ((plans[-1].needs, True), (plans[-1].needs - 2**21, False)):
        assert (replay(write_tape(last, HERE), limit, expandable=True).failed is None) is completes


def test_each_plan_trains_the_same_samples_in_the_same_steps(case: tuple[RunConfig, tuple[FallbackPlan, ...]]) -> None:
    config, plans = case
    for plan in plans:
        assert set(plan.changes) <= set(FALLBACK_OPTIONS)
        smaller = replace(config, **plan.changes)
        assert smaller.tokens_per_step == config.tokens_per_step
        samples = [sorted(sample for micro in range(each.gradient_accumulation_steps) for sample in positions_for(
            7, micro, batch_size=each.batch_size, accumulation=each.gradient_accumulation_steps))
                   for each in (config, smaller)]
        assert samples[0] == samples[1]


def seconds_per_token(config: RunConfig, card: gpus.GpuModel) -> float:
    return 1 / speed.modelled(config, card, HERE, speed.likely_efficiency(card))


def test_no_plan_is_estimated_faster_than_the_one_before(case: tuple[RunConfig, tuple[FallbackPlan, ...]]) -> None:
    """Except that a plan with offload was preferred where it gains more than the estimate's error."""
    config, plans = case
    card = similar_gpu(HERE)
    error = speed.estimate(config, card, HERE).error  # type: ignore[union-attr]
    costs = [seconds_per_token(replace(config, **plan.changes), card) * (1 + error if "offload" in plan.changes else 1)
             for plan in plans]
    assert costs == pytest.approx(sorted(costs))


def test_a_plan_describes_its_changes() -> None:
    first, *_, last = fallback_plans(RunConfig(), HERE)
    assert first.changes == {"batch_size": 5, "gradient_accumulation_steps": 96, "eval_batch_size": 12,
                             "loss_chunk": 4096}
    assert first.why == "batch 5 × 96, loss in chunks of 4096 tokens"
    assert last.why == ("batch 1 × 480, saved activations input, loss in chunks of 256 tokens, no CUDA graphs, "
                        "gradients in CPU RAM")


def test_lossy_optimizers_are_not_offloaded() -> None:
    plans = fallback_plans(RunConfig(n_layer=4, optimizer="adam8bit", weights="bfloat16"), HERE)
    assert all("offload" not in plan.changes for plan in plans)


def test_plans_stay_within_the_cpu_ram() -> None:
    config = RunConfig(n_layer=4)
    offloaded = host_bytes(resolve_run(replace(config, offload="optimizer"), HERE))
    uses_ram = [any("offload" in plan.changes for plan in fallback_plans(config, HERE, host_bytes=limit))
                for limit in (None, offloaded, offloaded - 1)]
    assert uses_ram == [True, True, False]
    moved = replace(config, offload="optimizer")  # what is offloaded already does not count
    assert any(plan.changes.get("offload") == "gradients" for plan in fallback_plans(moved, HERE, host_bytes=0))


def test_plans_with_other_dropout_masks_come_last_and_say_so() -> None:
    plans = fallback_plans(RunConfig(n_layer=4, dropout=0.1), HERE)
    others = ["batch_size" in plan.changes for plan in plans]
    assert others == sorted(others)
    assert set(others) == {False, True}
    assert [plan.why.endswith(", other dropout masks") for plan in plans] == others
    needs = [plan.needs for plan in plans]
    assert needs == sorted(set(needs), reverse=True)


def test_there_are_at_most_six_fallback_plans() -> None:
    assert 5 <= len(fallback_plans(RunConfig(batch_size=64, gradient_accumulation_steps=8), HERE)) <= MOST_PLANS


def test_neither_torch_nor_numpy_is_loaded() -> None:
    script = "import sys, fitgpt.planning.fallback_ladder\nassert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# ---- when it is known how much memory there is


def test_a_run_that_lacks_some_mib_keeps_most_of_its_speed() -> None:
    """GPT-2 774M beside a process that left 7 GiB: the ladder's next plan has its gradients in CPU RAM."""
    here, card = Platform((9, 0), "2.11"), gpus.find("h200")
    config = resolve_run(RunConfig(
        n_layer=36, n_head=20, n_embd=1280, bias=True, block_size=512, batch_size=2, gradient_accumulation_steps=32,
        saved_activations="32*input,2*attention_proj,1*matmuls,1*all", eval_batch_size=16, offload="optimizer",
        loss_chunk=256), here)
    limit = replay_run(config, here).needs - 64 * MiB
    found = fastest_within(config, here, card, limit)
    assert found is not None
    smaller = replace(config, **found.changes)
    assert found.needs == replay_run(smaller, here).needs <= limit
    assert set(found.changes) <= set(FALLBACK_OPTIONS)
    assert smaller.tokens_per_step == config.tokens_per_step
    assert seconds_per_token(smaller, card) < seconds_per_token(config, card) / 0.8


def test_with_dropout_the_masks_stay_where_that_is_possible() -> None:
    config = resolve_run(RunConfig(n_layer=4, batch_size=32, dropout=0.1), HERE)
    needs = replay_run(config, HERE).needs
    kept = fastest_within(config, HERE, None, needs - 64 * MiB)
    other = fastest_within(config, HERE, None, int(0.4 * needs), host_bytes=0)
    assert kept is not None
    assert "batch_size" not in kept.changes
    assert other is not None
    assert "other dropout masks" in other.why


def test_settings_that_a_running_training_cannot_change_stay() -> None:
    config = resolve_run(RunConfig(n_layer=4, optimizer="adam8bit", weights="bfloat16"), HERE)
    found = fastest_within(config, HERE, None, replay_run(config, HERE).needs - 64 * MiB)
    assert found is not None
    assert set(found.changes) <= set(FALLBACK_OPTIONS) - {"offload"}
    eager = resolve_run(RunConfig(n_layer=4, compile=False, gradients="kept"), HERE)
    found = fastest_within(eager, HERE, None, replay_run(eager, HERE).needs - 64 * MiB)
    assert found is not None
    assert "compile" not in found.changes
    assert fastest_within(config, HERE, None, 64 * MiB) is None
