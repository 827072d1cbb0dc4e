"""The registry of memory savers, each entry checked: its saving against two forecasts, its exclusions, its texts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fitgpt.config.architectures import parameter_shapes
from fitgpt.config.argv import walk
from fitgpt.config.fields import Requires, option_specs
from fitgpt.config.memory_savers import KEEPS, LEVELS, SAVERS, Saver, parse_levels
from fitgpt.config.optimizers import OPTIMIZERS
from fitgpt.config.run_config import RunConfig, resolve
from fitgpt.core.errors import UsageError
from fitgpt.memory.platform import Platform
from fitgpt.planning.changes import single_changes
from fitgpt.planning.forecast import forecast

PLATFORM = Platform((8, 9))
SMALL = RunConfig(n_layer=4, n_head=4, n_embd=256, block_size=512, batch_size=8, vocab_size=50304,
                  gradient_accumulation_steps=2, dtype="bfloat16", compile=True, cuda_graphs=False)
ALLOCATION = 512  # the allocator rounds every tensor up to a multiple of this


def with_saver(saver: Saver, config: RunConfig = SMALL) -> RunConfig:
    """The config with the saver, and with what it requires."""
    required = {each.option: each.values[0] for each in saver.requires
                if getattr(config, each.option) not in each.values}
    return replace(config, **required, **{saver.option: saver.value})


def test_each_recompute_level_keeps_a_subset_of_the_one_before() -> None:
    for more, less in pairwise(LEVELS):
        assert KEEPS[less] < KEEPS[more]


@pytest.mark.parametrize(("text", "levels"), [
    ("matmuls", ["matmuls"] * 3), (" input ", ["input"] * 3), ("1*input,2*all", ["input", "all", "all"]),
    ("2 * no_mlp_up, 1*attention", ["no_mlp_up", "no_mlp_up", "attention"]), ("3*all", ["all"] * 3)])
def test_recompute_takes_one_level_or_counts_of_levels(text: str, levels: list[str]) -> None:
    assert parse_levels(text, 3) == levels


@pytest.mark.parametrize(("text", "says"), [
    ("produkts", "must be one of all, matmuls"), ("2*input", "names 2 layers, and there are 3"),
    ("x*input", "must be one of"), ("input,all", "must be one of"), ("-1*input,4*all", "must be one of"),
    ("2*input,2*all", "names 4 layers"), ("999999999*input", "names 999999999 layers"),
    ("9" * 5000 + "*input", "must be one of")])
def test_an_invalid_recompute_is_an_error(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="recompute") as error:
        RunConfig(n_layer=3, n_head=1, n_embd=8, recompute=text)
    assert says in error.value.what


@pytest.mark.parametrize(("settings", "what", "fix"), [
    ({"recompute": "products"}, "recompute=products is now recompute=matmuls", "--recompute=matmuls"),
    ({"recompute": "1*no_wide,11*products"}, "is now recompute=1*no_mlp_up,11*matmuls",
     "--recompute=1*no_mlp_up,11*matmuls"),
    ({"casts": "brief"}, "casts=brief is now casts=transient", "--casts=transient")])
def test_a_value_of_an_earlier_version_gets_its_new_name_as_fix(settings: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UsageError) as error:
        RunConfig(**settings)
    assert what in error.value.what
    assert error.value.fix == fix


def test_grad_checkpoint_means_recompute_input() -> None:
    assert RunConfig(grad_checkpoint=True).levels == ("input",) * 12
    assert RunConfig().levels == ("matmuls",) * 12


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.setting)
def test_the_declared_saving_is_the_difference_of_two_forecasts(saver: Saver) -> None:
    with_it = with_saver(saver)
    phases, without = (forecast(config, PLATFORM).phases
                       for config in (with_it, replace(with_it, **{saver.option: saver.without})))
    saved = without[saver.phase].allocated - phases[saver.phase].allocated
    tensors = 4 * len(parameter_shapes(with_it.gpt_config()))  # state, gradient and norm of each parameter
    assert abs(saved - saver.bytes_saved(with_it)) <= ALLOCATION * tensors
    assert saver.bytes_saved(with_it) > 2 * ALLOCATION * tensors or saver.bytes_saved(with_it) == 0


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.setting)
def test_every_saver_is_an_option_of_train_with_texts(saver: Saver) -> None:
    required = [f"--{each.option}={each.values[0]}" for each in saver.requires]
    config, _ = resolve(walk([saver.flag, *required], RunConfig))
    assert saver.is_on(config)
    assert not saver.is_on(replace(config, **{saver.option: saver.without}))
    assert saver.saves
    assert saver.costs
    assert saver.label


def test_every_recompute_level_but_the_first_is_a_saver() -> None:
    assert [saver.value for saver in SAVERS if saver.option == "recompute"] == list(LEVELS[1:])


def test_every_optimizer_but_adamw_is_a_saver_with_the_same_exactness() -> None:
    savers = {saver.value: saver.exact for saver in SAVERS if saver.option == "optimizer"}
    assert savers == {name: spec.exact for name, spec in OPTIMIZERS.items() if name != "adamw"}


def test_every_saver_is_offered_as_a_change() -> None:
    config = replace(SMALL, gradient_accumulation_steps=1, recompute="all", casts="kept", gradients="kept",
                     states="late")
    offered = {(option.change.family, getattr(option.config, saver.option))
               for option in single_changes(config) for saver in SAVERS if saver.family == option.change.family}
    for saver in SAVERS:
        if saver.permission != "never" and saver.option != "loss_chunk":  # the chunk offered depends on the run
            assert (saver.family, saver.value) in offered


# ---- exclusions

REQUIREMENTS: list[tuple[dict[str, Any], Requires]] = [
    *(({saver.option: saver.value}, each) for saver in SAVERS for each in saver.requires),
    *(({"optimizer": name}, each) for name, spec in OPTIMIZERS.items() for each in spec.requires)]


@pytest.mark.parametrize(("settings", "required"), REQUIREMENTS, ids=str)
def test_every_excluded_combination_is_an_error_whose_fix_works(settings: dict[str, Any], required: Requires) -> None:
    saver = next((each for each in SAVERS if settings == {each.option: each.value}), None)
    config = with_saver(saver) if saver else SMALL
    values = {**config.to_dict(), **settings, required.option: excluded_value(required)}
    with pytest.raises(UsageError) as error:
        RunConfig(**values)
    assert required.option in error.value.what
    fix = {each.key: each.value for each in walk(error.value.fix.split(), RunConfig)}
    RunConfig(**values | fix)


def excluded_value(required: Requires) -> Any:
    spec = option_specs(RunConfig)[required.option]
    candidates = spec.choices or ((True, False) if spec.kind in ("bool", "auto") else (2, 1))
    return next(value for value in candidates if value not in required.values)
