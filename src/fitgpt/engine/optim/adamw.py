"""The optimizer step: gradient clipping, float16's loss scaling, AdamW and the base class of all optimizers.

Clips, unscales, skips and updates in one fused pass, without synchronizing with the CPU: the fused AdamW kernel
divides gradients by `grad_scale` and does nothing if `found_inf` is set; it reads both on the device. Clipping is a
division too, so it is part of `grad_scale`: after the norm, one pass over the gradients does all.
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

# Loss scaling for float16, with the defaults of torch.amp.GradScaler.
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
SCALER_STATE = ("scale", "good_steps", "skipped", "skipped_in_a_row")  # of Scaler, in a checkpoint


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


class Scaler:
    """Loss scale and counts of skipped steps, on the device, as in GradScaler. Without `scaling` the scale is 1."""

    def __init__(self, device: torch.device, *, scaling: bool) -> None:
        self.scaling = scaling
        self.scale = torch.tensor(FIRST_SCALE if scaling else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), device=device)

    def update(self, found_inf: Tensor) -> None:
        self.skipped += found_inf
        self.skipped_in_a_row += 1
        self.skipped_in_a_row *= found_inf
        if self.scaling:
            self.good_steps += 1
            self.good_steps *= 1 - found_inf
            grown = self.good_steps >= GROWTH_INTERVAL
            factor = torch.where(grown, GROWTH, torch.where(found_inf > 0, BACKOFF, 1.0))
            # Never below 1: a scale that fell to zero would turn every later gradient into zero, unnoticed.
            self.scale.mul_(factor).clamp_(min=1.0)
            self.good_steps *= ~grown

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name).item() for name in SCALER_STATE}

    def load_dict(self, state: Mapping[str, float]) -> None:
        if self.scaling:
            self.scale.fill_(state["scale"])
            self.good_steps.fill_(state["good_steps"])
        self.skipped.fill_(state["skipped"])
        self.skipped_in_a_row.fill_(state["skipped_in_a_row"])


@torch.no_grad()
def apply_gradients(model: nn.Module, optimizer: Optimizer, scaler: Scaler, learning_rate: float, grad_clip: float,
                    *, stay: bool = False, begins: Callable[[], None] = lambda: None) -> Tensor:
    """Applies the accumulated (scaled) gradients, or skips them if they are not finite; returns their norm.

    Then it frees them, or zeroes them if they `stay` (CUDA graphs need fixed addresses). `begins` is called before
    anything is changed.
    """
    sink = optimizer.sink
    gradients = sink.gradients() if sink else [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(scaler.scale) / scaler.scale  # float32, as the kernel needs it
    found_inf = (~torch.isfinite(norm)).float()
    grad_scale = (norm / grad_clip).clamp_(min=1.0) if grad_clip else torch.ones_like(norm)
    grad_scale *= scaler.scale
    begins()
    optimizer.step(learning_rate, grad_scale, found_inf)
    scaler.update(found_inf)
    model.zero_grad(set_to_none=not stay)
    if sink:
        sink.clear()
    return norm
