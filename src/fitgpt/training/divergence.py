"""Divergence: how it is detected, and the command that resumes from the last good checkpoint."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config.fields import shown
from ..config.run_config import RunConfig
from ..core.errors import NumericsError, SystemFault
from ..engine.oom import OutOfMemory
from ..runs.metrics import Evaluation, SplitLoss
from .checkpoint import DIVERGED, GOOD, UNKNOWN, SetAside

if TYPE_CHECKING:
    from .loop import Training

MANY_SKIPPED = 10  # in a row. In float16 a few are normal: the loss scale is halved until nothing overflows
MUCH_WORSE = 1.0   # nats. Exploding weights have a finite loss for a while


def checkpoint_status(training: Training) -> str:
    """The status of a checkpoint that is saved now."""
    if training.evaluation_status == DIVERGED or training.scaler.skipped_in_a_row.item():
        return DIVERGED
    return training.evaluation_status if training.evaluated_at == training.step else UNKNOWN


def judge(evaluation: Evaluation, last_good: SplitLoss | None, vocab_size: int) -> str:
    """GOOD or DIVERGED, by the training loss, which overfitting does not raise: it must be finite and not much above
    the last good one, or not much above chance if there was none over the same windows."""
    train, expected = evaluation.of("train"), math.log(vocab_size)
    if last_good and (last_good.block, last_good.windows) == (train.block, train.windows):
        expected = last_good.mean
    is_finite = all(math.isfinite(each.mean) for each in evaluation.losses)
    return GOOD if is_finite and train.mean <= expected + MUCH_WORSE else DIVERGED


class DivergenceCheck:
    """Warns when a run begins to diverge, and ends it when it has."""

    def __init__(self, training: Training, config: RunConfig, warn: Callable[[str], None],
                 set_aside: Callable[[], SetAside]) -> None:
        self._training, self._config, self._warn, self._set_aside = training, config, warn, set_aside
        self._is_skipping = False

    def evaluated(self, evaluation: Evaluation | OutOfMemory) -> None:
        training, before = self._training, self._training.evaluation_status
        if isinstance(evaluation, OutOfMemory):  # not evaluated: nothing new is known
            training.evaluation_status = DIVERGED if before == DIVERGED else UNKNOWN
            return
        training.evaluation_status = judge(evaluation, training.last_good, training.model.config.vocab_size)
        if training.evaluation_status == GOOD:
            training.last_good = evaluation.of("train")
        elif before != DIVERGED:
            self._warn(f"{self._bad_evaluation()} Checkpoints replace no earlier one until that changes.")

    def stepped(self, loss: float) -> None:
        """Called after a report, when the device is synchronized."""
        skipped, limit = self._skipped(), self._config.max_skipped_steps
        if skipped >= limit:
            raise self._diverged(f"{skipped} steps in a row had gradients that are not finite and were skipped; the "
                                 f"limit is max_skipped_steps = {limit}.")
        if not skipped and not math.isfinite(loss):  # nor are the weights now: step_in_backward cannot skip a step
            raise self._diverged(f"The loss of step {self._training.step - 1} is not finite.")
        is_skipping = skipped >= (MANY_SKIPPED if self._training.scaler.scaling else 1)
        if is_skipping and not self._is_skipping:
            steps = f"the last {skipped} steps were" if skipped > 1 else "the last step was"
            self._warn(f"Gradients are not finite: {steps} skipped. Checkpoints replace no earlier one until a step "
                       "succeeds.")
        self._is_skipping = is_skipping

    def ended(self) -> None:
        """Also detects divergence in a run that is too short for `max_skipped_steps`."""
        if (skipped := self._skipped()) >= MANY_SKIPPED:
            raise self._diverged(f"The last {skipped} steps had gradients that are not finite and were skipped.")
        if self._training.evaluation_status == DIVERGED:
            raise self._diverged(self._bad_evaluation())

    def _skipped(self) -> int:
        return int(self._training.scaler.skipped_in_a_row.item())

    def _bad_evaluation(self) -> str:
        good = self._training.last_good
        return (f"The loss of the evaluation at step {self._training.evaluated_at} is not finite or far above "
                f"{f'the last good one, {good.mean:.4f}' if good else 'chance'}.")

    def _diverged(self, why: str) -> NumericsError:
        """Sets aside the checkpoints after the last good one, so that a resume takes that one."""
        config = self._config
        try:
            good, moved, folder = self._set_aside()
        except SystemFault as fault:
            return NumericsError(f"{why} The run has diverged. {fault.what}", fault.fix)
        listed = f"step{'s' if len(moved) > 1 else ''} {', '.join(map(str, moved))}"
        where = f" What was saved at {listed} is now in {folder}." if moved else ""
        if good is None:
            other = ", or with --dtype=bfloat16 or float32" if config.dtype == "float16" else ""
            return NumericsError(f"{why} The run has diverged, and no checkpoint is known to be good.{where}",
                                 f"Start again with {' '.join(suggest_lower_lr(config, RunConfig()))}{other}")
        flags = suggest_lower_lr(config, RunConfig.from_dict(good.state["config"]))
        return NumericsError(
            f"{why} The run has diverged. Its last good checkpoint is of step {good.step}: {good.path}.{where}",
            shlex.join(["fitgpt", "train", "--resume", f"--out_dir={config.out_dir}", *flags]))


def suggest_lower_lr(config: RunConfig, usual: RunConfig) -> list[str]:
    """Flags that undo what makes steps larger than `usual`; if nothing does, a third of the learning rate. So following
    this advice repeatedly never repeats a setting."""
    larger = [name for name in ("learning_rate", "min_lr", "weight_decay")
              if getattr(config, name) > getattr(usual, name)]
    larger += ["decay_lr"] if usual.decay_lr and not config.decay_lr else []
    larger += ["grad_clip"] if usual.grad_clip and not config.step_in_backward and not (
        0 < config.grad_clip <= usual.grad_clip) else []
    return [f"--{name}={shown(getattr(usual, name))}" for name in larger] or [
        f"--learning_rate={config.learning_rate / 3:.2g}", f"--min_lr={config.min_lr / 3:.2g}"]
