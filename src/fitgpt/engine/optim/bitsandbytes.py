"""AdamW by bitsandbytes: its kernel and its 8-bit states, where we say so and in tensors that we keep.

Its kernel takes figures from the host and cannot leave a step out. So the host reads two numbers off the device before
each step, and waits for it there: what the step multiplies gradients by, and whether there is a step at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...config.memory_savers import GROUP, SMALLEST_ROUNDED
from ...core.errors import DeviceError
from ..constants import ADAMW_EPSILON
from .adamw import AdamW, AdamWSettings, Optimizer

AT_ONCE = 2**30   # numbers in a call: it counts them in 32 bits
TRIED = 128       # numbers of the update that is tried first


class BitsandbytesAdamW(Optimizer):
    """Small parameters keep float32 states, as bitsandbytes itself has it: those are torch's own AdamW's."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings) -> None:
        self._settings = settings
        device = next(iter(parameters.values())).device
        self._bitsandbytes, self._maps = loaded(device)
        self._steps = 0  # that were applied
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


Maps = tuple[Tensor, Tensor]  # the 256 shares of its group's largest that a byte of either moment stands for


def new_state(numbers: int, device: torch.device) -> dict[str, Tensor]:
    """Under bitsandbytes' own names."""
    groups = -(-numbers // GROUP)
    return {f"{kind}{moment}": torch.zeros(size, dtype=dtype, device=device)
            for moment in (1, 2) for kind, size, dtype in (("state", numbers, torch.uint8),
                                                           ("absmax", groups, torch.float32))}


def update_(bitsandbytes: Any, maps: Maps, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor],
            settings: AdamWSettings, step: int, learning_rate: float, decay: float, times: float) -> None:
    """One update of flat tensors, in place. Unused, for they are another optimizer's: beta3 and alpha."""
    for p, g, first, second, first_scale, second_scale in zip(
            *(torch.split(each, AT_ONCE) for each in (parameter, gradient, state["state1"], state["state2"])),
            *(torch.split(each, AT_ONCE // GROUP) for each in (state["absmax1"], state["absmax2"])), strict=True):
        bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", g, p, first, second, settings.beta1, settings.beta2, 0.0, 0.0, ADAMW_EPSILON, step, learning_rate,
            *maps, first_scale, second_scale, weight_decay=decay, gnorm_scale=times)


def loaded(device: torch.device) -> tuple[Any, Maps]:
    """bitsandbytes.functional and its maps on the device; DeviceError where it does not work here, which only a first
    update shows: without a build for the device it loads all the same."""
    try:
        from bitsandbytes import functional

        first, second = (functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False))
        numbers = torch.zeros(TRIED, device=device)
        update_(functional, (first, second), numbers, torch.zeros_like(numbers), new_state(TRIED, device),
                AdamWSettings(0.9, 0.95, 0.0), 1, 0.0, 0.0, 1.0)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, AttributeError, TypeError, RuntimeError, OSError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DeviceError(f"adam8bit=bitsandbytes does not work with device={device.type} here: {why}",
                          "--adam8bit=own, or `python -m bitsandbytes`, which says what it finds.") from error
    return functional, (first, second)
