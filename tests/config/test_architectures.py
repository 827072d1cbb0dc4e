"""Architectures: parameters with names and shapes, equal to those of the real model and of the tapes."""

from __future__ import annotations

from math import prod

import pytest

torch = pytest.importorskip("torch")

from fitgpt.config.architectures import GPTConfig, parameter_shapes  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.engine.model import GPT  # noqa: E402
from fitgpt.tapes import nanogpt as nanogpt_tape  # noqa: E402

SHAPES = [GPTConfig(block_size=32, vocab_size=100, n_layer=3, n_head=2, n_embd=8, bias=bias) for bias in (True, False)]


@pytest.mark.parametrize("config", SHAPES, ids=["bias", "no bias"])
def test_parameter_shapes_are_those_of_the_model_in_its_order(config: GPTConfig) -> None:
    real = {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(real.items())


@pytest.mark.parametrize("config", SHAPES, ids=["bias", "no bias"])
def test_the_parameter_count_is_that_of_the_shapes(config: GPTConfig) -> None:
    total = sum(map(prod, parameter_shapes(config).values()))
    assert config.count_params() == total
    assert config.count_params(positions=False) == total - 32 * 8


@pytest.mark.parametrize("bias", [True, False])
def test_the_tapes_list_the_same_parameters(bias: bool) -> None:
    config = RunConfig(block_size=32, vocab_size=100, n_layer=3, n_head=2, n_embd=8, bias=bias, dtype="bfloat16",
                       compile=False)
    expected = [(prod(shape), len(shape) == 2) for shape in parameter_shapes(config.gpt_config()).values()]
    assert [(elements, matrix) for _, elements, matrix in nanogpt_tape.parameters(config)] == expected


def test_gpt2_has_124_million_parameters() -> None:
    assert GPTConfig(vocab_size=50257).count_params() == 124_439_808
