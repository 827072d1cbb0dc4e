"""The training loop: evaluate when it is due, save what is worth saving, take a step, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config.architectures import GPTConfig
from ..config.run_config import RunConfig
from ..core.errors import DeviceError, Interrupted, SystemFault
from ..engine.batches import Prefetcher
from ..engine.cuda_graphs import GraphCapturer
from ..engine.device import read_memory, synchronize
from ..engine.model import GPT
from ..engine.oom import OutOfMemory, attempt, release
from ..engine.optim.adamw import Optimizer
from ..engine.optim.grad_scaler import Scaler, apply_gradients
from ..engine.ranks import ALONE, Ranks
from ..runs.metrics import MemoryReading, RunFacts, SplitLoss, StepReport
from .checkpoint import GOOD, UNKNOWN
from .divergence import DivergenceCheck, judge

if TYPE_CHECKING:
    from .oom_recovery import Guard
    from .reporter import TrainingReporter

MAX_FAILED_SAVES = 3   # in a row …
FAILED_SAVES_S = 60.0  # … and for so long; then the run stops rather than train on unsaved


@dataclass
class Training:
    """Everything that training changes. A checkpoint stores exactly this, and a resume restores it."""

    model: GPT
    optimizer: Optimizer
    scaler: Scaler
    step: int = 0                         # steps completed
    best: SplitLoss | None = None         # the best validation loss so far, with its block size and windows
    evaluated_at: int = -1                # the step of the last evaluation …
    evaluation_status: str = UNKNOWN      # … and whether the weights were good: see divergence.py
    last_good: SplitLoss | None = None    # the training loss of the last good evaluation
    saved_at: int = -1                    # the step of the last checkpoint

    def __post_init__(self) -> None:
        self.accumulate: Callable[..., Tensor] = self.model.accumulate
        self.token_losses: Callable[[Tensor, Tensor], Tensor] = self.model.token_losses
        self.gradients_stay = False  # zeroed after a step instead of freed
        self.half_done = False       # the optimizer has begun to change the weights and has not finished
        self.ranks: Ranks = ALONE    # the processes that train together

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def gradients(self) -> list[Tensor]:
        """The gradients accumulated so far, on the GPU or where the optimizer keeps them."""
        sink = self.optimizer.sink
        return sink.gradients() if sink else [p.grad for p in self.model.parameters() if p.grad is not None]

    def keep_gradients(self) -> None:
        """Allocates gradients that are zeroed after each step instead of freed: CUDA graphs need fixed addresses."""
        self.gradients_stay = True
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def use_cuda_graphs(self, warn: Callable[[str], None], *, trains: bool = True) -> None:
        """Captures the second micro-step and evaluation batch as CUDA graphs and replays them from then on. Without
        `trains` no gradients are allocated."""
        capturer = GraphCapturer(warn)
        self.accumulate = capturer.replaying(self.model.accumulate)
        self.token_losses = capturer.replaying(self.model.token_losses)
        if trains:
            self.keep_gradients()

    def drop_cuda_graphs(self) -> None:
        """Frees captured CUDA graphs, their memory pool and all gradients; from now on steps run eagerly."""
        self.accumulate, self.token_losses = self.model.accumulate, self.model.token_losses
        self.gradients_stay = False
        drop_gradients(self)


@dataclass(frozen=True)
class RolledBack:
    """No step was taken: the training is back at its last checkpoint, or at its start."""


StepResult = tuple[Tensor, Tensor]  # a step's mean loss and gradient norm, on the device


def train(training: Training, config: RunConfig, facts: RunFacts, steps: Guard, callbacks: TrainingReporter,
          stop_requested: Callable[[], bool]) -> None:
    """Trains up to `max_iters` steps. On a stop request it saves and raises Interrupted."""
    meter = Meter(config.tokens_per_step, lambda: synchronize(str(training.device)))
    saver = CheckpointSaver(training, callbacks, meter, enabled=not config.eval_only)
    divergence = DivergenceCheck(training, config, callbacks.warn, callbacks.set_aside_diverged)
    while True:
        if is_evaluation_due(training, config):
            with meter.paused():
                evaluation = callbacks.evaluate()
            if evaluation is None:
                raise saver.stopped()
            training.evaluated_at, is_best = training.step, False
            if not isinstance(evaluation, OutOfMemory):
                is_good = judge(evaluation, training.last_good, training.model.config.vocab_size) == GOOD
                is_best = is_good and improves(training.best, evaluation.of("val"))
                training.best = evaluation.of("val") if is_best else training.best
                callbacks.evaluated(evaluation, is_best=is_best)
            divergence.evaluated(evaluation)
            if training.step > 0 and (is_best or config.always_save_checkpoint):
                saver.save(is_best=is_best, may_fail=training.step < config.max_iters)
        elif config.save_interval and training.step % config.save_interval == 0:
            saver.save()
        if config.eval_only:
            break
        if training.step >= config.max_iters:
            divergence.ended()
            break

        learning_rate = learning_rate_at(training.step, config)
        result = steps.take(learning_rate, stop_requested)
        if result is None:
            raise saver.stopped()
        if isinstance(result, RolledBack):
            continue
        if isinstance(result, DeviceError):
            saver.save(may_fail=False)
            raise DeviceError(f"{result.what} The run is saved.", result.fix)
        training.step += 1
        meter.stepped()
        if (training.step - 1) % config.log_interval == 0 or training.step == config.max_iters:
            report = make_report(training, config, facts, meter, result, learning_rate)
            callbacks.reported(report)
            divergence.stepped(report.loss)
        del result  # on the GPU: kept, these scalars would move the small tensors of the next step
        if training.ranks.must_stop():
            raise saver.stopped()


def train_step(training: Training, config: RunConfig, feed: Prefetcher, learning_rate: float,
               stop_requested: Callable[[], bool],
               advanced: Callable[[float], None] = lambda steps: None) -> StepResult | None:
    """One optimizer step over all its micro-batches → (mean loss, gradient norm), on the device. Of several ranks each
    computes its share: the loss is that share's part of the mean, the norm that of the whole step.

    None if a stop was requested: the unfinished step is dropped and changes nothing.
    """
    model, scaler, accumulation = training.model, training.scaler, config.gradient_accumulation_steps
    ranks, stopped = training.ranks, False
    training.half_done = isinstance(training.optimizer.sink, Optimizer)  # it applies each gradient at once
    training.optimizer.begin(learning_rate)
    model.refresh_casts()
    sink = [training.optimizer.sink] if training.optimizer.sink else []
    scale = scaler.scale / accumulation
    loss_sum = torch.zeros((), device=scale.device)
    for micro in range(config.micro_batches):
        if config.dropout:  # by the number over all ranks: the masks do not depend on how many there are
            seed_dropout(config.seed, training.step * accumulation + micro * ranks.world + ranks.rank)
        batch = feed.get(training.step * config.micro_batches + micro, stop_requested)
        if batch is None:
            stopped = True
            break
        loss_sum += training.accumulate(*batch, scale, *sink)
        advanced(training.step + (micro + 1) / config.micro_batches)
        if micro + 1 < config.micro_batches and stop_requested():
            stopped = True
            break
    mean_loss = loss_sum / scaler.scale
    if not ranks.agree(stop=stopped):
        drop_gradients(training)
        return None
    ranks.all_reduce(training.gradients())

    def step_begins() -> None:
        training.half_done = True

    norm = apply_gradients(model, training.optimizer, scaler, learning_rate, config.grad_clip,
                           stay=training.gradients_stay, begins=step_begins)
    training.half_done = False
    return mean_loss, norm


def drop_gradients(training: Training) -> None:
    training.model.zero_grad(set_to_none=not training.gradients_stay)
    if training.optimizer.sink:
        training.optimizer.sink.clear()


def seed_dropout(seed: int, micro_batch: int) -> None:
    """Seeds the RNG by the micro-batch's number, so that a resumed or retried step draws the same dropout masks."""
    torch.manual_seed((seed * 2**40 + micro_batch) % 2**63)


def learning_rate_at(step: int, config: RunConfig) -> float:
    """Linear warm-up, cosine decay, then `min_lr`: nanoGPT's schedule."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step > config.lr_decay_iters:
        return config.min_lr
    progress = (step - config.warmup_iters) / max(config.lr_decay_iters - config.warmup_iters, 1)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)


def is_evaluation_due(training: Training, config: RunConfig) -> bool:
    """Every eval_interval steps and at the end, but not twice at one step (a resume starts where it saved)."""
    due = training.step % config.eval_interval == 0 or training.step >= config.max_iters
    return config.eval_only or (due and training.evaluated_at != training.step)


def improves(best: SplitLoss | None, new: SplitLoss) -> bool:
    """Whether `new` is the best loss. Losses over different windows or block sizes are not comparable: after such a
    change the first one counts as best."""
    if not math.isfinite(new.mean):
        return False
    comparable = best is not None and (best.block, best.windows or new.windows) == (new.block, new.windows)
    return best is None or not comparable or new.mean < best.mean


def make_report(training: Training, config: RunConfig, facts: RunFacts, meter: Meter,
                result: tuple[Tensor, Tensor], learning_rate: float) -> StepReport:
    """Reads the step's loss and norm from the device: the only place where the CPU waits for it."""
    loss, norm = (value.item() for value in result)
    of_ranks = training.ranks.all_gather_object((loss, astuple(memory := read_memory(facts.device))))
    loss = sum(part for part, _ in of_ranks)
    seconds, tokens_per_s = meter.lap()
    flops = flops_per_token(training.model.config, config.block_size)
    return StepReport(
        step=training.step - 1, loss=loss, lr=learning_rate, grad_norm=norm, seconds=seconds,
        tokens_per_s=tokens_per_s, mfu=tokens_per_s * flops / facts.peak_flops if facts.peak_flops else None,
        skipped=int(training.scaler.skipped.item()), loss_scale=training.scaler.scale.item(),
        memory=memory, seconds_left=meter.time_left(config.max_iters - training.step),
        rank_memory=tuple(MemoryReading(*read) for _, read in of_ranks) if len(of_ranks) > 1 else ())


class CheckpointSaver:
    """Saves checkpoints. A failed save is only reported, until MAX_FAILED_SAVES fail in a row and for FAILED_SAVES_S:
    older checkpoints are still there, and a disk may be full for a moment. `enabled`: False for a run that only
    evaluates, which has nothing to save."""

    def __init__(self, training: Training, callbacks: TrainingReporter, meter: Meter, *, enabled: bool = True) -> None:
        self._training, self._callbacks, self._meter, self._enabled = training, callbacks, meter, enabled
        self._failures, self._failing_since = 0, 0.0

    def stopped(self) -> Interrupted:
        """Saves after a stop request and returns the error that ends the run."""
        self.save(may_fail=False)
        saved = "; the run is saved" if self._enabled else ""
        return Interrupted(f"Stopped at step {self._training.step}, as requested{saved}.")

    def save(self, *, is_best: bool = False, may_fail: bool = True) -> None:
        if not self._enabled or self._training.saved_at == self._training.step:
            return
        self._save(is_best, may_fail)
        self._training.saved_at = self._training.ranks.broadcast_object(self._training.saved_at)

    def _save(self, is_best: bool, may_fail: bool) -> None:
        try:
            with self._meter.paused():
                for can_retry in (True, False):  # CPU RAM: others may free some. A save allocates no GPU memory.
                    failed = attempt(lambda: self._callbacks.save(is_best=is_best))
                    if not isinstance(failed, OutOfMemory):
                        break
                    if not can_retry:
                        raise SystemFault(f"out of memory: {failed.message}")
                    release(self._training.device)
        except SystemFault as fault:
            if not self._failures:
                self._failing_since = time.monotonic()
            self._failures += 1
            is_lasting = time.monotonic() - self._failing_since >= FAILED_SAVES_S
            if not may_fail or (self._failures >= MAX_FAILED_SAVES and is_lasting):
                raise
            self._callbacks.warn(f"The checkpoint of step {self._training.step} could not be saved ({fault.what}). "
                                 "Training continues and tries again at the next interval.")
        else:
            self._failures = 0
            self._training.saved_at = self._training.step


# ---- speed

def flops_per_token(config: GPTConfig, block: int) -> int:
    """FLOPs of forward and backward, counted as in PaLM's appendix B and in nanoGPT: 6 per weight, plus attention."""
    return 6 * config.count_params(positions=False) + 12 * config.n_layer * config.n_embd * block


class Meter:
    """Time per step and tokens per second since the last report, without evaluations and saves.

    `synchronize` waits until the device has finished all queued work.
    """

    def __init__(self, tokens_per_step: int, synchronize: Callable[[], None]) -> None:
        self._tokens_per_step, self._synchronize = tokens_per_step, synchronize
        self._steps = 0
        self._since = time.perf_counter()
        self._paused = 0.0
        self._smoothed = 0.0

    def stepped(self) -> None:
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes what happens inside. Kernels run asynchronously, so it synchronizes at both ends: steps still queued
        count as training, and work queued inside does not."""
        self._synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._paused += time.perf_counter() - started

    def lap(self) -> tuple[float, float]:
        """(seconds per step, tokens per second) since the last lap. Call it when the device is synchronized."""
        now = time.perf_counter()
        seconds = max(now - self._since - self._paused, 1e-9) / max(self._steps, 1)
        self._since, self._paused, self._steps = now, 0.0, 0
        self._smoothed = seconds if not self._smoothed else 0.8 * self._smoothed + 0.2 * seconds
        return seconds, self._tokens_per_step / seconds

    def time_left(self, steps: int) -> float:
        """Seconds for this many steps, from a smoothed step time: one slow step (a suspended laptop) hardly counts."""
        return self._smoothed * steps
