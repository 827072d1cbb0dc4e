"""What each optimizer holds for a parameter, and what its step needs besides."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import RunConfig
from .tape import Writer

Parameters = Sequence[tuple[str, int, bool]]

GROUP, SMALLEST_ROUNDED = 256, 4096  # as engine/rounded.py has them
SCALAR = 4


class Held:
    """An optimizer's state: for each parameter, tensors with their bytes, in the order they are made."""

    def __init__(self, writer: Writer, parameters: Parameters, config: RunConfig) -> None:
        self.w, self.parameters, self.config = writer, parameters, config

    def state(self, numbers: int, matrix: bool, name: str) -> list[tuple[str, int]]:
        return [("exp_avg", 4 * numbers), ("exp_avg_sq", 4 * numbers), ("step", SCALAR)]

    def nbytes(self) -> int:
        return sum(nbytes for name, numbers, matrix in self.parameters
                   for _, nbytes in self.state(numbers, matrix, name))

    def load(self) -> None:
        for name, numbers, matrix in self.parameters:
            for part, nbytes in self.state(numbers, matrix, name):
                self.w.alloc(f"{name}.{part}", "optimizer", nbytes)

    def begin(self) -> None:
        """Before the first gradient of a step is made."""

    def step(self) -> None:
        """AdamW's fused kernel works in place."""


class Rounded(Held):
    """8-bit states, or float32 ones for bfloat16 weights, updated in place by one kernel a parameter."""

    def state(self, numbers: int, matrix: bool, name: str) -> list[tuple[str, int]]:
        if self.config.optimizer != "adam8bit" or numbers < SMALLEST_ROUNDED:
            return [("exp_avg", 4 * numbers), ("exp_avg_sq", 4 * numbers)]
        groups = -(-numbers // GROUP)
        return [("first", numbers), ("first_scale", 4 * groups), ("second", numbers), ("second_scale", 4 * groups)]

    def load(self) -> None:
        self.w.alloc("steps", "optimizer", SCALAR)
        super().load()


class Muon(Held):
    """One momentum for a block's matrix; AdamW's state for the rest, made after it."""

    def state(self, numbers: int, matrix: bool, name: str) -> list[tuple[str, int]]:
        if self.is_momentum(name, matrix):
            return [("momentum", 4 * numbers)]
        return super().state(numbers, matrix, name)

    def is_momentum(self, name: str, matrix: bool) -> bool:
        return matrix and name[0].isdigit()

    def load(self) -> None:
        for first in (True, False):
            for name, numbers, matrix in self.parameters:
                if self.is_momentum(name, matrix) == first:
                    for part, nbytes in self.state(numbers, matrix, name):
                        self.w.alloc(f"{name}.{part}", "optimizer", nbytes)

    def step(self) -> None:
        """Matrix by matrix, the gradient, the moved momentum and the orthogonal update exist beside each other."""
        w = self.w
        for name, numbers, matrix in self.parameters:
            if not self.is_momentum(name, matrix):
                continue
            w.alloc("gradient", "optimizer", 4 * numbers)
            w.alloc("moved", "optimizer", 4 * numbers)
            w.alloc("update", "optimizer", 4 * numbers)
            w.alloc("stepped", "optimizer", 4 * numbers)
            w.alloc("chosen", "optimizer", 4 * numbers)
            w.free("gradient", "moved", "update", "stepped", "chosen")


class OnHost(Held):
    """Nothing on the card."""

    def load(self) -> None:
        pass


def of(config: RunConfig, parameters: Parameters, writer: Writer) -> Held:
    kind: type[Held] = Held
    if config.optimizer == "muon":
        kind = Muon
    elif config.offload != "none":
        kind = OnHost
    elif config.step_in_backward or config.optimizer == "adam8bit" or config.weights == "bfloat16":
        kind = Rounded
    return kind(writer, parameters, config)
