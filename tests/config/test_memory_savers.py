"""The registry of memory savers, each entry checked: its saving against two forecasts, its exclusions, its texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest

from fitgpt.config.architectures import POSITIONS, parameter_shapes
from fitgpt.config.argv import walk
from fitgpt.config.fields import Requires, option_specs
from fitgpt.config.memory_savers import POLICIES, SAVED_TENSORS, SAVERS, Saver, loss_chunk_tokens, parse_policies
from fitgpt.config.optimizers import OPTIMIZERS, state_bytes
from fitgpt.config.run_config import RunConfig, config_from
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
    for more, less in pairwise(POLICIES):
        assert SAVED_TENSORS[less] < SAVED_TENSORS[more]


@pytest.mark.parametrize(("text", "policies"), [
    ("matmuls", ["matmuls"] * 3), (" input ", ["input"] * 3), ("1*input,2*all", ["input", "all", "all"]),
    ("2 * no_mlp_up, 1*attention", ["no_mlp_up", "no_mlp_up", "attention"]), ("3*all", ["all"] * 3)])
def test_recompute_takes_one_policy_or_counts_of_policies(text: str, policies: list[str]) -> None:
    assert parse_policies(text, 3) == policies


@pytest.mark.parametrize(("text", "says"), [
    ("produkts", "must be one of all, matmuls"), ("2*input", "names 2 layers, and there are 3"),
    ("x*input", "must be one of"), ("input,all", "must be one of"), ("-1*input,4*all", "must be one of"),
    ("2*input,2*all", "names 4 layers"), ("999999999*input", "names 999999999 layers"),
    ("9" * 5000 + "*input", "must be one of")])
def test_an_invalid_value_of_saved_activations_is_an_error(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="saved_activations") as error:
        RunConfig(n_layer=3, n_head=1, n_embd=8, saved_activations=text)
    assert says in error.value.what


def test_grad_checkpoint_means_recompute_input() -> None:
    assert RunConfig(grad_checkpoint=True).policies == ("input",) * 12
    assert RunConfig().policies == ("matmuls",) * 12


# ---- what each saves


def _parameters(config: RunConfig) -> int:
    return config.gpt_config().count_params()


def _matrix_parameters(config: RunConfig) -> int:
    """Parameters of the weight matrices and embeddings."""
    return sum(prod(shape) for shape in parameter_shapes(config.gpt_config()).values() if len(shape) == 2)


def _cast_parameters(config: RunConfig) -> int:
    """Parameters that matmuls read: the matrices without the position embedding."""
    return _matrix_parameters(config) - prod(parameter_shapes(config.gpt_config())[POSITIONS])


def _per_layer(bytes_per_token_and_channel: int) -> Callable[[RunConfig], int]:
    """Activations kept for the backward pass, in half precision."""
    return lambda config: (bytes_per_token_and_channel * config.n_layer * config.batch_size * config.block_size
                           * config.n_embd)


def _logits(config: RunConfig) -> int:
    """The logits of one chunk, and their gradient in place: 2 bytes per token and word of the vocabulary."""
    tokens, vocab = config.batch_size * config.block_size, config.gpt_config().vocab_size
    return 2 * vocab * (loss_chunk_tokens(tokens, vocab) - loss_chunk_tokens(tokens, vocab, config.loss_chunk))


def _block_inputs_only(config: RunConfig) -> int:
    """What saved_activations=matmuls keeps, and the softmax statistics of attention: 4 bytes per token and head."""
    return _per_layer(18)(config) + 4 * config.n_layer * config.batch_size * config.block_size * config.n_head


def _residual_stream(config: RunConfig) -> int:
    """The input of every block, and of the last norm."""
    return 2 * (config.n_layer + 1) * config.batch_size * config.block_size * config.n_embd


def _state_against_adamw(config: RunConfig) -> int:
    return state_bytes(replace(config, optimizer="adamw", adam8bit="own")) - state_bytes(config)


# Setting → the value to compare it with, the phase of a forecast in which all of its saving shows, and the saving of a
# config that uses it: what the text `saves` says, as a formula.
SAVINGS: dict[str, tuple[Any, str, Callable[[RunConfig], int]]] = {
    "loss_chunk=1024": (0, "train", _logits),
    "saved_activations=matmuls": ("all", "train", _per_layer(12)),
    "saved_activations=no_mlp_up": ("matmuls", "train", _per_layer(8)),
    "saved_activations=attention_proj": ("matmuls", "train", _per_layer(14)),
    "saved_activations=attention": ("matmuls", "train", _per_layer(16)),
    "saved_activations=input": ("matmuls", "train", _block_inputs_only),
    "offload=optimizer": ("none", "load", state_bytes),
    "offload=gradients": ("none", "step", lambda config: state_bytes(config) + 4 * _parameters(config)),
    "casts=transient": ("kept", "load", lambda config: 2 * _cast_parameters(config)),
    "gradients=freed": ("kept", "eval", lambda config: 4 * _parameters(config)),
    "states=early": ("late", "step", lambda config: 0),
    "residual=bfloat16": ("float32", "train", _residual_stream),
    "weights=bfloat16": ("float32", "step", lambda config: 4 * _matrix_parameters(config)),
    "optimizer=adam8bit": ("adamw", "load", _state_against_adamw),
    "adam8bit=bitsandbytes": ("own", "load", lambda config: 0),
    "optimizer=muon": ("adamw", "load", _state_against_adamw),
    "step_in_backward": (False, "step", lambda config: 4 * _parameters(config)),
}


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.setting)
def test_the_declared_saving_is_the_difference_of_two_forecasts(saver: Saver) -> None:
    with_it = with_saver(saver)
    without, phase, formula = SAVINGS[saver.setting]
    before, after = (forecast(config, PLATFORM).phases[phase].allocated
                     for config in (replace(with_it, **{saver.option: without}), with_it))
    expected = formula(with_it)
    tensors = 4 * len(parameter_shapes(with_it.gpt_config()))  # state, gradient and norm of each parameter
    assert abs(before - after - expected) <= ALLOCATION * tensors
    assert expected > 2 * ALLOCATION * tensors or expected == 0


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.setting)
def test_every_saver_is_an_option_of_train_with_texts(saver: Saver) -> None:
    required = [f"--{each.option}={each.values[0]}" for each in saver.requires]
    config, _ = config_from(walk([f"--{saver.setting}", *required], RunConfig))
    assert saver.is_on(config)
    assert not saver.is_on(replace(config, **{saver.option: SAVINGS[saver.setting][0]}))
    assert saver.saves
    assert saver.costs
    assert saver.label


def test_every_recompute_level_but_the_first_is_a_saver() -> None:
    assert [saver.value for saver in SAVERS if saver.option == "saved_activations"] == list(POLICIES[1:])


def test_every_optimizer_but_adamw_is_a_saver() -> None:
    assert [saver.value for saver in SAVERS if saver.option == "optimizer"] == [*OPTIMIZERS][1:]


def test_every_saver_is_offered_as_a_change() -> None:
    config = replace(SMALL, gradient_accumulation_steps=1, saved_activations="all", casts="kept", gradients="kept",
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
    candidates = spec.choices or {"bool": (True, False), "auto": (True, False), "text": ("0,1",)}.get(spec.kind, (2, 1))
    return next(value for value in candidates if value not in required.values)
