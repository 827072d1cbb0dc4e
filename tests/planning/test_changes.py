"""Single changes: each changes what its flags say, is priced by replays, and the smallest that fit are found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.memory_savers import SAVERS
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB, MiB
from fitgpt.memory.platform import Platform
from fitgpt.planning.budget import Budget
from fitgpt.planning.changes import (
    RANKS,
    ChangedRun,
    memory_use,
    priced,
    ranked,
    single_changes,
    smallest_that_fit,
)
from fitgpt.planning.forecast import fits, forecast

SETTING = Platform((8, 9))
SMALL = RunConfig(n_layer=3, n_head=4, n_embd=256, batch_size=12, block_size=256, vocab_size=50304, dtype="bfloat16",
                  compile=True, gradient_accumulation_steps=4)


def budget_of(limit: int) -> Budget:
    return Budget("a card", limit, 0, limit, 0)


def family(name: str, config: RunConfig = SMALL, trainer: str = "fitgpt") -> list[ChangedRun]:
    return [option for option in single_changes(config, trainer) if option.change.family == name]


def first_flags(config: RunConfig, trainer: str = "fitgpt") -> set[str]:
    return {option.change.flags[0] for option in single_changes(config, trainer)}


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, compile=False, dropout=0.1, batch_size=7),
                                    replace(SMALL, dtype="float16", saved_activations="1*all,2*input",
                                            eval_block_size=200)])
def test_the_flags_of_a_change_are_all_that_it_changes(trainer: str, config: RunConfig) -> None:
    config_flags = [f"--{key}={value}" for key, value in config.to_dict().items()]
    for change, changed in single_changes(config, trainer):
        flags = [flag for flag in change.flags if not flag.startswith("--trainer")]
        assert build(RunConfig, walk([*config_flags, *flags], RunConfig)) == changed
        assert change.flags


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_compile_is_offered_only_where_it_works(trainer: str) -> None:
    eager = replace(SMALL, compile=False)
    families = [{option.change.family for option in single_changes(eager, trainer, compiles=compiles)}
                for compiles in (True, False)]
    assert families[0] - families[1] == {"compile"}


def test_the_cost_of_leaving_nanogpt_is_recomputation() -> None:
    def cost(config: RunConfig) -> str:
        return next(each.change.slower for each in single_changes(config, "nanogpt") if each.change.family == "trainer")

    for saved in (dict(), dict(saved_activations="all")):
        assert cost(replace(SMALL, **saved)) == "nothing"
    for less in (dict(grad_checkpoint=True), dict(saved_activations="1*all,2*attention")):
        assert "recompute" in cost(replace(SMALL, **less))


def test_a_smaller_batch_trains_on_the_same_tokens_and_evaluates_the_same_windows() -> None:
    assert [option.config.batch_size for option in family("batch")] == [6, 3, 1]
    for option in family("batch"):
        assert option.config.tokens_per_step == SMALL.tokens_per_step
        assert option.config.eval_iters * option.config.batch_size == SMALL.eval_iters * SMALL.batch_size
        assert option.change.exact


def test_dropout_draws_other_masks_for_other_batches() -> None:
    assert not any(option.change.exact for option in family("batch", replace(SMALL, dropout=0.1)))


def test_every_saver_is_offered_where_it_applies() -> None:
    config = replace(SMALL, gradient_accumulation_steps=1, batch_size=16, saved_activations="all", casts="kept",
                     gradients="kept", states="late")
    assert {f"--{saver.setting}".replace("--step_in_backward", "--step_in_backward=True") for saver in SAVERS} <= (
        first_flags(config) | {"--loss_chunk=1024", "--adam8bit=bitsandbytes"})
    exact = {f"--{saver.setting}": saver.exact for saver in SAVERS}
    for option in single_changes(config):
        if option.change.flags[0] in exact:
            assert option.change.exact == exact[option.change.flags[0]]


def test_changes_that_other_options_exclude_are_not_offered() -> None:
    offered = first_flags(replace(SMALL, dtype="float16"))
    assert "--step_in_backward=True" not in offered
    assert "--optimizer=adam8bit" not in first_flags(replace(SMALL, offload="optimizer"))
    assert not family("saved_activations", replace(SMALL, saved_activations="input"))
    assert not family("batch", replace(SMALL, batch_size=1))


def test_bitsandbytes_is_not_offered_beside_adam8bit() -> None:
    for config in (SMALL, replace(SMALL, optimizer="adam8bit")):
        assert not any("adam8bit=" in flag for option in single_changes(config) for flag in option.change.flags
                       if "optimizer" not in flag)


def test_nanogpt_is_offered_its_own_options_and_fitgpt() -> None:
    assert first_flags(replace(SMALL, compile=False), "nanogpt") == {
        "--batch_size=6", "--batch_size=3", "--batch_size=1", "--compile=True", "--trainer=fitgpt",
        "--gradient_accumulation_steps=1", "--block_size=128"}


def test_only_another_block_makes_losses_incomparable() -> None:
    assert {option.change.family for option in single_changes(SMALL) if not option.change.comparable} == {"block"}


@pytest.mark.parametrize("name", ["batch", "saved_activations", "loss", "offload"])
def test_a_family_saves_more_from_one_change_to_the_next(name: str) -> None:
    before = memory_use(SMALL, SETTING)
    saved = [priced(option, before, SETTING, budget_of(GiB)).saved_in_training for option in family(name)]
    assert len(saved) > 1
    assert all(less < more for less, more in pairwise([0, *saved]))


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_a_price_is_the_difference_between_two_forecasts(trainer: str) -> None:
    before = memory_use(SMALL, SETTING, trainer)
    for option in single_changes(SMALL, trainer)[:6]:
        price = priced(option, before, SETTING, budget_of(GiB))
        after = forecast(option.config, SETTING, option.change.trainer)
        assert (price.needs, price.headroom) == (after.needs, GiB - after.needs)
        assert price.saved["train"] == max(before.phases[phase] for phase in ("train", "step")) - max(
            after.phases[phase].allocated for phase in ("train", "step"))


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_one_replay_agrees_with_the_smallest_limit(trainer: str) -> None:
    needs = memory_use(SMALL, SETTING, trainer).needs
    assert fits(SMALL, SETTING, needs, trainer)
    assert not fits(SMALL, SETTING, needs - 2 * MiB, trainer)


def test_the_smallest_change_of_each_family_that_fits_is_found() -> None:
    least = memory_use(family("batch")[1].config, SETTING).needs
    found = [each.change for each in smallest_that_fit(SMALL, SETTING, budget_of(least), most=20)]
    assert found[0].flags[0] == "--batch_size=3"
    by_flags = {option.change.flags: option for option in single_changes(SMALL)}
    for change in found:
        assert fits(by_flags[change.flags].config, SETTING, least)
    assert [change.exact for change in found] == sorted((change.exact for change in found), reverse=True)


def test_changes_rank_exact_and_free_then_exact_and_slower_then_what_is_trained() -> None:
    """In the order of families for a run that does not fit; with savings, the largest first."""
    config = replace(SMALL, compile=False, casts="kept", gradients="kept", states="late")
    for trainer in ("fitgpt", "nanogpt"):
        changes = single_changes(config, trainer)
        ranks = [RANKS.index(option.change.rank) for option in changes]
        assert ranks == sorted(ranks)
        assert set(ranks) == {0, 1, 2}
        before = memory_use(config, SETTING, trainer)
        priced_ones = ranked(priced(option, before, SETTING, budget_of(GiB)) for option in changes)
        for first, second in pairwise(priced_ones):
            if (first.change.kind, first.change.rank, first.fits) == (
                    second.change.kind, second.change.rank, second.fits):
                assert first.needs <= second.needs
        assert [RANKS.index(each.change.rank) for each in priced_ones] == ranks


def test_a_change_of_the_effective_batch_size_is_never_a_plain_saving() -> None:
    changed = [option for trainer in ("fitgpt", "nanogpt") for option in single_changes(SMALL, trainer)
               if option.config.tokens_per_step != SMALL.tokens_per_step]
    assert {option.change.family for option in changed} == {"accumulation", "step_in_backward"}
    for option in changed:
        assert (option.change.kind, option.change.rank) == ("batch", "changes what is trained")


def test_only_scales_have_several_changes_in_a_family() -> None:
    sizes: dict[str, int] = {}
    for option in single_changes(replace(SMALL, gradient_accumulation_steps=1)):
        sizes[option.change.family] = sizes.get(option.change.family, 0) + 1
    several = {name for name, size in sizes.items() if size > 1}
    assert several == {"batch", "saved_activations", "evaluation", "loss", "offload"}


def test_nothing_is_suggested_where_no_single_change_is_enough() -> None:
    assert smallest_that_fit(SMALL, SETTING, budget_of(16 * MiB)) == ()


def test_a_saver_without_accumulation_says_that_steps_have_fewer_tokens() -> None:
    def costs(accumulation: int) -> str:
        config = RunConfig(gradient_accumulation_steps=accumulation, vocab_size=50304, dtype="bfloat16")
        return next(each.change.slower for each in single_changes(config)
                    if "--step_in_backward=True" in each.change.flags)

    assert "steps of 40 times fewer tokens, unless batch_size grows as much" in costs(40)
    assert "fewer tokens" not in costs(1)
