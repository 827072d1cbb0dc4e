"""The rehearsal: everything a run does with memory, done once before its first step, at full size; and the peak of each
phase.

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

import torch
from torch import Tensor

from ..config.run_config import RunConfig
from ..engine.device import read_memory, reset_peaks, synchronize
from ..engine.oom import RngState, release
from ..engine.optim.adamw import Optimizer, Scaler
from ..engine.prefetch import Prefetcher
from ..runs.metrics import Evaluation, MemoryReading, PhaseMemory
from .loop import Training, drop_gradients, learning_rate_at, train_step

MICRO_STEPS = 2  # per iteration: the first allocates the gradients, the second adds to them


class Peaks:
    """The measured peak of each phase of a run."""

    def __init__(self, device: torch.device) -> None:
        self.of: dict[str, PhaseMemory] = {}
        self._device = str(device)

    def seen(self, phase: str, memory: MemoryReading) -> None:
        if memory.peak_reserved:  # 0: the device has no counters
            before = self.of.get(phase, PhaseMemory(0, 0))
            self.of[phase] = PhaseMemory(max(before.allocated, memory.peak_allocated),
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


def rehearse(training: Training, config: RunConfig, feed: Callable[[RunConfig], Prefetcher],
             short_eval: Callable[[], Evaluation | None], peaks: Peaks) -> None:
    """Evaluation, two iterations, evaluation, a checkpoint's copies: the order that needs most. Fills `peaks`.

    `short_eval` evaluates a few batches. Nothing is left over if it runs out of memory either.
    """
    micro_steps = min(config.gradient_accumulation_steps, MICRO_STEPS)
    short = replace(config, gradient_accumulation_steps=micro_steps, max_iters=1)
    batches = feed(short)
    try:
        with without_side_effects(training) as stand_in:
            _evaluate(peaks, "first_eval", short_eval)
            if not config.eval_only:
                for phase in ("first_train", "train"):
                    with peaks.during(phase):
                        train_step(stand_in, short, batches, learning_rate_at(0, config), lambda: False)
                _evaluate(peaks, "eval", short_eval)
                with peaks.during("save"):
                    largest(training.model.weight_tensors()).to("cpu", copy=True)
                    largest(training.optimizer.tensors()).to("cpu", copy=True)
    finally:
        batches.close()
    release(training.device)
    reset_peaks(str(training.device))


def _evaluate(peaks: Peaks, phase: str, short_eval: Callable[[], Evaluation | None]) -> None:
    """An evaluation resets the peak counters itself and returns what they were."""
    evaluation = short_eval()
    if evaluation is not None:
        peaks.seen(phase, evaluation.memory)


def largest(tensors: dict[str, Tensor]) -> Tensor:
    """A save copies one tensor after another, so the largest one decides what it needs."""
    return max(tensors.values(), key=lambda each: each.numel() * each.element_size())


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
