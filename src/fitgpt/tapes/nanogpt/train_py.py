"""RunConfig → the tape of a run of nanoGPT's train.py (commit 3adf61e1): load, evaluation, iterations, evaluation.

The training loop is here; the model's forward and backward are in eager.py and compiled.py. The loop holds memory of
its own: `logits` outlives its step, the next batch is on the GPU before the backward pass, and evaluation replaces its
`logits` only when the next ones exist.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Protocol

from ...config.run_config import RunConfig
from ...memory.platform import Platform
from ...memory.tape import Tape, Writer
from .aten import SCALAR, AttentionTape, norm_partials
from .compiled import CompiledGPT
from .eager import EagerGPT
from .forward_graph import ForwardGraph, GraphShapes

# Batches written of the first evaluation and of a later one: more were not seen to change a figure, fewer were
# (docs/log.md, 2026-11-16).
EVAL_BATCHES = (4, 3)
# Micro-batches written of each iteration between two evaluations, by the number of events of a micro-batch (up to the
# first number): as many as the run has, or fewer of the same parity.
HISTORIES = {True: ((1400, (16, 6, 6, 6, 6, 6)), (2000, (16, 6, 6, 6)), (math.inf, (4, 4, 2))),   # compiled
             False: ((1100, (16, 6, 6, 6, 6, 6)), (1400, (16, 6, 6, 6, 2, 2)), (2000, (16, 6, 6, 6)),
                     (math.inf, (4, 4, 2)))}
MIN_ITERATIONS = {1: 4, 2: 4, 3: 3, 4: 3}  # by gradient_accumulation_steps: iterations written at least


def write(config: RunConfig, platform: Platform, *, eval_batches: tuple[int, int] = EVAL_BATCHES,
          history: tuple[int, ...] = ()) -> Tape:
    """The tape of a run whose dtype, compile and vocab_size are resolved. `eval_batches`: batches written of the first
    evaluation and of the next; `history`: micro-batches of each iteration between them, by default `history_of`'s."""
    writer = Writer()
    model = (CompiledGPT if config.compile else EagerGPT)(config, writer, platform)
    return TrainPy(config, writer, model).run(eval_batches, history)


def history_of(config: RunConfig, events: int) -> tuple[int, ...]:
    """How many micro-batches of each iteration to write, if a micro-batch has that many events.

    Reserved memory grows until the third iteration, in some runs until the fifth, and may depend on the number of
    micro-batches of the first; with deep models less so. See docs/log.md, 2026-11-16.
    """
    micro_steps = config.gradient_accumulation_steps
    written = next(history for up_to, history in HISTORIES[bool(config.compile)] if events <= up_to)
    if len(written) <= MIN_ITERATIONS.get(micro_steps, 0):
        return (micro_steps,) * MIN_ITERATIONS[micro_steps]
    return tuple([min(micro_steps, most if micro_steps % 2 == 0 else max(most - 1, 3)) for most in written])


def parameters(config: RunConfig) -> list[tuple[str, int, bool]]:
    """(name, elements, is a matrix), in the model's order. The head is tied to wte."""
    c = config.n_embd
    found = [("wte", config.vocab_size * c, True), ("wpe", config.block_size * c, True)]

    def module(name: str, inputs: int | None, outputs: int) -> None:
        found.append((f"{name}.weight", outputs * (inputs or 1), inputs is not None))
        if config.bias:
            found.append((f"{name}.bias", outputs, False))

    for layer in range(config.n_layer):
        module(f"{layer}.ln_1", None, c)
        module(f"{layer}.c_attn", c, 3 * c)
        module(f"{layer}.attn.c_proj", c, c)
        module(f"{layer}.ln_2", None, c)
        module(f"{layer}.c_fc", c, 4 * c)
        module(f"{layer}.mlp.c_proj", 4 * c, c)
    module("ln_f", None, c)
    return found


def lower_bound(config: RunConfig, platform: Platform) -> int:
    """Bytes that the run holds at some moment, without writing its tape: in the optimizer's step, or between forward
    and backward."""
    params = config.gpt_config().count_params()
    gradients = 4 * params if config.gradient_accumulation_steps > 1 else 0
    saved = _saved_compiled if config.compile else _saved_eager
    one, two = (saved(replace(config, n_layer=layers), platform) for layers in (1, 2))
    all_saved = one + (config.n_layer - 1) * (two - one)  # every layer saves the same
    return max(16 * params, 12 * params + gradients + all_saved)


def _saved_compiled(config: RunConfig, platform: Platform) -> int:
    graph = ForwardGraph(GraphShapes(config, platform), AttentionTape(config, Writer(), platform), grad=True).graph()
    return sum(buffer.nbytes for kernel in graph.kernels for buffer in kernel.results if buffer.name in graph.outputs)


def _saved_eager(config: RunConfig, platform: Platform) -> int:
    writer = Writer()
    writer.phase("train")
    model = EagerGPT(config, writer, platform)
    model.forward("logits", "loss", grad=True)
    model.leave_autocast(grad=True)
    return sum(event.nbytes for event in writer.tape().alive_at_end().values())


class ModelTape(Protocol):
    """What the training loop calls. Tensors that a call leaves alive are the caller's to free."""

    def forward(self, logits: str, loss: str, *, grad: bool) -> None: ...

    def leave_autocast(self, *, grad: bool) -> None: ...

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None: ...


# Names of the batch X: two in turn, so that every second micro-batch has the same names. Y is X's name with a prime.
TRAIN_BATCHES, EVAL_BATCH_NAMES = ("X0", "X1"), ("X2", "X3")


def other(two: tuple[str, str], name: str) -> str:
    return two[name == two[0]]


class TrainPy:
    """train.py, from top to bottom."""

    def __init__(self, config: RunConfig, writer: Writer, model: ModelTape) -> None:
        self.config, self.w, self.model = config, writer, model
        self.scaled = config.dtype == "float16"  # by a GradScaler
        self.parameters = parameters(config)
        self.batch = ""                     # the name of X
        self.outputs: tuple[str, ...] = ()  # the names of `logits` and `loss`
        self.names: tuple[str, ...] = ()    # those of a micro-batch that differ in the next

    def run(self, eval_batches: tuple[int, int], history: tuple[int, ...]) -> Tape:
        w = self.w
        w.phase("load")
        for name, elements, _ in self.parameters:
            w.alloc(name, "weights", 4 * elements)
        self.batch = self.get_batch(TRAIN_BATCHES[0])
        w.phase("first_eval")
        self.evaluate(eval_batches[0], first=True)
        if self.config.eval_only:
            return w.tape()
        w.phase("first_train")
        events = self.micro_batches(range(min(2, self.config.gradient_accumulation_steps, *history[:1])))
        first, *later = history or history_of(self.config, events)
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
        """X and Y: 8 bytes per token each."""
        for each in (name, f"{name}'"):
            self.w.alloc(each, "data", 8 * self.config.batch_size * self.config.block_size)
        return name

    def evaluate(self, batches: int, *, first: bool) -> None:
        """estimate_loss: its variables live until the next batch replaces them or the function returns."""
        w, batch = self.w, ""
        previous: tuple[str, ...] = ()
        for _ in range(batches):
            before, batch = batch, other(EVAL_BATCH_NAMES, batch)
            outputs = (f"logits of {batch}", f"loss of {batch}")
            freed = (*((before, f"{before}'") if before else ()), *previous)
            self.get_batch(batch)
            w.part(("evaluation", bool(before), first and not before), (batch, f"{batch}'", *outputs, *freed),
                   partial(self.evaluate_batch, outputs, before, previous))
            previous = outputs
        w.free(batch, f"{batch}'", *previous)

    def evaluate_batch(self, outputs: tuple[str, str], before: str, previous: tuple[str, ...]) -> None:
        w = self.w
        if before:
            w.free(before, f"{before}'")
        self.model.forward(*outputs, grad=False)
        w.free(*previous)
        self.model.leave_autocast(grad=False)

    def micro_batches(self, micro_steps: range) -> int:
        """Writes micro-batches; returns the number of events of the last."""
        w, begin = self.w, 0
        for micro_step in micro_steps:
            begin = w.length
            batch, previous = self.batch, self.outputs
            following = other(TRAIN_BATCHES, batch)
            outputs = (f"logits of {batch}", f"loss of {batch}")
            self.names = (batch, f"{batch}'", following, f"{following}'", *outputs, *previous)
            w.part(("micro-batch", micro_step > 0, bool(previous)), self.names,
                   partial(self.micro_batch, batch, following, outputs, previous, accumulate=micro_step > 0))
            self.batch, self.outputs = following, outputs
        return w.length - begin

    def micro_batch(self, batch: str, following: str, outputs: tuple[str, str], previous: tuple[str, ...], *,
                    accumulate: bool) -> None:
        w, (logits, loss) = self.w, outputs
        self.model.forward(logits, "mean loss", grad=True)
        w.free(*previous)
        w.alloc(loss, "other", SCALAR)
        w.free("mean loss")
        self.model.leave_autocast(grad=True)
        self.get_batch(following)
        if self.scaled:
            if not w.alive("scale"):
                w.alloc("scale", "optimizer", SCALAR)
                w.alloc("growth tracker", "optimizer", SCALAR)
            w.alloc("scaled loss", "other", SCALAR)
        w.alloc("d_root", "other", SCALAR)
        if self.scaled:
            w.alloc("d_scaled", "other", SCALAR)
        w.alloc("d_loss", "other", SCALAR)
        if self.scaled:
            w.free("d_scaled")
        self.model.backward(batch, f"{batch}'", accumulate=accumulate)
        w.free("d_root")
        if self.scaled:
            w.free("scaled loss")

    def step(self, *, first: bool) -> None:
        """Fused AdamW allocates its state in the first step, that of the decayed matrices first."""
        w = self.w
        if self.scaled:
            self.unscale()
        if self.config.grad_clip:
            self.clip()
        if self.scaled:
            w.alloc("found_inf of all", "other", SCALAR)
        if first:
            for name, elements, _ in sorted(self.parameters, key=lambda each: not each[2]):
                w.alloc(f"{name}.step", "optimizer", SCALAR)
                w.alloc(f"{name}.exp_avg", "optimizer", 4 * elements)
                w.alloc(f"{name}.exp_avg_sq", "optimizer", 4 * elements)
        if self.scaled:
            w.free("found_inf of all", "found_inf")
        w.free(*(f"{name}.grad" for name, _, _ in self.parameters))

    def unscale(self) -> None:
        """GradScaler.unscale_: scalars for the inverse of the scale and for found_inf, and a copy of each."""
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
        """clip_grad_norm_: partial sums of all gradients, a norm per gradient, the total norm, the coefficient."""
        w, names = self.w, [f"{name}.norm" for name, _, _ in self.parameters]
        w.alloc("partial norms", "other", norm_partials([elements for _, elements, _ in self.parameters]))
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
