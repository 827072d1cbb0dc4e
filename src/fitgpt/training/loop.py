"""The training loop, as you would tell it: evaluate when it is time, keep what is worth keeping, take a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.run_config import RunConfig
from ..core.errors import DeviceError, Interrupted, SystemFault
from ..engine.cuda_graphs import Recorder
from ..engine.device import read_memory, synchronize
from ..engine.model import GPT
from ..engine.oom import Refusal, attempt, release
from ..engine.optim.adamw import Optimizer, Scaler, apply_gradients
from ..engine.prefetch import Feed
from ..nouns import Evaluation, RunFacts, SplitLoss, StepReport
from .checkpoint import GOOD, UNKNOWN, SetAside
from .divergence import DivergenceCheck, judge
from .meter import Meter, flops_a_token

SAVES_THAT_MAY_FAIL = 3  # in a row, before a run stops rather than go on unsaved


@dataclass
class Training:
    """All that training changes. A checkpoint holds exactly this, and a resume restores it."""

    model: GPT
    optimizer: Optimizer
    scaler: Scaler
    step: int = 0                         # steps completed
    best: SplitLoss | None = None         # the best validation loss so far, and the block it was taken at
    evaluated_at: int = -1                # the step of the last evaluation …
    evaluation_status: str = UNKNOWN      # … and what it says of the weights: see divergence.py
    last_good: SplitLoss | None = None    # the training loss of the last evaluation that was good
    saved_at: int = -1                    # the step of the last checkpoint

    def __post_init__(self) -> None:
        self.accumulate: Callable[..., Tensor] = self.model.accumulate
        self.token_losses: Callable[[Tensor, Tensor], Tensor] = self.model.token_losses
        self.gradients_stay = False
        self.half_done = False  # the optimizer has begun to change the weights, and is not through

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def keep_gradients(self) -> None:
        """Zeroed after each step instead of freed: what is recorded knows their places."""
        self.gradients_stay = True
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def record_gpu_work(self, warn: Callable[[str], None], *, trains: bool = True) -> None:
        """From the second micro-step and evaluation batch on, what the card does is replayed: see graphs.py. Where
        nothing trains there are no gradients to have a place."""
        recorder = Recorder(warn)
        self.accumulate = recorder.replaying(self.model.accumulate)
        self.token_losses = recorder.replaying(self.model.token_losses)
        if trains:
            self.keep_gradients()

    def forget_recorded_work(self) -> None:
        """Lets go of recordings, of their pool of memory and of all gradients."""
        self.accumulate, self.token_losses = self.model.accumulate, self.model.token_losses
        self.gradients_stay = False
        drop_gradients(self)


@dataclass(frozen=True)
class WentBack:
    """No step was taken: the training is where it was last known to be whole."""


Taken = tuple[Tensor, Tensor]  # a step's mean loss and gradient norm, still on the device


class Steps(Protocol):
    """Who takes the steps: guard.py."""

    def take(self, learning_rate: float, stop_asked: Callable[[], bool]) -> Taken | WentBack | DeviceError | None:
        """None: a stop was asked for. DeviceError: there is no memory for a step, however small."""


class Rim(Protocol):
    """What the loop asks of the world around it: to look, to keep, to tell."""

    def evaluate(self, step: int) -> Evaluation | Refusal | None: ...
    def save(self, training: Training, *, is_best: bool) -> None: ...
    def set_aside_diverged(self) -> SetAside: ...
    def advanced(self, steps: float) -> None:
        """So many steps are handed to the device, whole ones and the share of one: called at every micro-step."""
    def reported(self, report: StepReport) -> None: ...
    def evaluated(self, evaluation: Evaluation, *, is_best: bool) -> None: ...
    def warn(self, sentence: str) -> None: ...
    def tell(self, row: dict[str, Any]) -> None:
        """Something happened: a row for the record, its `text` for the user."""


def train(training: Training, config: RunConfig, facts: RunFacts, steps: Steps, rim: Rim,
          stop_asked: Callable[[], bool]) -> None:
    """Trains to `max_iters` steps, or until asked to stop: then it saves, and raises Interrupted."""
    meter = Meter(config.tokens_per_step, lambda: synchronize(str(training.device)))
    keep = _Keeper(training, rim, meter, keeps=not config.eval_only)
    divergence = DivergenceCheck(training, config, rim.warn, rim.set_aside_diverged)
    while True:
        if is_evaluation_due(training, config):
            with meter.paused():
                evaluation = rim.evaluate(training.step)
            if evaluation is None:
                raise keep.stopped()
            training.evaluated_at, is_best = training.step, False
            if not isinstance(evaluation, Refusal):
                is_good = judge(evaluation, training.last_good, training.model.config.vocab_size) == GOOD
                is_best = is_good and improves(training.best, evaluation.of("val"))
                training.best = evaluation.of("val") if is_best else training.best
                rim.evaluated(evaluation, is_best=is_best)
            divergence.evaluated(evaluation)
            if training.step > 0 and (is_best or config.always_save_checkpoint):
                keep.save(is_best=is_best, forgiving=training.step < config.max_iters)
        elif config.save_interval and training.step % config.save_interval == 0:
            keep.save()
        if config.eval_only:
            break
        if training.step >= config.max_iters:
            divergence.ended()
            break

        learning_rate = learning_rate_at(training.step, config)
        result = steps.take(learning_rate, stop_asked)
        if result is None:
            raise keep.stopped()
        if isinstance(result, WentBack):
            continue
        if isinstance(result, DeviceError):
            keep.save(forgiving=False)
            raise DeviceError(f"{result.what} What was trained is saved.", result.fix)
        training.step += 1
        meter.stepped()
        if (training.step - 1) % config.log_interval == 0 or training.step == config.max_iters:
            report = make_report(training, config, facts, meter, result, learning_rate)
            rim.reported(report)
            divergence.stepped(report.loss)
        if stop_asked():
            raise keep.stopped()


def train_step(training: Training, config: RunConfig, feed: Feed, learning_rate: float,
               stop_asked: Callable[[], bool], advanced: Callable[[float], None] = lambda steps: None) -> Taken | None:
    """One optimizer step over all its micro-batches: (mean loss, gradient norm), still on the device.

    None if a stop was asked for: the unfinished step is dropped, as if it had never begun.
    """
    model, scaler, pieces = training.model, training.scaler, config.gradient_accumulation_steps
    training.half_done = isinstance(training.optimizer.sink, Optimizer)  # it applies gradients as they are made
    training.optimizer.begin(learning_rate)
    model.renew_copies()
    sink = [training.optimizer.sink] if training.optimizer.sink else []
    scale = scaler.scale / pieces
    loss_sum = torch.zeros((), device=scale.device)
    for micro in range(pieces):
        number = training.step * pieces + micro
        if config.dropout:
            seed_dropout(config.seed, number)
        inputs, targets = feed.get(number)
        loss_sum += training.accumulate(inputs, targets, scale, *sink)
        advanced(training.step + (micro + 1) / pieces)
        if micro + 1 < pieces and stop_asked():
            drop_gradients(training)
            return None
    mean_loss = loss_sum / scaler.scale
    norm = apply_gradients(model, _Noted(training), scaler, learning_rate, config.grad_clip,
                           stay=training.gradients_stay)
    training.half_done = False
    return mean_loss, norm


class _Noted(Optimizer):
    """The training's optimizer. Its step is noted as begun: what fails before has changed nothing yet."""

    def __init__(self, training: Training) -> None:
        self._training, self.sink = training, training.optimizer.sink

    def step(self, learning_rate: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._training.half_done = True
        self._training.optimizer.step(learning_rate, grad_scale, found_inf)


def drop_gradients(training: Training) -> None:
    training.model.zero_grad(set_to_none=not training.gradients_stay)
    if training.optimizer.sink:
        training.optimizer.sink.clear()


def seed_dropout(seed: int, micro_batch: int) -> None:
    """Dropout's masks are a function of the micro-batch's number: a resumed or repeated step draws the same."""
    torch.manual_seed((seed * 2**40 + micro_batch) % 2**63)


def learning_rate_at(step: int, config: RunConfig) -> float:
    """Linear warm-up, cosine decay, then the floor: nanoGPT's schedule."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step > config.lr_decay_iters:
        return config.min_lr
    progress = (step - config.warmup_iters) / max(config.lr_decay_iters - config.warmup_iters, 1)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)


def is_evaluation_due(training: Training, config: RunConfig) -> bool:
    """Every eval_interval steps and at the end, but never twice at one step (a resume begins where it saved)."""
    due = training.step % config.eval_interval == 0 or training.step >= config.max_iters
    return config.eval_only or (due and training.evaluated_at != training.step)


def improves(best: SplitLoss | None, new: SplitLoss) -> bool:
    """Losses over other windows, or other blocks, do not compare: after such a change the first is the best."""
    if not math.isfinite(new.mean):
        return False
    comparable = best is not None and (best.block, best.windows or new.windows) == (new.block, new.windows)
    return best is None or not comparable or new.mean < best.mean


def make_report(training: Training, config: RunConfig, facts: RunFacts, meter: Meter,
                result: tuple[Tensor, Tensor], learning_rate: float) -> StepReport:
    """Reads the step's figures off the device: the only place where the host waits for it."""
    loss, norm = (figure.item() for figure in result)
    seconds, tokens_per_s = meter.lap()
    flops = flops_a_token(training.model.config, config.block_size)
    return StepReport(
        step=training.step - 1, loss=loss, lr=learning_rate, grad_norm=norm, seconds=seconds,
        tokens_per_s=tokens_per_s, mfu=tokens_per_s * flops / facts.peak_flops if facts.peak_flops else None,
        skipped=int(training.scaler.skipped.item()), loss_scale=training.scaler.scale.item(),
        memory=read_memory(facts.device), seconds_left=meter.time_left(config.max_iters - training.step))


class _Keeper:
    """Saves, and forgives a failed save until there have been too many: older checkpoints stay as they are."""

    def __init__(self, training: Training, rim: Rim, meter: Meter, *, keeps: bool = True) -> None:
        self._training, self._rim, self._meter = training, rim, meter
        self._keeps = keeps  # a run that only evaluates has nothing of its own to save
        self._failures = 0

    def stopped(self) -> Interrupted:
        """The run's end on request: everything up to the last whole step is kept."""
        self.save(forgiving=False)
        kept = "; the run is saved" if self._keeps else ""
        return Interrupted(f"Stopped at step {self._training.step}, as asked{kept}.")

    def save(self, *, is_best: bool = False, forgiving: bool = True) -> None:
        if not self._keeps or self._training.saved_at == self._training.step:
            return
        try:
            with self._meter.paused():
                self._save(is_best)
        except SystemFault as fault:
            self._failures += 1
            if not forgiving or self._failures >= SAVES_THAT_MAY_FAIL:
                raise
            self._rim.warn(f"The checkpoint of step {self._training.step} could not be saved ({fault.what}). "
                           "Training goes on and tries again at the next interval.")
        else:
            self._failures = 0
            self._training.saved_at = self._training.step

    def _save(self, is_best: bool) -> None:
        """A save asks the card for nothing; the host's memory may run out, and be there a moment later."""
        def save() -> None:
            self._rim.save(self._training, is_best=is_best)

        if isinstance(attempt(save), Refusal):
            release(self._training.device)
            refused = attempt(save)
            if isinstance(refused, Refusal):
                raise SystemFault(f"memory ran out: {refused.words}")
