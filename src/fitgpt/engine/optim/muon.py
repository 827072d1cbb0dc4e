"""Muon for the blocks' matrices, AdamW for embeddings and vectors: one momentum per element instead of two moments.

A matrix's momentum is made orthogonal (all its singular values near one) before it is applied. The learning rate
means what it means to AdamW: updates are scaled to the size AdamW's would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...config.optimizers import MUON_ROUNDS
from .adamw import AdamW, AdamWSettings, Optimizer

MOMENTUM = 0.95
# Newton–Schulz: five iterations of this quintic bring every singular value between about 0.7 and 1.2 (Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADAMW_SIZE = 0.2  # the root mean square of AdamW's updates, as measured by Moonshot (2025)


class Muon(Optimizer):
    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings) -> None:
        self._settings = settings
        self._matrices = {name: p for name, p in parameters.items() if ".h." in name and p.dim() == 2}
        self._momentum = {name: torch.zeros_like(p) for name, p in self._matrices.items()}
        self._rest = AdamW({name: p for name, p in parameters.items() if name not in self._matrices}, settings)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._rest.step(learning_rate, grad_scale, found_inf)
        for name, parameter in self._matrices.items():
            if parameter.grad is None:
                continue
            gradient, momentum = parameter.grad / grad_scale, self._momentum[name]
            moved = torch.lerp(momentum, gradient, 1 - MOMENTUM)
            update = orthogonal(torch.lerp(gradient, moved, MOMENTUM))  # a step ahead, as Nesterov does
            size = ADAMW_SIZE * math.sqrt(max(parameter.shape))
            stepped = parameter * (1 - learning_rate * self._settings.weight_decay) - learning_rate * size * update
            parameter.copy_(torch.where(found_inf > 0, parameter, stepped))
            momentum.copy_(torch.where(found_inf > 0, momentum, moved))

    def tensors(self) -> dict[str, Tensor]:
        return self._rest.tensors() | {f"{name}.momentum": each for name, each in self._momentum.items()}


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with all singular values near one, computed in bfloat16."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(MUON_ROUNDS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x
