"""AdamW in low precision: 8-bit optimizer state, and bfloat16 weights with stochastic rounding.

8-bit state is one byte per element and one float32 scale per group of 256. The byte encodes a root of the element's
share of its scale (square root for the first moment, fourth root for the second), because moments spread over many
orders of magnitude and small ones matter: the smallest first moment that is not rounded to zero is 1.5e-5 of its
group's largest, the smallest second moment 2.4e-10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...config.optimizers import ADAMW_EPSILON, AT_ONCE, GROUP, SMALLEST_ROUNDED
from ...config.run_config import RunConfig
from ..annotate import span
from ..device import triton_works
from ..ops import GradientDict, matmul_grad
from .adamw import AdamWSettings, Optimizer


class LowPrecisionAdamW(Optimizer):
    """`eight_bit`: 8-bit state. bfloat16 parameters are rounded stochastically in either case.

    `fused`: one Triton kernel per parameter. Otherwise the same in plain torch, with other random numbers.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings, *, eight_bit: bool, fused: bool,
                 seed: int) -> None:
        self._settings, self._seed, self._fused = settings, seed, fused
        self._parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        self._numbers = {name: number for number, name in enumerate(parameters)}
        device = next(iter(parameters.values())).device
        self._steps = torch.zeros((), device=device)  # that were applied
        self._calls = 0                               # seeds the rounding, so that a resumed run rounds the same
        self._rng_seed = torch.zeros((), dtype=torch.int64, device=device)
        self._state = {name: _new_state(p, eight_bit) for name, p in self._parameters.items()}

    @classmethod
    def from_config(cls, parameters: Mapping[str, Tensor], settings: AdamWSettings,
                    config: RunConfig) -> LowPrecisionAdamW:
        kind = AdamWInBackward if config.step_in_backward else LowPrecisionAdamW
        on_cuda = next(iter(parameters.values())).device.type == "cuda"
        return kind(parameters, settings, eight_bit=config.optimizer == "adam8bit", fused=on_cuda and triton_works(),
                    seed=config.seed)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._figures = self._begin(learning_rate, grad_scale, found_inf)
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                self._apply(parameter, parameter.grad)

    def _begin(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> Tensor:
        """The values that all parameters' updates of this step share, on the device."""
        beta1, beta2 = self._settings.beta1, self._settings.beta2
        self._calls += 1
        seed = (self._seed * 2**40 + 2**39 + self._calls) % 2**63
        if self._fused:
            self._rng_seed.fill_(seed)
        else:
            torch.manual_seed(seed)
        self._steps += 1 - found_inf
        return torch.stack([torch.full_like(self._steps, learning_rate), 1 / (1 - beta1**self._steps),
                            1 / (1 - beta2**self._steps), 1 / grad_scale, found_inf])

    def _apply(self, parameter: Tensor, gradient: Tensor) -> None:
        decay = self._settings.weight_decay if parameter.dim() >= 2 else 0.0
        name = self._names[id(parameter)]
        flat, gradient, state = parameter.data.view(-1), gradient.reshape(-1), self._state[name]
        if self._fused:
            from ..kernels import low_precision_adamw_

            low_precision_adamw_(flat, gradient, state, self._figures, self._rng_seed, self._numbers[name], decay,
                           self._settings.beta1, self._settings.beta2)
            return
        with span("update"):
            for start in range(0, flat.numel(), AT_ONCE):
                part = slice(start, start + AT_ONCE)
                groups = slice(start // GROUP, (start + AT_ONCE) // GROUP)
                held = {key: each[groups if key.endswith("scale") else part] for key, each in state.items()}
                update_(flat[part], gradient[part], held, self._figures, decay, self._settings.beta1,
                        self._settings.beta2)

    def tensors(self) -> dict[str, Tensor]:
        flat = {f"{name}.{key}": each for name, state in self._state.items() for key, each in state.items()}
        return {**flat, "steps": self._steps, "calls": torch.tensor(self._calls)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        wrong = super().load_tensors(tensors)
        if not wrong:
            self._calls = int(tensors["calls"])
        return wrong


class AdamWInBackward(LowPrecisionAdamW):
    """Applies each gradient in the backward pass, so that the gradients never exist all at once.

    Therefore no accumulation, no clipping, and no skipping of a step that is not finite. The token embedding is used
    twice, by the head and by the embedding, so its gradient waits for both.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.sink = self

    def begin(self, learning_rate: float) -> None:
        one = torch.ones_like(self._steps)
        self._figures, self._waiting = self._begin(learning_rate, one, torch.zeros_like(one)), GradientDict()

    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Nothing: the gradients have been applied in the backward pass."""

    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        if ".h." in self._names[id(parameter)]:
            self._apply(parameter, matmul_grad(d_out, inputs, parameter.dtype))
        else:
            self._waiting.matmul(parameter, d_out, inputs)

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._apply(parameter, gradient)

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        self._waiting.embedding(parameter, indices, gradient)
        self._apply(parameter, self._waiting.of.pop(id(parameter)))

    def gradients(self) -> list[Tensor]:
        return []

    def clear(self) -> None:
        pass


def _new_state(parameter: Tensor, eight_bit: bool) -> dict[str, Tensor]:
    n, device = parameter.numel(), parameter.device
    if not eight_bit or n < SMALLEST_ROUNDED:
        return {key: torch.zeros(n, device=device) for key in ("exp_avg", "exp_avg_sq")}
    groups = -(-n // GROUP)
    return {"first": torch.zeros(n, dtype=torch.int8, device=device), "first_scale": torch.zeros(groups, device=device),
            "second": torch.zeros(n, dtype=torch.uint8, device=device),
            "second_scale": torch.zeros(groups, device=device)}


def update_(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], figures: Tensor, decay: float, beta1: float,
            beta2: float) -> None:
    """One AdamW update of flat tensors, in place, in float32 between reading and rounding; no change if found_inf."""
    learning_rate, correct1, correct2, unscale, skip = figures.unbind()
    eight_bit = "first" in state
    g = gradient.float() * unscale
    first = beta1 * (read_first(state) if eight_bit else state["exp_avg"]) + (1 - beta1) * g
    second = beta2 * (read_second(state) if eight_bit else state["exp_avg_sq"]) + (1 - beta2) * g * g
    step = first * correct1 / ((second * correct2).sqrt() + ADAMW_EPSILON)
    weights = parameter.float()
    stepped = weights - learning_rate * (step + decay * weights)
    rounded = stochastic_round(stepped) if parameter.dtype == torch.bfloat16 else stepped.to(parameter.dtype)
    new = write_first(first) | write_second(second) if eight_bit else {"exp_avg": first, "exp_avg_sq": second}
    parameter.copy_(torch.where(skip > 0, parameter, rounded))
    for key, held in state.items():
        held.copy_(torch.where(skip > 0, held, new[key]))


def stochastic_round(x: Tensor) -> Tensor:
    """float32 → bfloat16, up or down with the probability that makes the mean exact."""
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def read_first(state: Mapping[str, Tensor]) -> Tensor:
    share = state["first"].float() / 127
    return _ungrouped(_grouped(share * share.abs()) * state["first_scale"].unsqueeze(-1), share.numel())


def write_first(first: Tensor) -> dict[str, Tensor]:
    share, scale = _shares(first)
    return {"first": (share.sign() * share.abs().sqrt() * 127).round().to(torch.int8), "first_scale": scale}


def read_second(state: Mapping[str, Tensor]) -> Tensor:
    share = (state["second"].float() / 255).square().square()
    return _ungrouped(_grouped(share) * state["second_scale"].unsqueeze(-1), share.numel())


def write_second(second: Tensor) -> dict[str, Tensor]:
    """Rounds to nearest, but not to zero: a second moment of zero would make an unbounded step. (Always rounding up
    would be safer, but learns 5 % slower: values that are rounded again at every step drift upwards: docs/log.md.)"""
    share, scale = _shares(second)
    root = (share.sqrt().sqrt() * 255).round_()
    root += (root == 0) & (share > 0)
    return {"second": root.to(torch.uint8), "second_scale": scale}


def _shares(flat: Tensor) -> tuple[Tensor, Tensor]:
    """(each element divided by the largest of its group, those largest)."""
    grouped = _grouped(flat)
    scale = grouped.abs().amax(-1)
    return _ungrouped(grouped / scale.clamp(min=1e-30).unsqueeze(-1), flat.numel()), scale


def _grouped(flat: Tensor) -> Tensor:
    return F.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def _ungrouped(grouped: Tensor, n: int) -> Tensor:
    return grouped.view(-1)[:n]
