"""The tape of nanoGPT's own train.py (commit 3adf61e1): load, evaluation, iterations, a later evaluation.

Its loop is here; what its model does in forward and backward is in eager.py and compiled.py. The loop holds memory of
its own: `logits` outlives its step, the next batch is on the card before the backward pass, and evaluation's own
`logits` are replaced only once the next ones are there.
"""

from __future__ import annotations

from typing import Protocol

from ..units import MiB
from .compiled import CompiledGPT
from .eager import EagerGPT
from .nanorun import SCALAR, NanoGPTRun
from .tape import Tape, Writer


class Model(Protocol):
    """What the loop asks of the model. Names it leaves alive are the caller's to free."""

    def forward(self, logits: str, loss: str, *, grad: bool) -> None: ...

    def leave_autocast(self, *, grad: bool) -> None: ...

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None: ...


def write(run: NanoGPTRun, *, workspace: int = 32 * MiB, eval_batches: int = 2, iterations: int = 2,
          micro_steps: int = 4) -> Tape:
    """The tape of a run with `eval_batches` of each split and that many iterations between two evaluations.

    `workspace` is cuBLAS's, 32 MiB on sm_90 and 8,519,680 bytes on older cards; the main thread has one and autograd's
    another. `micro_steps` is the most that are written of an iteration: beyond four, only odd or even was seen to
    matter. Two iterations reach the recorded figures; three are wanted to see whether `reserved_range` is a range.
    """
    writer = Writer()
    model = (CompiledGPT if run.compile else EagerGPT)(run, writer, workspace)
    asked = run.gradient_accumulation_steps
    written = asked if asked <= micro_steps else micro_steps - (asked - micro_steps) % 2
    return Loop(run, writer, model, max(written, 1)).run(eval_batches, iterations)


class Loop:
    """train.py, from the top to the bottom."""

    def __init__(self, run: NanoGPTRun, writer: Writer, model: Model, micro_steps: int) -> None:
        self.r, self.w, self.model, self.micro_steps = run, writer, model, micro_steps
        self.scaled = run.dtype == "float16"
        self.parameters = run.parameters()
        self.batch = ""        # the names of what X, `logits` and `loss` are bound to; Y is X's with a prime
        self.fetched = 0
        self.bound: tuple[str, ...] = ()

    def run(self, eval_batches: int, iterations: int) -> Tape:
        w = self.w
        w.phase("load")
        for name, numbers, _ in self.parameters:
            w.alloc(name, "weights", 4 * numbers)
        self.batch = self.get_batch()
        w.phase("first_eval")
        self.evaluate(eval_batches)
        w.phase("first_train")
        self.micro_batches()
        self.step(first=True)
        for _ in range(iterations - 1):
            w.phase("train")
            self.micro_batches()
            w.phase("step")
            self.step(first=False)
        w.phase("eval")
        self.evaluate(eval_batches)
        return w.tape()

    def get_batch(self) -> str:
        """Inputs and targets, 8 bytes a token each."""
        self.fetched += 1
        name = f"X{self.fetched}"
        for each in (name, f"{name}'"):
            self.w.alloc(each, "data", 8 * self.r.tokens)
        return name

    def evaluate(self, batches: int) -> None:
        """estimate_loss: its variables live until the next batch replaces them, and to the end of the function."""
        w, batch = self.w, ""
        bound: tuple[str, ...] = ()
        for _ in range(2 * batches):
            before, batch = batch, self.get_batch()
            if before:
                w.free(before, f"{before}'")
            outputs = (f"logits of {batch}", f"loss of {batch}")
            self.model.forward(*outputs, grad=False)
            w.free(*bound)
            bound = outputs
            self.model.leave_autocast(grad=False)
        w.free(batch, f"{batch}'", *bound)

    def micro_batches(self) -> None:
        w = self.w
        for micro_step in range(self.micro_steps):
            batch = self.batch
            logits, loss = f"logits of {batch}", f"loss of {batch}"
            self.model.forward(logits, "mean loss", grad=True)
            w.free(*self.bound)
            w.alloc(loss, "other", SCALAR)
            w.free("mean loss")
            self.bound = (logits, loss)
            self.model.leave_autocast(grad=True)
            self.batch = self.get_batch()
            if self.scaled:
                if not w.alive("scale"):
                    w.alloc("scale", "optimizer", SCALAR)
                    w.alloc("growth tracker", "optimizer", SCALAR)
                w.alloc("scaled loss", "other", SCALAR)
            w.alloc("d root", "other", SCALAR)
            if self.scaled:
                w.alloc("d scaled", "other", SCALAR)
            w.alloc("d loss", "other", SCALAR)
            if self.scaled:
                w.free("d scaled")
            self.model.backward(batch, f"{batch}'", accumulate=micro_step > 0)
            w.free("d root")
            if self.scaled:
                w.free("scaled loss")

    def step(self, *, first: bool) -> None:
        """Clipping's norms are a few KiB; fused AdamW makes its state at the first step, the decayed matrices first."""
        w = self.w
        if self.scaled:
            w.alloc("found_inf", "optimizer", SCALAR)
        if self.r.grad_clip:
            for name, _, _ in self.parameters:
                w.alloc(f"{name}.norm", "other", SCALAR)
            w.free(*(f"{name}.norm" for name, _, _ in self.parameters))
        if first:
            for name, numbers, _ in sorted(self.parameters, key=lambda each: not each[2]):
                w.alloc(f"{name}.step", "optimizer", SCALAR)
                w.alloc(f"{name}.exp_avg", "optimizer", 4 * numbers)
                w.alloc(f"{name}.exp_avg_sq", "optimizer", 4 * numbers)
        if self.scaled:
            w.free("found_inf")
        w.free(*(f"{name}.grad" for name, _, _ in self.parameters))
