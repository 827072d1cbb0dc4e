"""The largest model, the longest block, the least memory: each trains there, and the next one up does not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fitgpt.config.run_config import RunConfig, gpt2_shapes
from fitgpt.core.errors import UsageError
from fitgpt.core.units import MiB, show_bytes
from fitgpt.hardware import gpus
from fitgpt.memory.setting import setting_for
from fitgpt.nouns import Budget
from fitgpt.planning import model_sizes
from fitgpt.planning.changes import fits, holdings
from fitgpt.planning.choose import UNSURE, Here, could_fit
from fitgpt.planning.goals import reach

CARD = gpus.find("4070")
SETTING = setting_for(CARD)
ASKED = RunConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, batch_size=4, gradient_accumulation_steps=4,
                  vocab_size=1000, dtype="bfloat16", compile=True)


def here(limit_mib: int) -> Here:
    limit = limit_mib * MiB
    return Here(SETTING, Budget("RTX 4070", limit, 0, limit, 0), CARD)


def test_the_sizes_are_gpt2s_own_and_those_between_each_larger_than_the_last() -> None:
    sizes = model_sizes.gpt2_sizes()
    for shape in gpt2_shapes.values():
        assert (shape["n_layer"], shape["n_head"], shape["n_embd"]) in sizes
    parameters = [model_sizes.of_size(ASKED, size).gpt_config().count_params() for size in sizes]
    assert parameters == sorted(set(parameters))


def test_the_largest_model_fits_and_the_next_size_does_not() -> None:
    place = here(70)
    found = reach("largest-model", ASKED, place, frozenset())
    assert found.chosen is not None
    assert found.chosen.permission == "model"
    assert fits(found.chosen.config, SETTING, place.budget)
    assert found.chosen.config.tokens_per_step == ASKED.tokens_per_step
    sizes = model_sizes.gpt2_sizes()
    config = found.chosen.config
    beyond = sizes[sizes.index(model_sizes.Size(config.n_layer, config.n_head, config.n_embd)) + 1]
    assert not could_fit(place.search(model_sizes.of_size(ASKED, beyond), frozenset()))
    assert "The largest that trains there" in found.notes[0]
    assert "tokens/s, 20 tokens a parameter" in found.notes[0]


def test_where_the_largest_leans_on_the_host_the_largest_that_does_not_is_told_too() -> None:
    found = reach("largest-model", ASKED, here(70), frozenset())
    assert found.chosen is not None
    assert found.chosen.config.offload != "none"
    assert found.notes[1].startswith("The largest that stays on the card: ")
    alone = reach("largest-model", ASKED, here(70)._replace(host_bytes=0), frozenset())
    assert alone.chosen is not None
    assert alone.chosen.config.offload == "none"
    assert f"{alone.chosen.config.n_layer} layers" in found.notes[1]
    assert len(alone.notes) == 1


def test_it_is_said_whether_the_card_or_the_host_ends_it() -> None:
    card = reach("largest-model", ASKED, here(70), frozenset())
    assert "parameters does not fit." in card.notes[0]
    host = reach("largest-model", ASKED, here(70)._replace(host_bytes=20 * MiB), frozenset())
    assert "of the host's memory." in host.notes[0]


def test_the_longest_block_fits_and_128_tokens_more_do_not() -> None:
    place = here(60)
    found = reach("longest-context", ASKED, place, frozenset())
    assert found.chosen is not None
    config = found.chosen.config
    assert config.block_size % 128 == 0
    assert fits(config, SETTING, place.budget)
    beyond = model_sizes.of_block(ASKED, config.block_size + 128)
    assert not could_fit(place.search(beyond, frozenset()))
    assert config.batch_size == 1


def test_the_least_memory_is_less_than_the_run_as_asked_and_is_what_it_says() -> None:
    found = reach("smallest-memory", ASKED, here(900), frozenset())
    assert found.chosen is not None
    assert found.chosen == found.least
    assert found.chosen.needs == holdings(found.chosen.config, SETTING).needs < holdings(ASKED, SETTING).needs
    assert found.decisions
    assert found.chosen.config.tokens_per_step == ASKED.tokens_per_step
    alone = reach("smallest-memory", ASKED, here(900)._replace(host_bytes=0), frozenset())
    assert alone.least is not None
    on_the_card, without_the_host = found.notes
    named = int(re.search(r"--budget=(\d+)MiB is enough", on_the_card)[1]) * MiB  # type: ignore[index]
    assert found.chosen.needs <= named - here(900).budget.outside <= found.chosen.needs + UNSURE + MiB
    assert without_the_host == (f"With nothing more in the host's memory: {show_bytes(alone.least.needs)}, by "
                                f"{' '.join(alone.least.flags)}.")


def test_the_fastest_is_the_goal_unless_another_is_named() -> None:
    found = reach("fastest", ASKED, here(900), frozenset())
    assert found.chosen is not None
    assert found.chosen.config.n_embd == ASKED.n_embd


@pytest.mark.parametrize("goal", ["largest-model", "longest-context"])
def test_a_model_that_exists_already_has_its_size(goal: str) -> None:
    with pytest.raises(UsageError, match="names one that exists"):
        reach(goal, replace(ASKED, init_from="gpt2", vocab_size=50257), here(900), frozenset())


def test_where_not_even_the_smallest_fits_that_is_said() -> None:
    found = reach("largest-model", ASKED, here(2), frozenset())
    assert found.chosen is None
    assert found.least is not None


def test_a_longer_block_has_about_as_many_tokens_a_step_and_windows_to_evaluate() -> None:
    config = RunConfig(block_size=1024, batch_size=8, gradient_accumulation_steps=8, eval_iters=10)
    for block in (256, 768, 4096, 65536):
        longer = model_sizes.of_block(config, block)
        assert longer.tokens_per_step == pytest.approx(config.tokens_per_step, rel=0.1)
        assert longer.eval_iters * longer.batch_size * block == pytest.approx(80 * 1024, rel=0.25)


def test_shorter_blocks_keep_a_steps_tokens_and_narrower_models_their_heads() -> None:
    config = RunConfig(block_size=1024, batch_size=4, gradient_accumulation_steps=3, n_head=12, n_embd=768)
    shorter = list(model_sizes.shorter(config))
    assert [each.block_size for each in shorter] == [512, 256, 128, 64]
    assert {each.tokens_per_step for each in shorter} == {config.tokens_per_step}
    narrower = list(model_sizes.narrower(config))
    assert [each.n_head for each in narrower] == list(range(11, 0, -1))
    assert {each.n_embd // each.n_head for each in narrower} == {64}
