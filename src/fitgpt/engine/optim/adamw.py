"""AdamW, and the base class of all optimizers.

The fused AdamW kernel divides gradients by `grad_scale` and does nothing if `found_inf` is set; it reads both on the
device, without synchronizing with the CPU. Who sets them: grad_scaler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ...config.optimizers import ADAMW_EPSILON, optimizer_of
from ...config.run_config import RunConfig
from ..ops import Gradients


@dataclass(frozen=True)
class AdamWSettings:
    beta1: float
    beta2: float
    weight_decay: float


class Sink(Gradients, Protocol):
    """Takes gradients that are not accumulated in `.grad`."""

    def gradients(self) -> list[Tensor]:
        """The gradients, for their norm."""

    def clear(self) -> None: ...


class Optimizer:
    """What the loop needs of an optimizer. Its state is a flat dict of tensors, which any checkpoint can store."""

    sink: Sink | None = None  # where gradients go; None: to `.grad`

    @classmethod
    def from_config(cls, parameters: Mapping[str, Tensor], settings: AdamWSettings, config: RunConfig) -> Optimizer:
        """The optimizer of a run. A class whose constructor takes more than the settings overrides this."""
        return cls(parameters, settings)  # type: ignore[call-arg]

    def begin(self, learning_rate: float) -> None:
        """Called before the first gradient of a step is computed."""

    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Divides the gradients by `grad_scale` and applies them, or does nothing if `found_inf` is 1."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Loads a checkpoint's state; returns the names that did not match."""
        return copy_tensors(self.tensors(), tensors)

    def held(self) -> dict[str, Tensor]:
        """The state that exists already; `restore` takes it."""
        return self.tensors()

    def restore(self, held: Mapping[str, Tensor]) -> None:
        self.load_tensors(held)


def make_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """The optimizer of a run, over the model's parameters. The registry, config/optimizers.py, names its class."""
    if config.states == "late":
        return LazyOptimizer(lambda: make_optimizer(replace(config, states="early"), model))
    module, _, name = optimizer_of(config).engine_class.partition(":")
    # __import__ and not importlib: tapes/shapes.py replaces it to run this on tensors without data
    optimizer_class = getattr(__import__(module, globals(), fromlist=[name], level=1), name)
    settings = AdamWSettings(config.beta1, config.beta2, config.weight_decay)
    return cast(Optimizer, optimizer_class.from_config(dict(model.named_parameters()), settings, config))


class NoOptimizer(Optimizer):
    """For a run that only evaluates: no state, no steps."""

    def tensors(self) -> dict[str, Tensor]:
        return {}


class LazyOptimizer(Optimizer):
    """Another optimizer, created at its first step, as torch.optim creates its state."""

    def __init__(self, make: Callable[[], Optimizer]) -> None:
        self._make, self._made = make, cast("Optimizer | None", None)

    @property
    def _optimizer(self) -> Optimizer:
        self._made = self._made or self._make()
        return self._made

    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._optimizer.step(learning_rate, grad_scale, found_inf)

    def tensors(self) -> dict[str, Tensor]:
        return self._optimizer.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return self._optimizer.load_tensors(tensors)

    def held(self) -> dict[str, Tensor]:
        return self._made.held() if self._made else {}

    def restore(self, held: Mapping[str, Tensor]) -> None:
        if held:
            self._optimizer.restore(held)
        else:
            self._made = None


class AdamW(Optimizer):
    """AdamW whose state is allocated when it is created, so that the first step allocates nothing.

    As in nanoGPT, matrices decay and vectors do not. It calls torch's fused kernel, but not torch.optim's classes:
    those import the compiler (two seconds) even if nothing is compiled.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings) -> None:
        self._settings = settings
        self._parameters = dict(parameters)
        self._state = {name: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p),
                              "step": torch.zeros((), dtype=torch.float32, device=p.device)}
                       for name, p in self._parameters.items()}

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        for decays in (True, False):
            names = [name for name, p in self._parameters.items() if (p.dim() >= 2) == decays and p.grad is not None]
            if not names:
                continue
            states = [self._state[name] for name in names]
            parameters = [self._parameters[name] for name in names]
            adamw(parameters, [cast(Tensor, p.grad) for p in parameters],
                  [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
                  fused=True, grad_scale=grad_scale, found_inf=found_inf, amsgrad=False, maximize=False,
                  eps=ADAMW_EPSILON, lr=learning_rate, beta1=self._settings.beta1, beta2=self._settings.beta2,
                  weight_decay=self._settings.weight_decay if decays else 0.0)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": value for name, state in self._state.items() for key, value in state.items()}


@torch.no_grad()
def copy_tensors(held: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[str]:
    """Copies a checkpoint's tensors in place; returns the names that are missing or have another shape or dtype."""
    wrong = []
    for name, place in held.items():
        found = stored.get(name)
        if found is None or found.shape != place.shape or found.dtype != place.dtype:
            wrong.append(name)
        else:
            place.copy_(found)
    return wrong
