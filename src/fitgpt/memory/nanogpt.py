"""The tape of nanoGPT's own train.py (commit 3adf61e1): load, evaluation, iterations, a later evaluation.

Its loop is here; what its model does in forward and backward is in eager.py and compiled.py. The loop holds memory of
its own: `logits` outlives its step, the next batch is on the card before the backward pass, and evaluation's own
`logits` are replaced only once the next ones are there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Protocol

from .aten import H200, Attention, Gpu, norm_partials
from .compiled import CompiledGPT
from .eager import EagerGPT
from .forwardgraph import ForwardGraph, Shapes
from .nanorun import SCALAR, NanoGPTRun
from .tape import Tape, Writer


class Model(Protocol):
    """What the loop asks of the model. Names it leaves alive are the caller's to free."""

    def forward(self, logits: str, loss: str, *, grad: bool) -> None: ...

    def leave_autocast(self, *, grad: bool) -> None: ...

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None: ...


# Batches written of the first evaluation and of a later one: more were not seen to change a figure, fewer were
# (docs/log.md, 2026-11-16).
EVAL_BATCHES = (4, 3)
# How many micro-batches are written of each iteration between two evaluations, where one has up to so many events: as
# many as there are, or fewer, but odd or even as they are. A replay passes over what repeats (repeats.py), and follows
# three or four of each.
HISTORIES = {True: ((1400, (16, 6, 6, 6, 6, 6)), (2000, (16, 6, 6, 6)), (math.inf, (4, 4, 2))),   # compiled
             False: ((1100, (16, 6, 6, 6, 6, 6)), (1400, (16, 6, 6, 6, 2, 2)), (2000, (16, 6, 6, 6)),
                     (math.inf, (4, 4, 2)))}
WHOLE = {1: 4, 2: 4, 3: 3, 4: 3}  # so many whole iterations at least, of so few micro-batches


def write(run: NanoGPTRun, *, gpu: Gpu = H200, eval_batches: tuple[int, int] = EVAL_BATCHES,
          history: tuple[int, ...] = ()) -> Tape:
    """The tape of a run with so many batches of the first evaluation and of the next. `history`: how many micro-batches
    are written of each iteration between the two, where that is not for `history_of` to say."""
    writer = Writer()
    model = (CompiledGPT if run.compile else EagerGPT)(run, writer, gpu)
    return Loop(run, writer, model).run(eval_batches, history)


def history_of(run: NanoGPTRun, events: int) -> tuple[int, ...]:
    """How many micro-batches to write of each iteration, if one has so many events.

    What is reserved grows until the third iteration, in some runs until the fifth, and may depend on the number of
    micro-batches of the first; of deep models it does so less. See docs/log.md, 2026-11-16.
    """
    asked = max(run.gradient_accumulation_steps, 1)
    written = next(history for up_to, history in HISTORIES[run.compile] if events <= up_to)
    if len(written) <= WHOLE.get(asked, 0):
        return (asked,) * WHOLE[asked]
    return tuple([min(asked, most if asked % 2 == 0 else max(most - 1, 3)) for most in written])


def held_at_least(run: NanoGPTRun, gpu: Gpu = H200) -> int:
    """What the tape holds at some moment, without writing it: at the optimizer's step, or between the two passes."""
    params = sum(numbers for _, numbers, _ in run.parameters())
    gradients = 4 * params if run.gradient_accumulation_steps > 1 else 0
    kept = _kept_compiled if run.compile else _kept_eager
    of_one, of_two = (kept(replace(run, n_layer=layers), gpu) for layers in (1, 2))
    all_kept = of_one + (run.n_layer - 1) * (of_two - of_one)  # every layer keeps what the one before it does
    return max(16 * params, 12 * params + gradients + all_kept)


def _kept_compiled(run: NanoGPTRun, gpu: Gpu) -> int:
    graph = ForwardGraph(Shapes(run, gpu), Attention(run, Writer(), gpu), grad=True).graph()
    return sum(made.nbytes for kernel in graph.kernels for made in kernel.results if made.name in graph.keeps)


def _kept_eager(run: NanoGPTRun, gpu: Gpu) -> int:
    writer = Writer()
    writer.phase("train")
    model = EagerGPT(run, writer, gpu)
    model.forward("logits", "loss", grad=True)
    model.leave_autocast(grad=True)
    return sum(event.nbytes for event in writer.tape().alive_at_end().values())


# What X is bound to: two names in turn, so that every second micro-batch has the same names.
TRAINING, EVALUATED = ("X0", "X1"), ("X2", "X3")


def other(two: tuple[str, str], name: str) -> str:
    return two[name == two[0]]


class Loop:
    """train.py, from the top to the bottom."""

    def __init__(self, run: NanoGPTRun, writer: Writer, model: Model) -> None:
        self.r, self.w, self.model = run, writer, model
        self.scaled = run.dtype == "float16"
        self.parameters = run.parameters()
        self.batch = ""  # the names of what X, `logits` and `loss` are bound to; Y is X's with a prime
        self.bound: tuple[str, ...] = ()
        self.names: tuple[str, ...] = ()  # those of a micro-batch that are others in the next

    def run(self, eval_batches: tuple[int, int], history: tuple[int, ...]) -> Tape:
        w = self.w
        w.phase("load")
        for name, numbers, _ in self.parameters:
            w.alloc(name, "weights", 4 * numbers)
        self.batch = self.get_batch(TRAINING[0])
        w.phase("first_eval")
        self.evaluate(eval_batches[0], first=True)
        if self.r.eval_only:
            return w.tape()
        w.phase("first_train")
        events = self.micro_batches(range(min(2, self.r.gradient_accumulation_steps or 1, *history[:1])))
        first, *later = history or history_of(self.r, events)
        self.micro_batches(range(2, first))
        self.step(first=True)
        for micro_steps in later:
            w.phase("train")
            self.micro_batches(range(micro_steps))
            w.phase("step")
            w.part("step", self.names, partial(self.step, first=False))
        w.phase("eval")
        self.evaluate(eval_batches[1], first=False)
        return w.tape()

    def get_batch(self, name: str) -> str:
        """Inputs and targets, 8 bytes a token each."""
        for each in (name, f"{name}'"):
            self.w.alloc(each, "data", 8 * self.r.tokens)
        return name

    def evaluate(self, batches: int, *, first: bool) -> None:
        """estimate_loss: its variables live until the next batch replaces them, and to the end of the function."""
        w, batch = self.w, ""
        bound: tuple[str, ...] = ()
        for _ in range(batches):
            before, batch = batch, other(EVALUATED, batch)
            outputs = (f"logits of {batch}", f"loss of {batch}")
            spent = (*((before, f"{before}'") if before else ()), *bound)
            self.get_batch(batch)  # and no part of it: so all of an evaluation is followed, what is small included
            w.part(("evaluation", bool(before), first and not before), (batch, f"{batch}'", *outputs, *spent),
                   partial(self.evaluate_batch, batch, outputs, before, bound))
            bound = outputs
        w.free(batch, f"{batch}'", *bound)

    def evaluate_batch(self, batch: str, outputs: tuple[str, str], before: str, bound: tuple[str, ...]) -> None:
        w = self.w
        if before:
            w.free(before, f"{before}'")
        self.model.forward(*outputs, grad=False)
        w.free(*bound)
        self.model.leave_autocast(grad=False)

    def micro_batches(self, micro_steps: range) -> int:
        """The number of events of the last."""
        w, begin = self.w, 0
        for micro_step in micro_steps:
            begin = w.length
            batch, bound = self.batch, self.bound
            following = other(TRAINING, batch)
            outputs = (f"logits of {batch}", f"loss of {batch}")
            self.names = (batch, f"{batch}'", following, f"{following}'", *outputs, *bound)
            w.part(("micro-batch", micro_step > 0, bool(bound)), self.names,
                   partial(self.micro_batch, batch, following, outputs, bound, accumulate=micro_step > 0))
            self.batch, self.bound = following, outputs
        return w.length - begin

    def micro_batch(self, batch: str, following: str, outputs: tuple[str, str], bound: tuple[str, ...], *,
                    accumulate: bool) -> None:
        w, (logits, loss) = self.w, outputs
        self.model.forward(logits, "mean loss", grad=True)
        w.free(*bound)
        w.alloc(loss, "other", SCALAR)
        w.free("mean loss")
        self.model.leave_autocast(grad=True)
        self.get_batch(following)
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
        self.model.backward(batch, f"{batch}'", accumulate=accumulate)
        w.free("d root")
        if self.scaled:
            w.free("scaled loss")

    def step(self, *, first: bool) -> None:
        """Fused AdamW makes its state at the first step, the decayed matrices first."""
        w = self.w
        if self.scaled:
            self.unscale()
        if self.r.grad_clip:
            self.clip()
        if self.scaled:
            w.alloc("found_inf of all", "other", SCALAR)
        if first:
            for name, numbers, _ in sorted(self.parameters, key=lambda each: not each[2]):
                w.alloc(f"{name}.step", "optimizer", SCALAR)
                w.alloc(f"{name}.exp_avg", "optimizer", 4 * numbers)
                w.alloc(f"{name}.exp_avg_sq", "optimizer", 4 * numbers)
        if self.scaled:
            w.free("found_inf of all", "found_inf")
        w.free(*(f"{name}.grad" for name, _, _ in self.parameters))

    def unscale(self) -> None:
        """Scalars: the scale's inverse, and whether a gradient is not finite; of both a copy is used."""
        w = self.w
        w.alloc("scale.wide", "other", 2 * SCALAR)
        w.alloc("inverse.wide", "other", 2 * SCALAR)
        w.free("scale.wide")
        w.alloc("inverse", "other", SCALAR)
        w.free("inverse.wide")
        w.alloc("none found", "other", SCALAR)
        w.alloc("found_inf", "other", SCALAR)
        w.alloc("inverse.copy", "other", SCALAR)
        w.free("inverse.copy", "none found", "inverse")

    def clip(self) -> None:
        """Partial sums of all gradients' squares, a norm each, then their norm and what it scales by."""
        w, names = self.w, [f"{name}.norm" for name, _, _ in self.parameters]
        w.alloc("partial norms", "other", norm_partials([numbers for _, numbers, _ in self.parameters]))
        for name in names:
            w.alloc(name, "other", SCALAR)
        w.free("partial norms")
        w.alloc("all norms", "other", SCALAR * len(names))
        w.alloc("norm", "other", SCALAR)
        w.free("all norms", *names)
        w.alloc("norm + 1e-6", "other", SCALAR)
        w.alloc("1 / norm", "other", SCALAR)
        w.alloc("coefficient", "other", SCALAR)
        w.free("1 / norm", "norm + 1e-6")
        w.alloc("clamped", "other", SCALAR)
        w.free("coefficient", "clamped", "norm")
