"""AdamW with its state in CPU RAM: the GPU holds weights and activations, but neither moments nor master weights.

With `stream`, gradients do not stay on the GPU either: each is copied to the CPU as it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...config.run_config import RunConfig
from ..ops import add_rows_, matmul_grad
from .adamw import AdamW, AdamWSettings, Optimizer, copy_tensors


class OffloadedAdamW(Optimizer):
    """Exact: the same float32 arithmetic, on the CPU. It needs 16 bytes of CPU RAM per parameter.

    Master weights of bfloat16 parameters are part of the state: they hold what rounding removed.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings, *, stream: bool) -> None:
        self._parameters = dict(parameters)
        self._masters = {name: _pinned_copy(p) for name, p in parameters.items()}
        self._finer = {f"{name}.master": master for name, master in self._masters.items()
                       if parameters[name].dtype != master.dtype}
        self._adamw = AdamW(self._masters, settings)
        self._cpu_gradients = GradientsOnCpu({id(p): self._masters[name] for name, p in parameters.items()})
        self.sink = self._cpu_gradients if stream else None

    @classmethod
    def from_config(cls, parameters: Mapping[str, Tensor], settings: AdamWSettings,
                    config: RunConfig) -> OffloadedAdamW:
        return cls(parameters, settings, stream=config.offload == "gradients")

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                self._cpu_gradients.vector(parameter, parameter.grad)
        self._adamw.step(learning_rate, grad_scale.cpu(), found_inf.cpu())
        self._cpu_gradients.clear()
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name], non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        return {**self._adamw.tensors(), **self._finer}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Call after the weights are loaded: master weights are copied from them, unless the checkpoint has its own."""
        kept = {name: master for name, master in self._finer.items() if name in tensors}
        for name, parameter in self._parameters.items():
            if f"{name}.master" not in kept:
                self._masters[name].copy_(parameter)
        return [*self._adamw.load_tensors(tensors), *copy_tensors(kept, tensors)]


def _pinned_copy(parameter: Tensor) -> Tensor:
    master = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.device.type == "cuda")
    return master.copy_(parameter.detach())


class GradientsOnCpu:
    """Copies each gradient to the CPU as it is computed, so that it exists on the GPU only until then.

    The copies go through one pinned buffer, which a GPU writes many times faster than pageable memory, and are summed
    in tensors that are reused from step to step: page faults on new memory cost the CPU more than the addition.
    """

    def __init__(self, masters: dict[int, Tensor]) -> None:
        self._masters = masters
        self._sums: dict[int, Tensor] = {}
        self._pinned: Tensor | None = None

    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        self.vector(parameter, matmul_grad(d_out, inputs, torch.float32))

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        master, copied = self._masters[id(parameter)], self._to_cpu(gradient)
        if master.grad is None:
            master.grad = self._sum_of(parameter).copy_(copied)
        else:
            master.grad += copied

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        master = self._masters[id(parameter)]
        if master.grad is None:
            master.grad = self._sum_of(parameter).zero_()
        add_rows_(master.grad, indices.cpu(), gradient.cpu())

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def clear(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def _sum_of(self, parameter: Tensor) -> Tensor:
        key = id(parameter)
        if key not in self._sums:
            self._sums[key] = torch.empty(parameter.shape, dtype=torch.float32)
        return self._sums[key]

    def _to_cpu(self, gradient: Tensor) -> Tensor:
        """The gradient on the CPU, valid until the next call."""
        if gradient.device.type != "cuda":
            return gradient.float()
        if self._pinned is None:
            most = max(master.numel() for master in self._masters.values())
            self._pinned = torch.empty(most, dtype=torch.float32, pin_memory=True)
        copied = self._pinned[:gradient.numel()].view(gradient.shape).copy_(gradient, non_blocking=True)
        torch.cuda.current_stream(gradient.device).synchronize()
        return copied
