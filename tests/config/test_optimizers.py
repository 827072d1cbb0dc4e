"""The registry of optimizers, each entry checked against the real optimizer after one step on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fitgpt.config.architectures import parameter_shapes  # noqa: E402
from fitgpt.config.fields import option_specs  # noqa: E402
from fitgpt.config.optimizers import OPTIMIZERS, optimizer_of, state_bytes  # noqa: E402
from fitgpt.config.run_config import RunConfig, resolve_run  # noqa: E402
from fitgpt.engine.model import GPT  # noqa: E402
from fitgpt.engine.optim.adamw import make_optimizer  # noqa: E402
from fitgpt.memory.platform import Platform  # noqa: E402
from fitgpt.planning.forecast import write_tape  # noqa: E402

SHAPE: dict[str, Any] = dict(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=200, bias=True)
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "adam8bit of bitsandbytes": {"optimizer": "adam8bit", "adam8bit": "bitsandbytes"},
    "adamw, bfloat16 weights": {"weights": "bfloat16"},
    "adam8bit, bfloat16 weights": {"optimizer": "adam8bit", "weights": "bfloat16"},
    "adamw, step_in_backward": {"step_in_backward": True, "gradient_accumulation_steps": 1, "grad_clip": 0.0},
    "adamw, offload": {"offload": "optimizer"},
}


def config_of(name: str) -> RunConfig:
    return RunConfig(**SHAPE, **VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_declared_state_is_that_of_the_real_optimizer_after_a_step(name: str) -> None:
    if "bitsandbytes" in name and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    config = config_of(name)
    model = GPT(config.gpt_config())
    if config.weights == "bfloat16":
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.bfloat16()
    optimizer, one = make_optimizer(config, model), torch.ones(())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.begin(1e-3)
    optimizer.step(1e-3, one, torch.zeros(()))
    state, spec = optimizer.tensors(), optimizer_of(config)
    for parameter, shape in parameter_shapes(config.gpt_config()).items():
        elements = torch.Size(shape).numel()
        declared = {tensor.name: tensor.nbytes(elements)
                    for tensor in spec.state_of(elements, block_matrix=".h." in parameter and len(shape) == 2)}
        real = {key.removeprefix(f"{parameter}."): value.nbytes for key, value in state.items()
                if key.startswith(f"{parameter}.")}
        assert {key: real.get(key) for key in declared} == declared


@pytest.mark.parametrize("name", [name for name in VARIANTS if "offload" not in name])
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
