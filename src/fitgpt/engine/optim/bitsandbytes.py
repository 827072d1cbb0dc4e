"""AdamW by bitsandbytes: its kernel and its 8-bit state format, with state tensors of our own.

Its kernel takes scalars from the CPU and cannot skip a step. So the CPU synchronizes before each step to read two
values from the device: the factor for the gradients, and whether the step is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...config.optimizers import ADAMW_EPSILON, GROUP, SMALLEST_ROUNDED
from ...core.errors import DeviceError
from .adamw import AdamW, AdamWSettings, Optimizer

MAX_ELEMENTS = 2**30   # per call: it counts them in 32 bits
TEST_ELEMENTS = 128    # of the update that tests whether it works here


class BitsandbytesAdamW(Optimizer):
    """Small parameters keep float32 state, as in bitsandbytes: for those it uses torch's AdamW."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings) -> None:
        self._settings = settings
        device = next(iter(parameters.values())).device
        self._bitsandbytes, self._maps = loaded(device)
        self._steps = 0  # applied
        self._parameters = {name: p for name, p in parameters.items() if p.numel() >= SMALLEST_ROUNDED}
        self._state = {name: new_state(p.numel(), device) for name, p in self._parameters.items()}
        self._rest = AdamW({name: p for name, p in parameters.items() if name not in self._parameters}, settings)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._rest.step(learning_rate, grad_scale, found_inf)
        times, skipped = torch.stack([1 / grad_scale, found_inf]).tolist()
        if skipped:
            return
        self._steps += 1
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                decay = self._settings.weight_decay if parameter.dim() >= 2 else 0.0
                update_(self._bitsandbytes, self._maps, parameter.data.view(-1), parameter.grad.reshape(-1),
                        self._state[name], self._settings, self._steps, learning_rate, decay, times)

    def tensors(self) -> dict[str, Tensor]:
        flat = {f"{name}.{key}": each for name, state in self._state.items() for key, each in state.items()}
        return {**flat, **self._rest.tensors(), "steps": torch.tensor(self._steps)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        wrong = super().load_tensors(tensors)
        if not wrong:
            self._steps = int(tensors["steps"])
        return wrong


Maps = tuple[Tensor, Tensor]  # per moment: the 256 values, relative to the group's largest, that a byte encodes


def new_state(numbers: int, device: torch.device) -> dict[str, Tensor]:
    """Under bitsandbytes' own names."""
    groups = -(-numbers // GROUP)
    return {f"{kind}{moment}": torch.zeros(size, dtype=dtype, device=device)
            for moment in (1, 2) for kind, size, dtype in (("state", numbers, torch.uint8),
                                                           ("absmax", groups, torch.float32))}


def update_(bitsandbytes: Any, maps: Maps, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor],
            settings: AdamWSettings, step: int, learning_rate: float, decay: float, times: float) -> None:
    """One update of flat tensors, in place. beta3 and alpha belong to another optimizer and are unused."""
    for p, g, first, second, first_scale, second_scale in zip(
            *(torch.split(each, MAX_ELEMENTS) for each in (parameter, gradient, state["state1"], state["state2"])),
            *(torch.split(each, MAX_ELEMENTS // GROUP) for each in (state["absmax1"], state["absmax2"])), strict=True):
        bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", g, p, first, second, settings.beta1, settings.beta2, 0.0, 0.0, ADAMW_EPSILON, step, learning_rate,
            *maps, first_scale, second_scale, weight_decay=decay, gnorm_scale=times)


def loaded(device: torch.device) -> tuple[Any, Maps]:
    """(bitsandbytes.functional, its maps on the device); DeviceError if it does not work here. Only a first update
    shows that: without a build for the device it imports all the same."""
    try:
        from bitsandbytes import functional

        first, second = (functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False))
        numbers = torch.zeros(TEST_ELEMENTS, device=device)
        update_(functional, (first, second), numbers, torch.zeros_like(numbers), new_state(TEST_ELEMENTS, device),
                AdamWSettings(0.9, 0.95, 0.0), 1, 0.0, 0.0, 1.0)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, AttributeError, TypeError, RuntimeError, OSError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DeviceError(f"adam8bit=bitsandbytes does not work with device={device.type} here: {why}",
                          "--adam8bit=own, or `python -m bitsandbytes`, which says what it finds.") from error
    return functional, (first, second)
