"""All that a run will do with memory, done once before its first step, at full size; and what each phase reached.

Nothing is left of it. The optimizer's step runs with a loss scale that is not a number, so that it is skipped as any
step is whose gradients are not finite: each optimizer then leaves weights and moments as they are, bit for bit. One
that applies gradients as they are made cannot skip: there all is copied to the host first, and back. The random
generators and the count that seeds rounding are put back; batches come from a feed of their own, and are a function of
their number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..config.run_config import RunConfig
from ..engine.device import read_memory, reset_peaks, synchronize
from ..engine.oom import Dice, release
from ..engine.optim.adamw import Optimizer, Scaler
from ..engine.prefetch import Feed
from ..nouns import Evaluation, MemoryReading, PhaseForecast
from .loop import Training, drop_gradients, learning_rate_at, train_step

MICRO_STEPS = 2  # of an iteration: the first makes the gradients, the second adds to them


class Peaks:
    """The most that each phase of a run was seen to hold."""

    def __init__(self, device: torch.device) -> None:
        self.of: dict[str, PhaseForecast] = {}
        self._device = str(device)

    def seen(self, phase: str, memory: MemoryReading) -> None:
        if memory.peak_reserved:  # zeros: the device does not count
            before = self.of.get(phase, PhaseForecast(0, 0))
            self.of[phase] = PhaseForecast(max(before.allocated, memory.peak_allocated),
                                           max(before.reserved, memory.peak_reserved))

    @property
    def most_allocated(self) -> int:
        return max((each.allocated for each in self.of.values()), default=0)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        reset_peaks(self._device)
        yield
        synchronize(self._device)
        self.seen(phase, read_memory(self._device))


def rehearse(training: Training, config: RunConfig, feed: Callable[[RunConfig], Feed],
             look: Callable[[], Evaluation | None], peaks: Peaks) -> None:
    """In the order that needs most: evaluation, two iterations, evaluation, what a checkpoint copies.

    `look` evaluates a few batches. If memory runs out on the way, nothing is left of that either.
    """
    micro_steps = min(config.gradient_accumulation_steps, MICRO_STEPS)
    short = replace(config, gradient_accumulation_steps=micro_steps, max_iters=1)
    batches = feed(short)
    try:
        with no_trace(training) as stand_in:
            _look(peaks, "first_eval", look)
            if not config.eval_only:
                for phase in ("first_train", "train"):
                    with peaks.during(phase):
                        train_step(stand_in, short, batches, learning_rate_at(0, config), lambda: False)
                _look(peaks, "eval", look)
                with peaks.during("save"):
                    largest(training.model.weight_tensors()).to("cpu", copy=True)
                    largest(training.optimizer.tensors()).to("cpu", copy=True)
    finally:
        batches.close()
    release(training.device)
    reset_peaks(str(training.device))


def _look(peaks: Peaks, phase: str, look: Callable[[], Evaluation | None]) -> None:
    """An evaluation resets the counters itself, and says what they were."""
    evaluation = look()
    if evaluation is not None:
        peaks.seen(phase, evaluation.memory)


def largest(tensors: dict[str, Tensor]) -> Tensor:
    """A save copies one tensor after another: the largest says what it needs."""
    return max(tensors.values(), key=lambda each: each.numel() * each.element_size())


@contextmanager
def no_trace(training: Training) -> Iterator[Training]:
    """A stand-in that computes with the training's own weights and optimizer, and whose steps change neither."""
    dice, optimizer, model = Dice(training.device), training.optimizer, training.model
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
        optimizer.put_back(before)
        dice.put_back()
