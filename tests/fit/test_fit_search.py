"""What fit chooses: it fits, nothing faster of its kind was left out, and nothing was changed without permission."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from fitgpt.config.memory_savers import LEVELS
from fitgpt.config.run_config import RunConfig, diff
from fitgpt.core.errors import UsageError
from fitgpt.core.units import MiB
from fitgpt.hardware import gpus
from fitgpt.memory.setting import Setting, setting_for
from fitgpt.nouns import Budget, Fitted, SpeedEstimate, Standing
from fitgpt.planning import choose, search
from fitgpt.planning.changes import fits, holdings
from fitgpt.planning.choose import Here, because, fit, fit_config
from fitgpt.planning.closed import in_words, lowered, mix_of, raised
from fitgpt.planning.forecast import settled
from fitgpt.planning.permission import in_words as in_allow
from fitgpt.planning.permission import parse_allow, ways
from fitgpt.planning.search import Search
from fitgpt.show.fitting import verdict

CARD = gpus.find("4070")
SETTING = setting_for(CARD)
SMALL = RunConfig(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8, gradient_accumulation_steps=4,
                  vocab_size=5000, eval_iters=6, dtype="bfloat16", compile=True)
TRAINED = ("n_layer", "n_head", "n_embd", "block_size", "weights", "residual", "optimizer", "dtype", "seed", "dataset",
           "learning_rate", "grad_clip", "step_in_backward", "bias", "dropout", "vocab_size", "eval_block_size")


def budget_of(limit: int) -> Budget:
    return Budget("RTX 4070", limit, 0, limit, 0)


@cache
def fitted(limit_mib: int, config: RunConfig = SMALL, allow: str = "", **told: Any) -> Fitted:
    return fit_config(config, SETTING, budget_of(limit_mib * MiB), parse_allow(allow), card=CARD, **told)


@pytest.mark.parametrize("limit", [90, 160, 900])
def test_the_chosen_plan_fits_trains_the_same_and_spends_what_is_there(limit: int) -> None:
    """As `Per-layer recompute` promises: if any one layer kept more, the run would not fit."""
    found = fitted(limit)
    assert found.chosen is not None
    chosen, budget = found.chosen.config, budget_of(limit * MiB)
    assert fits(chosen, SETTING, budget)
    assert found.chosen.needs == holdings(chosen, SETTING).needs <= limit * MiB
    assert found.chosen.headroom == limit * MiB - found.chosen.needs
    assert chosen.batch_size * chosen.gradient_accumulation_steps == 32
    assert {knob for knob, _, _ in diff(SMALL, chosen)} & set(TRAINED) == set()
    for level in set(chosen.levels):
        for more in LEVELS[:LEVELS.index(level)]:
            levels = list(chosen.levels)
            levels.remove(level)
            kept = sorted([*levels, more], key=LEVELS.index, reverse=True)  # those that keep least come first
            less = replace(chosen, recompute=",".join(f"1*{each}" for each in kept), grad_checkpoint=False)
            assert not fits(less, SETTING, budget), (level, more)


@pytest.mark.parametrize(("limit", "allow"), [(60, ""), (90, "lossy"), (160, ""), (900, "lossy")])
def test_a_second_process_finds_what_one_finds_alone(limit: int, allow: str) -> None:
    """It begins with all that this one knows, and tells it no more than what can be written into a pipe."""
    def elsewhere(work: Callable[[], Any]) -> Callable[[], Any]:
        before = {name: dict(known) for name, known in (("parts", search.field.folded._known),
                                                        ("replayed", search._replayed))}
        told = marshal.dumps(work())
        for known, name in ((search.field.folded._known, "parts"), (search._replayed, "replayed")):
            known.clear()
            known.update(before[name])
        return lambda: marshal.loads(told)

    may, budget = parse_allow(allow), budget_of(limit * MiB)
    alone = Search(SMALL, SETTING, budget, CARD, may)
    search = Search(SMALL, SETTING, budget, CARD, may, aside=elsewhere)
    assert [each.config for each in search.finalists()] == [each.config for each in alone.finalists()]
    assert search.scanned.fastest == alone.scanned.fastest
    assert (search.considered, search.replays, search.frontier()) == (
        alone.considered, alone.replays, alone.frontier())


def test_more_memory_is_never_slower() -> None:
    speeds = [found.chosen.speed.high for limit in (90, 160, 900)
              if (found := fitted(limit)).chosen and found.chosen.speed]
    assert len(speeds) == 3
    assert speeds == sorted(speeds)


def test_no_other_micro_batch_at_its_own_best_levels_is_faster_by_a_percent() -> None:
    limit = budget_of(160 * MiB)
    found = fitted(160)
    assert found.chosen is not None
    assert found.chosen.speed is not None
    for batch in (1, 2, 4, 8, 16, 32):
        for level in LEVELS:
            other = replace(SMALL, batch_size=batch, gradient_accumulation_steps=32 // batch, recompute=level,
                            eval_batch_size=1)
            if fits(other, SETTING, limit):
                told = choose.Here(SETTING, limit, CARD).search(other, frozenset()).standing(other, "free", at_most=0)
                assert told.speed is not None
                assert told.speed.high <= 1.01 * found.chosen.speed.high


def test_a_run_that_is_best_as_it_is_stays_so() -> None:
    first = fitted(160)
    assert first.chosen is not None
    again = fitted(160, first.chosen.config)
    assert again.chosen is not None
    assert again.chosen.flags == ()
    assert again.decisions == ()


def test_memory_that_a_run_leaves_because_it_gains_nothing_is_said() -> None:
    def said(config: RunConfig) -> bool:
        found = fitted(4000, config)
        assert found.chosen is not None
        return any("spends the spare memory" in note for note in found.notes)

    best = fitted(4000).chosen
    assert best is not None
    assert not said(best.config)  # nothing is recomputed
    assert said(replace(best.config, recompute="1*products,3*all"))


def test_a_run_that_stays_though_something_is_faster_does_not_say_that_nothing_is() -> None:
    """By the percent: lossy savers have to gain more than one."""
    asked = Standing(SMALL, (), "free", 900 * MiB, MiB, SpeedEstimate(1000, 1000, 1000, ""))
    for speed, words in ((1070, "nothing found is enough faster"), (1005, "nothing found is 1 % faster")):
        other = asked._replace(flags=("--weights=bfloat16",), speed=SpeedEstimate(speed, speed, speed, ""))
        assert words in verdict(Fitted(budget_of(901 * MiB), asked, asked, runners_up=(other,)))


def test_evaluation_covers_the_same_windows_or_says_that_it_does_not() -> None:
    for eval_iters in (6, 5):
        config = replace(SMALL, eval_iters=eval_iters)
        found = fitted(900, config)
        assert found.chosen is not None
        assert found.chosen.config.batch_size > 8
        now, before = (each.eval_iters * each.batch_size for each in (found.chosen.config, config))
        words = " ".join(decision.why for decision in found.decisions)
        assert now >= before
        assert (f"{now:,} windows instead of {before:,}" in words) == (now != before)


def test_every_change_is_a_decision_with_its_reason() -> None:
    found = fitted(90)
    assert found.chosen is not None
    told = {knob: pair for decision in found.decisions for knob, pair in decision.knobs.items()}
    assert told == {knob: (was, now) for knob, was, now in diff(SMALL, found.chosen.config)}
    assert all(decision.why for decision in found.decisions)
    assert any("it would need about" in decision.why for decision in found.decisions)


def test_why_a_larger_micro_batch_is_faster_depends_on_where_gradients_go() -> None:
    here = Here(SETTING, budget_of(900 * MiB), CARD)
    for offload, words in (("none", "larger products"), ("gradients", "gradients leave the card less often")):
        said = replace(SMALL, offload=offload)
        decision, = because(said, replace(said, batch_size=16, gradient_accumulation_steps=2), here)
        assert words in decision.why


def test_a_plan_says_that_it_spends_all_only_where_a_layer_could_keep_more() -> None:
    def why(found: Fitted) -> str:
        return next(decision.why for decision in found.decisions if "recompute" in decision.knobs)

    assert "as little as fits" in why(fitted(81))
    assert "as little as fits" not in why(fitted(900))


def test_what_lives_on_the_host_is_tried_only_where_there_is_room_for_it() -> None:
    tight = fitted(70)
    assert tight.chosen is not None
    assert tight.chosen.permission == "places"
    assert tight.chosen.config.offload != "none"
    without = fitted(70, host_bytes=1000)
    assert without.chosen is None or without.chosen.config.offload == "none"


def test_lossy_savers_are_used_only_if_allowed_and_only_those() -> None:
    assert fitted(42).chosen is None
    found = fitted(60, allow="lossy")
    assert found.chosen is not None
    assert found.chosen.permission == "lossy"
    named = fitted(55, allow="residual")
    assert named.chosen is not None
    assert named.chosen.config.weights == "float32"
    assert named.chosen.config.optimizer == "adamw"


def test_a_lossy_saver_is_not_used_where_it_gains_little() -> None:
    found = fitted(900, allow="adam8bit")
    assert found.chosen is not None
    assert found.chosen.config.optimizer == "adamw"


@pytest.mark.parametrize("number", range(40))
def test_allowing_lossy_savers_never_gives_a_worse_answer(number: int) -> None:
    """What fits without them is kept, unless the estimate can tell that the other is faster."""
    draw = Random(number)
    card = gpus.find(draw.choice(("4070", "3060", "4090", "2080ti", "h200")))
    setting, heads = setting_for(card), draw.choice((2, 4, 8))
    config = RunConfig(
        n_layer=draw.choice((2, 4, 8)), n_head=heads, n_embd=64 * heads, block_size=draw.choice((128, 512, 1024)),
        batch_size=draw.choice((1, 4, 8, 12)), gradient_accumulation_steps=draw.choice((1, 4, 5, 40)),
        vocab_size=draw.choice((65, 5000, 50304)), dtype="float16", compile=setting.compiles,
        recompute=draw.choice(("products", "all", "input")))
    limit = int(holdings(settled(config, setting), setting).needs * draw.choice((0.7, 1.0, 1.05, 1.2, 2.0)))
    exact, lossy = (fit_config(config, setting, budget_of(limit), parse_allow(allow), card=card).chosen
                    for allow in ("", "lossy"))
    if exact is not None:
        assert lossy is not None
        assert exact.speed is not None
        assert lossy.speed is not None
        assert lossy.config == exact.config or lossy.speed.likely > (1 + search.ALIKE / 2) * exact.speed.likely


def test_a_change_within_the_estimates_error_is_not_taken_for_the_sake_of_a_lossy_one() -> None:
    """GPT-2 350M: `fit` keeps the run as it is, and `--allow lossy` answered 0.2 % faster for 1.42 GiB more."""
    gpt2 = RunConfig(n_layer=24, n_head=16, n_embd=1024, block_size=1024, batch_size=8, gradient_accumulation_steps=60,
                     vocab_size=50304, dtype="bfloat16", compile=True)
    kept, lossy = (fitted(11604, gpt2, allow) for allow in ("", "lossy"))
    assert kept.chosen is not None
    assert lossy.chosen is not None
    assert kept.chosen.flags == ()
    assert lossy.chosen.permission == "lossy"


def test_savers_that_train_by_another_rule_are_used_only_by_their_name() -> None:
    one_step = replace(SMALL, gradient_accumulation_steps=1)
    lossy = {knob for way in ways(one_step, SETTING, parse_allow("lossy")) for knob in way.knobs}
    assert "step_in_backward" not in lossy
    named = [way.knobs for way in ways(one_step, SETTING, parse_allow("step_in_backward,muon"))]
    assert any(knobs.get("step_in_backward") for knobs in named)
    assert any(knobs.get("optimizer") == "muon" for knobs in named)
    for knobs in named:
        replace(one_step, **knobs)  # no two that exclude each other


def test_bitsandbytes_is_used_where_it_was_asked_for_and_nowhere_else() -> None:
    assert not any("adam8bit" in way.knobs for way in ways(SMALL, SETTING, parse_allow("lossy,muon")))
    asked = replace(SMALL, optimizer="adam8bit", adam8bit="bitsandbytes")
    for allow in ("", "lossy"):
        found = fitted(900, asked, allow)
        assert found.chosen is not None
        assert (found.chosen.config.optimizer, found.chosen.config.adam8bit) == ("adam8bit", "bitsandbytes")


def test_without_bfloat16_nothing_is_rounded_to_it() -> None:
    knobs = [way.knobs for way in ways(replace(SMALL, dtype="float16"), Setting((7, 5)), parse_allow("lossy"))]
    assert any(each.get("optimizer") == "adam8bit" for each in knobs)
    assert not any("weights" in each or "residual" in each for each in knobs)


def test_a_shorter_block_or_a_smaller_model_comes_only_if_allowed_and_needed() -> None:
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


def test_where_nothing_fits_the_least_is_named_and_what_would_help() -> None:
    found = fitted(42)
    assert found.chosen is None
    assert found.least is not None
    assert found.least.needs == holdings(found.least.config, SETTING).needs > 42 * MiB
    assert [way.flags for way in found.ways_out][:2] == [("--allow=lossy",), ("--allow=model",)]
    assert found.ways_out[-1].flags[0].startswith("--gpu=")
    assert not fits(found.least.config, SETTING, budget_of(42 * MiB))
    tiny = replace(SMALL, n_layer=1, n_head=1, n_embd=64, block_size=64, batch_size=1, gradient_accumulation_steps=1)
    assert [way.flags[0][:6] for way in fitted(3, tiny, "lossy,context,model").ways_out] == ["--gpu="]


@pytest.mark.parametrize("allow", ["", "context", "adam8bit"])
def test_every_way_out_makes_something_fit_in_the_memory_it_names(allow: str) -> None:
    found = fitted(42, allow=allow)
    if found.chosen is None:
        assert found.ways_out
    for way in found.ways_out:
        flag, _, value = way.flags[0].partition("=")
        if flag == "--allow":
            helped = fitted(42, allow=value)
            assert helped.chosen is not None
            assert way.least <= 42 * MiB
        assert way.words


def test_a_run_kept_from_the_card_by_its_budget_is_told_how_much_it_wants() -> None:
    config = replace(SMALL, budget="42MiB")
    found = fit_config(config, SETTING, Budget("RTX 4070", 900 * MiB, 0, 42 * MiB, 0), card=CARD)
    flag = found.ways_out[0].flags[0]
    assert flag.startswith("--budget=")
    assert flag.endswith("MiB")
    more = int(flag.removeprefix("--budget=").removesuffix("MiB")) * MiB
    again = fit_config(config, SETTING, Budget("RTX 4070", 900 * MiB, 0, more, 0), card=CARD)
    assert again.chosen is not None
    leaving = fit_config(replace(SMALL, leave="858MiB"), SETTING, Budget("RTX 4070", 900 * MiB, 0, 42 * MiB, 0),
                         card=CARD)
    assert leaving.ways_out[0].flags[0].startswith("--leave=")


def test_of_plans_about_as_fast_the_one_that_changes_least_is_taken_and_the_run_as_it_is_before_all() -> None:
    looked = Search(SMALL, SETTING, budget_of(900 * MiB), CARD, frozenset())
    taken, *others = looked.finalists()
    best = min(one.score for one in (taken, *others))
    assert taken.score <= (1 + search.ALIKE) * best
    for one in others:
        if one.score <= (1 + search.ALIKE) * best:
            assert looked.bother(taken) <= looked.bother(one)
    nearly = replace(taken.config, recompute="products")  # half a percent slower, in less memory
    assert fitted(900, nearly).decisions == ()
    assert fitted(900, nearly).runners_up


def test_step_in_backward_never_changes_a_steps_tokens_nor_a_neighbours_share() -> None:
    for config in (SMALL, replace(SMALL, gradient_accumulation_steps=1)):
        for limit in (60, 900):
            found = fitted(limit, config, allow="step_in_backward")
            for standing in (found.chosen, *found.runners_up):
                if standing is not None:
                    assert standing.config.tokens_per_step == config.tokens_per_step
    beside = Search(SMALL, SETTING, budget_of(900 * MiB), CARD, parse_allow("step_in_backward"), most_batch=8)
    ways_at_once = [way for way in beside.ways if way.knobs.get("step_in_backward")]
    assert ways_at_once
    assert all(beside.field.batches(way) == [] for way in ways_at_once)
    assert all(way.permission == "rules" for way in ways_at_once)


def test_the_least_is_below_whatever_else_was_tried() -> None:
    found = fitted(42)
    assert found.least is not None
    for changes in (dict(recompute="input"), dict(offload="gradients"), dict(offload="gradients", recompute="input"),
                    dict(offload="gradients", recompute="input", loss_chunk=128)):
        other = replace(SMALL, batch_size=1, gradient_accumulation_steps=32, eval_batch_size=1, **changes)  # type: ignore[arg-type]
        assert found.least.needs <= holdings(other, SETTING).needs


def test_a_neighbours_card_is_not_filled() -> None:
    found = fitted(900, most_batch=8)
    assert found.chosen is not None
    assert found.chosen.config.batch_size <= 8


def test_a_resumed_run_may_be_split_otherwise_but_stays_what_it_was() -> None:
    resumed = replace(SMALL, init_from="resume")
    found = fitted(900, resumed, allow="lossy,context")
    assert found.chosen is not None
    assert {knob for knob, _, _ in diff(resumed, found.chosen.config)} & set(TRAINED) == set()
    assert any("stays what it was" in note for note in found.notes)


def test_grad_checkpoint_is_lifted_where_there_is_room() -> None:
    config = replace(SMALL, grad_checkpoint=True)
    found = fitted(900, config)
    assert found.chosen is not None
    assert not found.chosen.config.grad_checkpoint
    assert set(found.chosen.config.levels) == {"all"}


def test_an_eager_run_is_compiled_where_that_works_and_only_there() -> None:
    eager = replace(SMALL, compile=False)
    found = fitted(160, eager)
    assert found.chosen is not None
    assert found.chosen.config.compile is True
    windows = fit_config(eager, replace(SETTING, compiles=False, expandable=False), budget_of(900 * MiB), card=CARD)
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
        assert not each.exact
        assert holdings(each.config, SETTING).needs <= each.needs <= 160 * MiB


def test_a_card_without_figures_is_fitted_too() -> None:
    found = fit(SMALL, Here(SETTING, budget_of(160 * MiB)))
    assert found.chosen is not None
    assert found.chosen.speed is None


def test_lossy_candidates_that_were_skipped_could_not_have_won(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted(60, allow="lossy")
    fitted.cache_clear()
    monkeypatch.setattr(search, "_most_lossy", lambda found: [way for way in found if way.permission == "lossy"])
    in_full = fitted(60, allow="lossy")
    assert found.chosen is not None
    assert in_full.chosen is not None
    assert found.chosen.config == in_full.chosen.config


@pytest.mark.parametrize(("typed", "short"), [
    ("lossy", "lossy"), ("weights,adam8bit,residual", "lossy"), ("adam8bit", "adam8bit"), ("", ""),
    ("model lossy", "lossy,model")])
def test_what_is_allowed_is_said_as_it_could_be_typed(typed: str, short: str) -> None:
    assert in_allow(parse_allow(typed)) == short
    assert parse_allow(short) == parse_allow(typed)


@pytest.mark.parametrize("text", ["losy", "lossy,8bit", "everything"])
def test_what_cannot_be_allowed_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="is none of lossy"):
        parse_allow(text)


def test_mixes_go_up_and_down_one_layer_at_a_time() -> None:
    mix = ((5, 2), (1, 2))
    assert set(raised(mix)) == {((5, 1), (more, 1), (1, 2)) for more in (4, 3, 2)} | {
        ((5, 1), (1, 3)), ((5, 1), (1, 2), (0, 1)), ((5, 2), (1, 1), (0, 1))}
    assert lowered(mix) == ((5, 3), (1, 1))
    assert lowered(((5, 4),)) is None
    assert lowered(((1, 4),)) == ((2, 1), (1, 3))
    assert raised(((0, 4),)) == []
    assert all(sum(layers for _, layers in each) == 4 for each in raised(mix))


def test_a_settled_finalist_is_what_its_config_says() -> None:
    looked = Search(SMALL, SETTING, budget_of(160 * MiB), CARD, frozenset())
    best = looked.finalists()[0]
    assert settled(best.config, SETTING).levels == settled(replace(SMALL, recompute=in_words(best.mix)), SETTING).levels
    assert mix_of(best.config.levels) == best.mix


def test_where_not_even_the_smallest_model_fits_the_others_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Search] = []
    really = choose.could_fit

    def noted(one: Search) -> bool:
        tried.append(one)
        return really(one)

    monkeypatch.setattr(choose, "could_fit", noted)
    for allow in ("", "lossy,context,model"):
        deep = replace(SMALL, n_head=16, n_layer=16)
        assert fit_config(deep, SETTING, budget_of(MiB), parse_allow(allow), card=CARD).chosen is None
    assert len(tried) < 8
