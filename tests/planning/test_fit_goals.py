"""The largest model, the longest block, the smallest memory: each fits, and the next one does not."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from fitgpt.config.run_config import RunConfig, gpt2_shapes
from fitgpt.core.errors import UsageError
from fitgpt.core.units import MiB, show_bytes
from fitgpt.hardware import gpus
from fitgpt.planning.budget import Budget, platform_for
from fitgpt.planning.changes import memory_use
from fitgpt.planning.fit_goals import (
    GOALS,
    OUTSIDE_ERROR,
    FitResult,
    ModelSize,
    gpt2_sizes,
    shorter_blocks,
    smaller_models,
    with_block,
    with_size,
)
from fitgpt.planning.fit_search import FitTarget
from fitgpt.planning.forecast import fits

CARD = gpus.find("4070")
SETTING = platform_for(CARD)
GIVEN = RunConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, batch_size=4, gradient_accumulation_steps=4,
                  vocab_size=1000, dtype="bfloat16", compile=True)


def target(limit_mib: int) -> FitTarget:
    limit = limit_mib * MiB
    return FitTarget(SETTING, Budget("RTX 4070", limit, 0, limit, 0), CARD)


@cache
def largest(host_bytes: int | None = None) -> FitResult:
    return GOALS["largest-model"](GIVEN, target(70)._replace(host_bytes=host_bytes), frozenset())


def test_the_sizes_include_gpt2s_and_grow() -> None:
    sizes = gpt2_sizes()
    for shape in gpt2_shapes.values():
        assert (shape["n_layer"], shape["n_head"], shape["n_embd"]) in sizes
    parameters = [with_size(GIVEN, size).gpt_config().count_params() for size in sizes]
    assert parameters == sorted(set(parameters))


def test_the_largest_model_fits_and_the_next_size_does_not() -> None:
    place = target(70)
    found = largest()
    assert found.chosen is not None
    assert found.chosen.permission == "model"
    assert fits(found.chosen.config, SETTING, place.budget.reserve_limit)
    assert found.chosen.config.tokens_per_step == GIVEN.tokens_per_step
    sizes = gpt2_sizes()
    config = found.chosen.config
    beyond = sizes[sizes.index(ModelSize(config.n_layer, config.n_head, config.n_embd)) + 1]
    assert not place.search(with_size(GIVEN, beyond), frozenset()).may_fit()
    assert "The largest that can be trained there" in found.notes[0]
    assert "tokens/s, 20 tokens per parameter" in found.notes[0]


def test_where_the_largest_model_is_offloaded_the_largest_without_offload_is_named_too() -> None:
    found = largest()
    assert found.chosen is not None
    assert found.chosen.config.offload != "none"
    assert found.notes[1].startswith("The largest without offload: ")
    alone = largest(host_bytes=0)
    assert alone.chosen is not None
    assert alone.chosen.config.offload == "none"
    assert f"{alone.chosen.config.n_layer} layers" in found.notes[1]
    assert len(alone.notes) == 1


def test_the_note_says_whether_gpu_memory_or_cpu_ram_is_the_limit() -> None:
    assert "parameters does not fit." in largest().notes[0]
    assert "of CPU RAM." in largest(host_bytes=0).notes[0]


def test_the_longest_block_fits_and_128_more_tokens_do_not() -> None:
    place = target(60)
    found = GOALS["longest-context"](GIVEN, place, frozenset())
    assert found.chosen is not None
    config = found.chosen.config
    assert config.block_size % 128 == 0
    assert fits(config, SETTING, place.budget.reserve_limit)
    beyond = with_block(GIVEN, config.block_size + 128)
    assert not place.search(beyond, frozenset()).may_fit()
    assert config.batch_size == 1


def test_the_smallest_memory_is_exact_and_below_that_of_the_given_run() -> None:
    found = GOALS["smallest-memory"](GIVEN, target(900), frozenset())
    assert found.chosen is not None
    assert found.chosen == found.least
    assert found.chosen.needs == memory_use(found.chosen.config, SETTING).needs < memory_use(GIVEN, SETTING).needs
    assert found.decisions
    assert found.chosen.config.tokens_per_step == GIVEN.tokens_per_step
    alone = GOALS["smallest-memory"](GIVEN, target(900)._replace(host_bytes=0), frozenset())
    assert alone.least is not None
    in_nvidia_smi, without_offload = found.notes
    named = int(re.search(r"--budget=(\d+)MiB is enough", in_nvidia_smi)[1]) * MiB  # type: ignore[index]
    assert found.chosen.needs <= named - target(900).budget.outside <= found.chosen.needs + OUTSIDE_ERROR + MiB
    assert without_offload == (f"Without more in CPU RAM: {show_bytes(alone.least.needs)}, by "
                               f"{' '.join(alone.least.flags)}.")


def test_the_goal_fastest_keeps_the_model() -> None:
    found = GOALS["fastest"](GIVEN, target(900), frozenset())
    assert found.chosen is not None
    assert found.chosen.config.n_embd == GIVEN.n_embd


@pytest.mark.parametrize("goal", ["largest-model", "longest-context"])
def test_a_pretrained_model_keeps_its_size(goal: str) -> None:
    with pytest.raises(UsageError, match="names one that exists"):
        GOALS[goal](replace(GIVEN, init_from="gpt2", vocab_size=50257), target(900), frozenset())


def test_nothing_is_chosen_where_not_even_the_smallest_model_fits() -> None:
    found = GOALS["largest-model"](GIVEN, target(2), frozenset())
    assert found.chosen is None
    assert found.least is not None


def test_a_longer_block_keeps_the_tokens_per_step_and_per_evaluation() -> None:
    config = RunConfig(block_size=1024, batch_size=8, gradient_accumulation_steps=8, eval_iters=10)
    for block in (256, 768, 4096, 65536):
        longer = with_block(config, block)
        assert longer.tokens_per_step == pytest.approx(config.tokens_per_step, rel=0.1)
        assert longer.eval_iters * longer.batch_size * block == pytest.approx(80 * 1024, rel=0.25)


def test_shorter_blocks_keep_tokens_per_step_and_smaller_models_the_head_width() -> None:
    config = RunConfig(block_size=1024, batch_size=4, gradient_accumulation_steps=3, n_head=12, n_embd=768)
    shorter = list(shorter_blocks(config))
    assert [each.block_size for each in shorter] == [512, 256, 128, 64]
    assert {each.tokens_per_step for each in shorter} == {config.tokens_per_step}
    narrower = list(smaller_models(config))
    assert [each.n_head for each in narrower] == list(range(11, 0, -1))
    assert {each.n_embd // each.n_head for each in narrower} == {64}
