"""What each optimizer holds for a parameter, and what its step needs besides."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.memory_savers import AT_ONCE, GROUP, MUON_ROUNDS, SMALLEST_ROUNDED
from ..config.run_config import RunConfig
from .tape import Writer

Parameters = Sequence[tuple[str, int, bool]]

# The bytes that rounded.update_ needs for each number at its fullest, by whether weights and states are rounded.
PLAIN_UPDATE = {(False, False): 24, (True, False): 36, (False, True): 36, (True, True): 42}
SCALAR = 4


class Held:
    """An optimizer's state: for each parameter, tensors with their bytes, in the order they are made."""

    def __init__(self, writer: Writer, parameters: Parameters, config: RunConfig, *, fused: bool) -> None:
        self.w, self.parameters, self.config, self.fused = writer, parameters, config, fused

    def state(self, numbers: int, matrix: bool, name: str) -> list[tuple[str, int]]:
        return [("exp_avg", 4 * numbers), ("exp_avg_sq", 4 * numbers), ("step", SCALAR)]

    def nbytes(self) -> int:
        return sum(nbytes for name, numbers, matrix in self.parameters
                   for _, nbytes in self.state(numbers, matrix, name))

    def load(self) -> None:
        for name, numbers, matrix in self.parameters:
            for part, nbytes in self.state(numbers, matrix, name):
                self.w.alloc(f"{name}.{part}", "optimizer", nbytes)

    def step(self) -> None:
        """AdamW's fused kernel works in place."""

    def apply(self, name: str, numbers: int) -> None:
        """One parameter's update, where gradients are applied as they are made."""


class Rounded(Held):
    """8-bit states, or float32 ones for bfloat16 weights, updated in place by one kernel a parameter."""

    def state(self, numbers: int, matrix: bool, name: str) -> list[tuple[str, int]]:
        if not self.eight_bit(numbers):
            return [("exp_avg", 4 * numbers), ("exp_avg_sq", 4 * numbers)]
        groups = -(-numbers // GROUP)
        return [("first", numbers), ("first_scale", 4 * groups), ("second", numbers), ("second_scale", 4 * groups)]

    def load(self) -> None:
        self.w.alloc("steps", "optimizer", SCALAR)
        self.w.alloc("dice", "optimizer", 2 * SCALAR)
        super().load()

    def step(self) -> None:
        if not self.config.step_in_backward:
            for name, numbers, _ in self.parameters:
                self.apply(name, numbers)

    def apply(self, name: str, numbers: int) -> None:
        """In place where there is Triton; else piece by piece in plain torch."""
        if self.fused:
            return
        rounded = self.config.weights == "bfloat16" and (name, numbers, True) in self.parameters
        at_once, eight_bit = min(numbers, AT_ONCE), self.eight_bit(numbers)
        scales = 4 * -(-at_once // GROUP) if eight_bit else 0
        self.w.free(self.w.alloc("update", "optimizer", PLAIN_UPDATE[rounded, eight_bit] * at_once + scales))

    def eight_bit(self, numbers: int) -> bool:
        return self.config.optimizer == "adam8bit" and numbers >= SMALLEST_ROUNDED


class Divided(Held):
    """A state of its own for some parameters; AdamW's for the rest, made after it."""

    def is_own(self, name: str, numbers: int, matrix: bool) -> bool:
        raise NotImplementedError

    def load(self) -> None:
        for first in (True, False):
            for name, numbers, matrix in self.parameters:
                if self.is_own(name, numbers, matrix) == first:
                    for part, nbytes in self.state(numbers, matrix, name):
                        self.w.alloc(f"{name}.{part}", "optimizer", nbytes)


class Bitsandbytes(Divided):
    """8-bit states, updated in place; float32 ones for what is small."""

    def is_own(self, name: str, numbers: int, matrix: bool) -> bool:
        return numbers >= SMALLEST_ROUNDED

    def state(self, numbers: int, matrix: bool, name: str) -> list[tuple[str, int]]:
        if not self.is_own(name, numbers, matrix):
            return super().state(numbers, matrix, name)
        groups = -(-numbers // GROUP)
        return [("state1", numbers), ("absmax1", 4 * groups), ("state2", numbers), ("absmax2", 4 * groups)]

    def load(self) -> None:
        for name in ("first map", "second map"):  # of a byte to the share of its group's largest
            self.w.alloc(name, "optimizer", 4 * 2**8)
        super().load()


class Muon(Divided):
    """One momentum for a block's matrix."""

    def is_own(self, name: str, numbers: int, matrix: bool) -> bool:
        return matrix and name[0].isdigit()

    def state(self, numbers: int, matrix: bool, name: str) -> list[tuple[str, int]]:
        if self.is_own(name, numbers, matrix):
            return [("momentum", 4 * numbers)]
        return super().state(numbers, matrix, name)

    def step(self) -> None:
        """Matrix by matrix; a variable keeps its tensor until the next matrix's takes its place."""
        w, bound = self.w, dict[str, str]()

        def bind(variable: str, tensor: str) -> None:
            if variable in bound:
                w.free(bound[variable])
            bound[variable] = tensor

        for name, numbers, matrix in self.parameters:
            if not self.is_own(name, numbers, matrix):
                continue
            wide, rounded = 4 * numbers, 2 * numbers
            for variable in ("gradient", "moved"):
                bind(variable, w.alloc(f"{name}.{variable}", "optimizer", wide))
            w.alloc("ahead", "optimizer", wide)
            bind("update", self.orthogonal(name, rounded))
            w.alloc("decayed", "optimizer", wide)
            w.alloc("scaled update", "optimizer", rounded)
            stepped = w.alloc(f"{name}.stepped", "optimizer", wide)
            w.free("decayed", "scaled update")
            bind("stepped", stepped)
            for chosen in ("weights", "momentum"):
                w.free(w.alloc(f"chosen {chosen}", "optimizer", wide))
        w.free(*bound.values())

    def orthogonal(self, name: str, nbytes: int) -> str:
        w, gram = self.w, 2 * self.config.n_embd**2  # the short side of every block matrix is C
        w.alloc("x", "optimizer", nbytes)
        x = w.alloc(f"{name}.x0", "optimizer", nbytes)
        w.free("x")
        for number in range(1, MUON_ROUNDS + 1):
            w.alloc(f"gram {number}", "optimizer", gram)
            w.free_if_alive(f"gram {number - 1}")
            w.alloc("polynomial", "optimizer", gram)
            new = w.alloc(f"{name}.x{number}", "optimizer", nbytes)
            w.free("polynomial", x)
            x = new
        w.free("ahead", f"gram {MUON_ROUNDS}")
        return x


class OnHost(Held):
    """Nothing that stays on the card. bfloat16 crosses the bus as float32: torch widens and rounds it on the card."""

    def load(self) -> None:
        pass

    def step(self) -> None:
        if self.config.weights == "float32":
            return
        for what in ("gradient", "weights") if self.config.offload == "optimizer" else ("weights",):
            for name, numbers, matrix in self.parameters:
                if matrix:
                    self.w.free(self.w.alloc(f"{name}.{what}.wide", "optimizer", 4 * numbers))


def of(config: RunConfig, parameters: Parameters, writer: Writer, *, fused: bool = True) -> Held:
    """run.make_optimizer's choice; `fused`: whether Triton is there."""
    kind: type[Held] = Held
    if config.optimizer == "muon":
        kind = Muon
    elif config.offload != "none":
        kind = OnHost
    elif config.adam8bit == "bitsandbytes":
        kind = Bitsandbytes
    elif config.step_in_backward or config.optimizer == "adam8bit" or config.weights == "bfloat16":
        kind = Rounded
    return kind(writer, parameters, config, fused=fused)
