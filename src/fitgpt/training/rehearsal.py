"""The rehearsal: everything a run does with memory, done once before its first step, at full size.

It changes nothing. The optimizer's step runs with a loss scale of NaN, so that it is skipped like any step whose
gradients are not finite: each optimizer then leaves weights and moments as they are, bit for bit. An optimizer that
applies gradients in the backward pass cannot skip: there everything is copied to CPU RAM first, and back. The RNG state
and the counter that seeds stochastic rounding are restored. Batches come from a separate prefetcher and depend only on
their number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..config.run_config import RunConfig
from ..engine.batches import Prefetcher
from ..engine.device import reset_peaks
from ..engine.oom import RngState, release
from ..engine.optim.adamw import Optimizer
from ..engine.optim.grad_scaler import Scaler
from ..runs.metrics import Evaluation
from .device_memory import Peaks
from .loop import Training, drop_gradients, learning_rate_at, train_step

MICRO_STEPS = 2  # per iteration: the first allocates the gradients, the second adds to them


def rehearse(training: Training, config: RunConfig, feed: Callable[[RunConfig], Prefetcher],
             short_eval: Callable[[], Evaluation | None], peaks: Peaks) -> None:
    """Evaluation, two iterations, evaluation, a checkpoint's copies: the order that needs most. Fills `peaks`.

    `short_eval` evaluates a few batches. Nothing is left over if it runs out of memory either.
    """
    def evaluate(phase: str) -> None:
        """An evaluation resets the peak counters itself and returns what they were."""
        evaluation = short_eval()
        if evaluation is not None:
            peaks.seen(phase, evaluation.memory)

    micro_steps = min(config.micro_batches, MICRO_STEPS)
    short = replace(config, gradient_accumulation_steps=micro_steps * config.ranks, max_iters=1)
    batches = feed(short)
    try:
        with without_side_effects(training) as stand_in:
            evaluate("first_eval")
            if not config.eval_only:
                for phase in ("first_train", "train"):
                    with peaks.during(phase):
                        train_step(stand_in, short, batches, learning_rate_at(0, config), lambda: False)
                evaluate("eval")
                with peaks.during("save"):  # it copies one tensor after another, so the largest decides what it needs
                    for tensors in (training.model.weight_tensors(), training.optimizer.tensors()):
                        max(tensors.values(), key=lambda each: each.nbytes).to("cpu", copy=True)
    finally:
        batches.close()
    release(training.device)
    reset_peaks(str(training.device))


@contextmanager
def without_side_effects(training: Training) -> Iterator[Training]:
    """A copy of the training that uses the same weights and optimizer, and whose steps change neither."""
    rng_state, optimizer, model = RngState(training.device), training.optimizer, training.model
    cannot_skip = isinstance(optimizer.sink, Optimizer)
    before = {name: each.to("cpu", copy=True) if cannot_skip else each for name, each in optimizer.held().items()}
    weights = {name: each.to("cpu", copy=True) for name, each in model.weight_tensors().items()} if cannot_skip else {}
    stand_in = copy.copy(training)
    stand_in.step, stand_in.scaler = 0, Scaler(training.device, scaling=training.scaler.scaling)
    stand_in.scaler.scale.fill_(math.nan)
    try:
        yield stand_in
    finally:
        drop_gradients(training)
        if weights:
            model.load_weight_tensors(weights)
        optimizer.restore(before)
        rng_state.restore()
