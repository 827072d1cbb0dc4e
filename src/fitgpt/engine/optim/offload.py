"""AdamW in the host's memory: the card holds weights and activations, and neither moments nor master weights.

With `stream`, gradients do not stay on the card either: each goes to the host as it is made.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..gradient_sinks import add_rows_, product_of
from .adamw import AdamW, AdamWSettings, Optimizer, copy_tensors


class HostAdamW(Optimizer):
    """Exact: the same float32 arithmetic, on the CPU. The host needs 16 bytes a parameter.

    Masters of rounded weights are state of their own: the weights do not say what was rounded away.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings, *, stream: bool) -> None:
        self._parameters = dict(parameters)
        self._masters = {name: _on_host(p) for name, p in parameters.items()}
        self._finer = {f"{name}.master": master for name, master in self._masters.items()
                       if parameters[name].dtype != master.dtype}
        self._adamw = AdamW(self._masters, settings)
        self._arrived = ToHost({id(p): self._masters[name] for name, p in parameters.items()})
        self.sink = self._arrived if stream else None

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                self._arrived.vector(parameter, parameter.grad)
        self._adamw.step(learning_rate, grad_scale.cpu(), found_inf.cpu())
        self._arrived.clear()
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name], non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        return {**self._adamw.tensors(), **self._finer}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Called after the weights were loaded: masters follow them, unless finer ones were kept (nanoGPT keeps none).
        """
        kept = {name: master for name, master in self._finer.items() if name in tensors}
        for name, parameter in self._parameters.items():
            if f"{name}.master" not in kept:
                self._masters[name].copy_(parameter)
        return [*self._adamw.load_tensors(tensors), *copy_tensors(kept, tensors)]


def _on_host(parameter: Tensor) -> Tensor:
    master = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.device.type == "cuda")
    return master.copy_(parameter.detach())


class ToHost:
    """Gradients that leave the card one by one: each exists there only until it is copied.

    They land in one pinned buffer, which the card writes many times faster than ordinary memory, and are summed in
    places that stay from step to step: to touch fresh memory costs the host more than to add.
    """

    def __init__(self, masters: dict[int, Tensor]) -> None:
        self._masters = masters
        self._places: dict[int, Tensor] = {}
        self._landing: Tensor | None = None

    def product(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        self.vector(parameter, product_of(d_out, inputs, torch.float32))

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        master, landed = self._masters[id(parameter)], self._land(gradient)
        if master.grad is None:
            master.grad = self._place(parameter).copy_(landed)
        else:
            master.grad += landed

    def rows(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        master = self._masters[id(parameter)]
        if master.grad is None:
            master.grad = self._place(parameter).zero_()
        add_rows_(master.grad, indices.cpu(), gradient.cpu())

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def clear(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def _place(self, parameter: Tensor) -> Tensor:
        key = id(parameter)
        if key not in self._places:
            self._places[key] = torch.empty(parameter.shape, dtype=torch.float32)
        return self._places[key]

    def _land(self, gradient: Tensor) -> Tensor:
        """On the host until the next one lands."""
        if gradient.device.type != "cuda":
            return gradient.float()
        if self._landing is None:
            most = max(master.numel() for master in self._masters.values())
            self._landing = torch.empty(most, dtype=torch.float32, pin_memory=True)
        landed = self._landing[:gradient.numel()].view(gradient.shape).copy_(gradient, non_blocking=True)
        torch.cuda.current_stream(gradient.device).synchronize()
        return landed
