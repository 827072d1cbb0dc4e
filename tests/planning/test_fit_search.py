"""What `fit` chooses: it fits, no candidate of its kind is faster, and nothing changes without permission."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.memory_savers import POLICIES
from fitgpt.config.run_config import RunConfig, diff, resolve_run
from fitgpt.core.errors import UsageError
from fitgpt.core.units import MiB, show_bytes
from fitgpt.hardware import gpus
from fitgpt.memory.platform import Platform
from fitgpt.planning import fit_search, measured_speeds
from fitgpt.planning.budget import Budget, platform_for
from fitgpt.planning.changes import memory_use
from fitgpt.planning.fit_goals import FitResult, decisions_for, find_fastest
from fitgpt.planning.fit_search import FitTarget, Search, describe_allow, parse_allow, saver_sets
from fitgpt.planning.forecast import fits as run_fits
from fitgpt.planning.layer_costs import mix_of, one_layer_down, one_layer_up
from fitgpt.planning.speed import estimate
from fitgpt.show.fit_text import step_up_text, verdict

CARD = gpus.find("4070")
SETTING = platform_for(CARD, torch="2.13")
SMALL = RunConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8, gradient_accumulation_steps=2,
                  vocab_size=5000, eval_iters=6, dtype="bfloat16", compile=True)
TINY = replace(SMALL, n_layer=2, n_head=2, n_embd=128, block_size=128, batch_size=2)  # for a cheaper search
LARGE_BATCH = replace(SMALL, batch_size=16, gradient_accumulation_steps=2, eval_iters=3)  # little is faster
TRAINED = ("n_layer", "n_head", "n_embd", "block_size", "weights", "residual", "optimizer", "dtype", "seed", "dataset",
           "learning_rate", "grad_clip", "step_in_backward", "bias", "dropout", "vocab_size", "eval_block_size")


def budget_of(limit: int) -> Budget:
    return Budget("RTX 4070", limit, 0, limit, 0)


def target_of(limit: int, **more: Any) -> FitTarget:
    return FitTarget(SETTING, budget_of(limit), CARD, **more)


@cache
def fitted(limit_mib: int, config: RunConfig = SMALL, allow: str = "", **more: Any) -> FitResult:
    return find_fastest(config, target_of(limit_mib * MiB, **more), parse_allow(allow))


def fits(config: RunConfig, platform: Platform, budget: Budget) -> bool:
    return run_fits(resolve_run(config, platform), platform, budget.reserve_limit)


def test_a_run_that_fits_keeps_cuda_graphs_for_a_few_mib_of_their_pool() -> None:
    notes = RunConfig(n_layer=12, n_head=12, n_embd=576, batch_size=16, block_size=1024, vocab_size=50304,
                      gradient_accumulation_steps=8, eval_batch_size=4, eval_block_size=512, eval_iters=50,
                      grad_checkpoint=True, dtype="float16", compile=True)
    chosen = fitted(11_000, notes, "lossy").chosen
    assert chosen is not None
    assert not chosen.config.grad_checkpoint  # it is another than the given run
    assert resolve_run(chosen.config, SETTING).uses_cuda_graphs


@pytest.mark.parametrize("limit", [70, 81])
def test_the_chosen_settings_fit_train_the_same_and_use_the_memory(limit: int) -> None:
    """If any single layer kept more, the run would not fit, or be faster by less than the roofline can tell."""
    found = fitted(limit)
    assert found.chosen is not None
    chosen, budget = found.chosen.config, budget_of(limit * MiB)
    assert fits(chosen, SETTING, budget)
    assert found.chosen.needs == memory_use(chosen, SETTING).needs <= limit * MiB
    assert found.chosen.headroom == limit * MiB - found.chosen.needs
    assert chosen.batch_size * chosen.gradient_accumulation_steps == 16
    assert {option for option, _, _ in diff(SMALL, chosen)} & set(TRAINED) == set()
    assert set(chosen.policies) != {"all"}
    for policy in set(chosen.policies):
        for more in POLICIES[:POLICIES.index(policy)]:
            policies = list(chosen.policies)
            policies.remove(policy)
            kept = sorted([*policies, more], key=POLICIES.index, reverse=True)  # those that keep least come first
            less = replace(chosen, saved_activations=",".join(f"1*{each}" for each in kept), grad_checkpoint=False)
            faster = estimate(less, CARD, SETTING).likely / found.chosen.speed.likely - 1  # type: ignore[union-attr]
            assert faster < fit_search.TIE or not fits(less, SETTING, budget), (policy, more)


def test_more_memory_is_never_slower_where_the_given_run_does_not_fit() -> None:
    speeds = [found.chosen.speed.high for limit in (70, 90, 160)
              if (found := fitted(limit)).chosen and found.chosen.speed]
    assert len(speeds) == 3
    assert speeds == sorted(speeds)


def test_no_other_micro_batch_is_more_than_1_percent_faster() -> None:
    limit = budget_of(160 * MiB)
    found = fitted(160)
    assert found.chosen is not None
    assert found.chosen.speed is not None
    for batch in (1, 2, 4, 8, 16):
        for policy in POLICIES:
            other = replace(SMALL, batch_size=batch, gradient_accumulation_steps=16 // batch, saved_activations=policy,
                            eval_batch_size=1)
            if fits(other, SETTING, limit):
                expected = estimate(other, CARD, SETTING)
                assert expected is not None
                assert expected.high <= 1.01 * found.chosen.speed.high


def test_the_fastest_settings_stay_unchanged() -> None:
    first = fitted(160)
    assert first.chosen is not None
    again = fitted(160, first.chosen.config)
    assert again.chosen is not None
    assert again.chosen.flags == ()
    assert again.decisions == ()


def test_a_run_that_fits_stays_as_given_and_the_next_step_up_is_named_with_its_price() -> None:
    found = fitted(900, LARGE_BATCH)
    assert found.chosen is not None
    assert found.step_up is not None
    assert found.chosen.flags == ()
    assert found.decisions == ()
    assert found.step_up.needs > found.chosen.needs
    assert found.step_up.speed is not None
    assert found.chosen.speed is not None
    assert 1 < found.step_up.speed.likely / found.chosen.speed.likely < 1 + found.error
    assert found.error == found.chosen.speed.error > 0.1
    assert "nothing is faster by more than the estimate's error (±" in verdict(found)
    text = step_up_text(found)
    for part in ("% faster", show_bytes(found.step_up.needs - found.chosen.needs), *found.step_up.flags):
        assert part in text


def test_the_next_step_up_is_the_cheapest_with_most_of_the_gain() -> None:
    config = replace(SMALL, batch_size=32, gradient_accumulation_steps=1, grad_checkpoint=True)
    found, one_flag = fitted(2000, config), replace(config, grad_checkpoint=False)
    assert found.chosen is not None
    assert found.step_up is not None
    assert found.chosen.flags == ()
    assert found.step_up.config.cuda_graphs == config.cuda_graphs
    assert found.step_up.needs <= memory_use(one_flag, SETTING).needs
    given, now, other = (estimate(each, CARD, SETTING).likely  # type: ignore[union-attr]
                         for each in (config, found.step_up.config, one_flag))
    assert now - given > 0.8 * (other - given)


def test_a_run_that_does_not_fit_keeps_what_costs_no_time() -> None:
    """The CPU decides the speed here: less recomputation would take memory and gain nothing."""
    found = fitted(60, replace(SMALL, gradient_accumulation_steps=4, grad_checkpoint=True))
    assert found.chosen is not None
    assert found.chosen.config.grad_checkpoint
    assert found.chosen.headroom > 0


def test_a_gain_beyond_the_error_is_taken_with_as_little_memory_as_gives_it() -> None:
    slow = replace(SMALL, compile=False, saved_activations="input", batch_size=1, gradient_accumulation_steps=16)
    search = Search(slow, target_of(900 * MiB), frozenset())
    given, chosen = search.unchanged(), search.choose()
    assert given is not None
    assert chosen is not None
    assert search.gains(chosen, given)
    better = [one for one in search.candidates if search.gains(one, given) and one.mapped <= search.usual_limit]
    fastest = min(better, key=lambda one: one.seconds)
    assert not search.gains(fastest, chosen)
    assert chosen.mapped == min(one.mapped for one in better if not search.gains(fastest, one))


def test_a_measured_gain_of_three_percent_is_taken_and_an_estimated_one_is_not(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path))
    larger = replace(LARGE_BATCH, batch_size=32, gradient_accumulation_steps=1, eval_iters=2, saved_activations="all")
    assert fitted(900, LARGE_BATCH).chosen.flags == ()  # type: ignore[union-attr]
    for config, speed in ((LARGE_BATCH, 100_000.0), (larger, 103_000.0)):
        measured_speeds.add(CARD.name, resolve_run(config, SETTING), speed, "2.13", "fit --measure")
    found = find_fastest(LARGE_BATCH, target_of(900 * MiB))
    assert found.chosen is not None
    assert found.chosen.speed is not None
    assert (found.chosen.config.batch_size, found.chosen.config.saved_activations) == (32, "all")
    assert found.chosen.speed.likely == 103_000
    assert "measured here on " in found.chosen.speed.basis


def test_evaluations_cover_the_same_windows_or_a_reason_says_otherwise() -> None:
    for eval_iters in (6, 5):
        config = replace(SMALL, eval_iters=eval_iters, batch_size=16, gradient_accumulation_steps=1)
        found = fitted(90, config)
        assert found.chosen is not None
        assert found.chosen.config.batch_size < 16
        now, before = (each.eval_iters * each.batch_size for each in (found.chosen.config, config))
        reasons = " ".join(decision.why for decision in found.decisions)
        assert now >= before
        assert (f"{now:,} windows instead of {before:,}" in reasons) == (now != before)


def test_every_change_is_a_decision_with_its_reason() -> None:
    found = fitted(90)
    assert found.chosen is not None
    explained = {option: pair for decision in found.decisions for option, pair in decision.changes.items()}
    assert explained == {option: (was, now) for option, was, now in diff(SMALL, found.chosen.config)}
    assert all(decision.why for decision in found.decisions)
    assert any("it would need about" in decision.why for decision in found.decisions)


def test_the_reason_for_a_larger_micro_batch_depends_on_offload() -> None:
    target = target_of(900 * MiB)
    for offload, text in (("none", "larger matmuls"), ("gradients", "gradients leave the GPU less often")):
        given = replace(SMALL, offload=offload)
        decision, = decisions_for(given, replace(given, batch_size=16, gradient_accumulation_steps=1), target)
        assert text in decision.why


def test_a_reason_says_as_little_recomputation_as_fits_only_where_layers_recompute() -> None:
    why = next(decision.why for decision in fitted(81).decisions if "saved_activations" in decision.changes)
    assert "as little recomputation as fits" in why
    roomy, = decisions_for(replace(SMALL, saved_activations="input"), replace(SMALL, saved_activations="all"),
                           target_of(900 * MiB))
    assert "as little recomputation as fits" not in roomy.why


def test_offload_is_tried_only_where_cpu_ram_is_enough() -> None:
    tight = fitted(70)
    assert tight.chosen is not None
    assert tight.chosen.permission == "places"
    assert tight.chosen.config.offload != "none"
    without = fitted(70, host_bytes=1000)
    assert without.chosen is None or without.chosen.config.offload == "none"


def test_lossy_savers_are_used_only_if_allowed_and_only_those() -> None:
    assert fitted(42).chosen is None
    found = fitted(42, allow="lossy,context")
    assert found.chosen is not None
    assert found.chosen.permission == "lossy"
    named = fitted(55, allow="residual")
    assert named.chosen is not None
    assert named.chosen.config.weights == "float32"
    assert named.chosen.config.optimizer == "adamw"


def test_allowing_a_lossy_saver_adds_neither_it_nor_an_exact_change_within_the_error() -> None:
    lossy = fitted(900, LARGE_BATCH, "adam8bit")
    assert lossy.chosen is not None
    assert lossy.chosen.flags == ()
    assert lossy.step_up is not None
    assert lossy.step_up.permission == "free"  # nor does the next step up, where an exact one has most of the gain


def test_savers_with_another_training_rule_need_their_name() -> None:
    one_step = replace(SMALL, gradient_accumulation_steps=1)
    lossy = {option for savers in saver_sets(one_step, SETTING, parse_allow("lossy")) for option in savers.options}
    assert "step_in_backward" not in lossy
    named = [savers.options for savers in saver_sets(one_step, SETTING, parse_allow("step_in_backward,muon"))]
    assert any(options.get("step_in_backward") for options in named)
    assert any(options.get("optimizer") == "muon" for options in named)
    for options in named:
        replace(one_step, **options)  # no two exclude each other


def test_bitsandbytes_is_used_only_where_it_was_given() -> None:
    assert not any("adam8bit" in savers.options for savers in saver_sets(SMALL, SETTING, parse_allow("lossy,muon")))
    requested = replace(TINY, optimizer="adam8bit", adam8bit="bitsandbytes")
    for allow in ("", "residual"):
        found = fitted(900, requested, allow)
        assert found.chosen is not None
        assert (found.chosen.config.optimizer, found.chosen.config.adam8bit) == ("adam8bit", "bitsandbytes")


def test_gpus_without_bfloat16_get_no_bfloat16_savers() -> None:
    turing = Platform((7, 5))
    found = [savers.options for savers in saver_sets(replace(SMALL, dtype="float16"), turing, parse_allow("lossy"))]
    assert any(each.get("optimizer") == "adam8bit" for each in found)
    assert not any("weights" in each or "residual" in each for each in found)


def test_a_shorter_block_or_a_smaller_model_is_chosen_only_if_allowed_and_needed() -> None:
    shorter = fitted(38, allow="weights,context")
    assert shorter.chosen is not None
    assert shorter.chosen.permission == "context"
    assert shorter.chosen.config.block_size < SMALL.block_size
    assert shorter.chosen.config.tokens_per_step == SMALL.tokens_per_step
    smaller = fitted(38, allow="model")
    assert smaller.chosen is not None
    assert smaller.chosen.permission == "model"
    assert smaller.chosen.config.n_embd < SMALL.n_embd
    assert smaller.chosen.config.n_embd // smaller.chosen.config.n_head == 64
    roomy = fitted(160, allow="context,model")
    assert roomy.chosen is not None
    assert roomy.chosen.config.n_embd == SMALL.n_embd
    assert roomy.chosen.config.block_size == SMALL.block_size


def test_where_nothing_fits_the_smallest_memory_and_suggestions_are_given() -> None:
    found = fitted(42)
    assert found.chosen is None
    assert found.least is not None
    assert found.least.needs == memory_use(found.least.config, SETTING).needs > 42 * MiB
    assert [each.flags for each in found.suggestions][:2] == [("--allow=lossy",), ("--allow=model",)]
    assert found.suggestions[-1].flags[0].startswith("--gpu=")
    assert not fits(found.least.config, SETTING, budget_of(42 * MiB))
    tiny = replace(SMALL, n_layer=1, n_head=1, n_embd=64, block_size=64, batch_size=1, gradient_accumulation_steps=1)
    assert [each.flags[0][:6] for each in fitted(3, tiny, "lossy,context,model").suggestions] == ["--gpu="]


def test_every_suggestion_fits_in_the_memory_it_states() -> None:
    allowing = [each for each in fitted(42, allow="context").suggestions if each.flags[0].startswith("--allow=")]
    assert [each.flags for each in allowing] == [("--allow=lossy,context",), ("--allow=context,model",)]
    for each in allowing:
        assert fitted(42, allow=each.flags[0].removeprefix("--allow=")).chosen is not None
        assert each.least <= 42 * MiB
        assert each.text


def test_a_run_limited_by_its_budget_gets_a_budget_that_is_enough() -> None:
    config = replace(TINY, budget="5MiB")
    found = find_fastest(config, FitTarget(SETTING, Budget("RTX 4070", 900 * MiB, 0, 5 * MiB, 0), CARD))
    flag = found.suggestions[0].flags[0]
    assert flag.startswith("--budget=")
    assert flag.endswith("MiB")
    more = int(flag.removeprefix("--budget=").removesuffix("MiB")) * MiB
    again = find_fastest(config, FitTarget(SETTING, Budget("RTX 4070", 900 * MiB, 0, more, 0), CARD))
    assert again.chosen is not None
    leaving = find_fastest(replace(config, budget="", leave="895MiB"),
                           FitTarget(SETTING, Budget("RTX 4070", 900 * MiB, 0, 5 * MiB, 0), CARD))
    assert leaving.suggestions[0].flags[0].startswith("--leave=")


def test_among_tied_candidates_the_one_with_fewest_changes_wins_and_its_config_has_its_mix() -> None:
    search = Search(SMALL, target_of(90 * MiB), frozenset())
    chosen = search.choose()
    assert chosen is not None
    for one in search.runners_up(chosen):
        assert one.seconds >= chosen.seconds / (1 + fit_search.TIE)
        if one.seconds <= chosen.seconds:
            assert one.changes >= chosen.changes
    assert mix_of(search.config_of(chosen).policies) == chosen.mix


def test_step_in_backward_keeps_tokens_per_step_and_the_batch_limit() -> None:
    for config in (SMALL, replace(SMALL, gradient_accumulation_steps=1)):
        found = fitted(60, config, allow="step_in_backward")
        assert found.chosen is not None
        for scored in (found.chosen, *found.runners_up):
            assert scored.config.tokens_per_step == config.tokens_per_step
    shared = Search(SMALL, target_of(900 * MiB, most_batch=8), parse_allow("step_in_backward"))
    in_backward = [savers for savers in shared.saver_sets if savers.options.get("step_in_backward")]
    assert in_backward
    assert all(shared.batches(savers) == [] for savers in in_backward)
    assert all(savers.permission == "rules" for savers in in_backward)


def test_micro_batches_that_no_run_accepts_are_no_candidates() -> None:
    """Two divisors of this step are far apart: what fits is followed by one that a run does not accept."""
    search = Search(replace(TINY, gradient_accumulation_steps=10**9 + 7), target_of(900 * MiB), frozenset())
    assert [search.batches(savers) for savers in search.saver_sets[:1]] == [[1, 2]]
    assert search.choose() is not None


def test_the_smallest_memory_is_below_that_of_other_settings() -> None:
    found = fitted(42)
    assert found.least is not None
    for changes in (dict(saved_activations="input"), dict(offload="gradients"),
                    dict(offload="gradients", saved_activations="input"),
                    dict(offload="gradients", saved_activations="input", loss_chunk=128)):
        other = replace(SMALL, batch_size=1, gradient_accumulation_steps=16, eval_batch_size=1, **changes)  # type: ignore[arg-type]
        assert found.least.needs <= memory_use(other, SETTING).needs


def test_the_batch_limit_of_a_shared_gpu_holds() -> None:
    found = fitted(900, TINY, most_batch=2)
    assert found.chosen is not None
    assert max(each.config.batch_size for each in (found.chosen, *found.runners_up)) <= 2


def test_a_resumed_run_keeps_its_model_and_optimizer() -> None:
    resumed = replace(TINY, init_from="resume")
    found = fitted(900, resumed, allow="lossy,context")
    assert found.chosen is not None
    assert {option for option, _, _ in diff(resumed, found.chosen.config)} & set(TRAINED) == set()
    assert any("cannot change its model or optimizer" in note for note in found.notes)


def test_grad_checkpoint_is_turned_off_where_that_gains_more_than_the_error() -> None:
    config = replace(SMALL, grad_checkpoint=True, batch_size=32, gradient_accumulation_steps=1, n_layer=8,
                     vocab_size=65)
    found = fitted(2000, config)
    assert found.chosen is not None
    assert not found.chosen.config.grad_checkpoint


def test_an_eager_run_is_compiled_only_where_that_works() -> None:
    eager = replace(TINY, compile=False)
    found = fitted(160, eager)
    assert found.chosen is not None
    assert found.chosen.config.compile is True
    on_windows = replace(SETTING, compiles=False, expandable=False)
    windows = find_fastest(eager, FitTarget(on_windows, budget_of(900 * MiB), CARD))
    assert windows.chosen is not None
    assert windows.chosen.config.compile is False


def test_the_frontier_rises_and_the_runners_up_fit_too() -> None:
    found = fitted(160)
    needs, speeds = zip(*found.frontier, strict=True)
    assert list(needs) == sorted(needs)
    assert list(speeds) == sorted(speeds)
    assert found.runners_up
    for each in found.runners_up:
        assert fits(each.config, SETTING, budget_of(160 * MiB))
        assert memory_use(each.config, SETTING).needs == each.needs <= 160 * MiB


def test_a_gpu_without_figures_is_fitted_too() -> None:
    found = find_fastest(TINY, FitTarget(SETTING, budget_of(160 * MiB)))
    assert found.chosen is not None
    assert found.chosen.speed is None


@pytest.mark.parametrize(("typed", "short"), [
    ("lossy", "lossy"), ("weights,adam8bit,residual", "lossy"), ("adam8bit", "adam8bit"), ("", ""),
    ("model lossy", "lossy,model")])
def test_describe_allow_is_the_inverse_of_parse_allow(typed: str, short: str) -> None:
    assert describe_allow(parse_allow(typed)) == short
    assert parse_allow(short) == parse_allow(typed)


@pytest.mark.parametrize("text", ["losy", "lossy,8bit", "everything"])
def test_an_unknown_permission_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="is none of lossy"):
        parse_allow(text)


def test_mixes_change_one_layer_at_a_time() -> None:
    mix = ((5, 2), (1, 2))
    assert set(one_layer_up(mix)) == {((5, 1), (more, 1), (1, 2)) for more in (4, 3, 2)} | {
        ((5, 1), (1, 3)), ((5, 1), (1, 2), (0, 1)), ((5, 2), (1, 1), (0, 1))}
    assert one_layer_down(mix) == ((5, 3), (1, 1))
    assert one_layer_down(((5, 4),)) is None
    assert one_layer_down(((1, 4),)) == ((2, 1), (1, 3))
    assert one_layer_up(((0, 4),)) == []
    assert all(sum(layers for _, layers in each) == 4 for each in one_layer_up(mix))


def test_other_models_are_not_tried_where_the_smallest_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Search] = []
    may_fit = Search.may_fit

    def counted(one: Search) -> bool:
        tried.append(one)
        return may_fit(one)

    monkeypatch.setattr(Search, "may_fit", counted)
    for allow in ("", "lossy,context,model"):
        assert find_fastest(replace(SMALL, n_head=16), target_of(MiB), parse_allow(allow)).chosen is None
    assert len(tried) < 8
