"""The registry of optimizers, each entry checked against the real optimizer after one step on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fitgpt.config.architectures import parameter_shapes  # noqa: E402
from fitgpt.config.fields import option_specs  # noqa: E402
from fitgpt.config.optimizers import OPTIMIZERS, optimizer_of, state_bytes  # noqa: E402
from fitgpt.config.run_config import RunConfig, resolve_run  # noqa: E402
from fitgpt.engine.device import resolve_device  # noqa: E402
from fitgpt.engine.optim.grad_scaler import apply_gradients  # noqa: E402
from fitgpt.memory.platform import Platform  # noqa: E402
from fitgpt.planning.forecast import write_tape  # noqa: E402
from fitgpt.training.build import build_training  # noqa: E402
from fitgpt.training.loop import Training  # noqa: E402
from tests.helpers import OPTIMIZER_OPTIONS, accepted_settings, skip_without_library  # noqa: E402

SHAPE: dict[str, Any] = dict(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=200, bias=True)


def described(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={settings[name]}" for name in OPTIMIZER_OPTIONS
                    if name == "optimizer" or settings[name] != getattr(RunConfig, name))


SETTINGS = {described(settings): settings for settings in accepted_settings(*OPTIMIZER_OPTIONS)}


def config_of(name: str) -> RunConfig:
    return RunConfig(**SHAPE, **SETTINGS[name])


def built(config: RunConfig) -> Training:
    return build_training(config, resolve_device("cpu", "float32", False))


def take_step(training: Training, config: RunConfig, step: int) -> None:
    sink = [training.optimizer.sink] if training.optimizer.sink else []
    torch.manual_seed(step)
    tokens = torch.randint(config.vocab_size, (2, config.block_size + 1))
    training.optimizer.begin(1e-2)
    training.accumulate(tokens[:, :-1], tokens[:, 1:], training.scaler.scale, *sink)
    apply_gradients(training.model, training.optimizer, training.scaler, 1e-2, config.grad_clip)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_declared_state_is_that_of_the_real_optimizer_after_a_step(name: str) -> None:
    skip_without_library(SETTINGS[name])
    config = config_of(name)
    training = built(config)
    take_step(training, config, 0)
    state, spec = training.optimizer.tensors(), optimizer_of(config)
    for parameter, shape in parameter_shapes(config.gpt_config()).items():
        elements = torch.Size(shape).numel()
        declared = {tensor.name: tensor.nbytes(elements)
                    for tensor in spec.state_of(elements, block_matrix=".h." in parameter and len(shape) == 2)}
        real = {key.removeprefix(f"{parameter}."): value.nbytes for key, value in state.items()
                if key.startswith(f"{parameter}.")}
        assert {key: real.get(key) for key in declared} == declared


@pytest.mark.reproduction
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_optimizer_gives_the_state_and_the_weights_of_one_that_was_never_stopped(name: str) -> None:
    skip_without_library(SETTINGS[name])
    config = config_of(name)
    whole, first, resumed = (built(config) for _ in range(3))
    for step in range(4):
        take_step(whole, config, step)
    for step in range(2):
        take_step(first, config, step)
    resumed.model.load_state_dict(first.model.state_dict())
    assert resumed.optimizer.load_tensors(first.optimizer.tensors()) == []
    assert_same(resumed, first)
    for step in range(2, 4):
        take_step(resumed, config, step)
    assert_same(resumed, whole)


def assert_same(found: Training, expected: Training) -> None:
    for mine, other in ((found.model.state_dict(), expected.model.state_dict()),
                        (found.optimizer.tensors(), expected.optimizer.tensors())):
        assert mine.keys() == other.keys()
        assert [name for name in other if not torch.equal(mine[name], other[name])] == []


@pytest.mark.parametrize("name", [name for name in SETTINGS if "offload" not in name and "late" not in name])
def test_the_declared_state_is_that_of_the_tape(name: str) -> None:
    config, platform = config_of(name), Platform()
    tape = write_tape(resolve_run(config, platform), platform)
    load = tape.events[:tape.phases[0].end]
    held = sum(event.nbytes if event.alloc else -event.nbytes for event in load if event.owner == "optimizer")
    assert held == state_bytes(config)


def test_the_choices_of_the_option_are_the_registry() -> None:
    spec = option_specs(RunConfig)["optimizer"]
    assert spec.choices == tuple(OPTIMIZERS)
    assert all(entry.summary in spec.help for entry in OPTIMIZERS.values())


@pytest.mark.parametrize(("name", "per_parameter"), [("adamw", 8), ("adam8bit", 2.03), ("muon", 4)])
def test_the_state_of_a_large_block_matrix_per_parameter(name: str, per_parameter: float) -> None:
    elements = 2**20
    state = OPTIMIZERS[name].state_of(elements, block_matrix=True)
    assert sum(tensor.nbytes(elements) for tensor in state) / elements == pytest.approx(per_parameter, rel=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_at_least_weights_gradients_and_its_state(name: str) -> None:
    spec = OPTIMIZERS[name]
    per_parameter = sum(tensor.per_element for tensor in spec.state)
    assert spec.bytes_moved(4) >= 3 * 4 + 2 * per_parameter
