"""A run that diverges: how it is noticed, and the command that resumes it from its last good checkpoint."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import RunConfig
from ..errors import NumericsError
from ..knobs import shown
from ..nouns import Evaluation, SplitLoss
from .checkpoint import DIVERGED, GOOD, UNKNOWN, SetAside
from .oom import Refusal

if TYPE_CHECKING:
    from .loop import Training

WARN_AFTER = 10   # skipped steps in a row in float16: some are usual, until the loss scale is low enough
MUCH_WORSE = 1.0  # above the best loss: weights that explode have a finite loss for a while
# What decides how far a step goes, as far as it may change on a resume.
STEP_SETTINGS = ("learning_rate", "min_lr", "decay_lr", "warmup_iters", "lr_decay_iters", "grad_clip", "weight_decay")


def checkpoint_status(training: Training) -> str:
    """Of a checkpoint that is saved now."""
    if training.evaluation_status == DIVERGED or training.scaler.skipped_in_a_row.item():
        return DIVERGED
    return training.evaluation_status if training.evaluated_at == training.step else UNKNOWN


def evaluation_status(evaluation: Evaluation, best: SplitLoss | None) -> str:
    """What an evaluation says of the weights."""
    if not all(math.isfinite(each.mean) for each in evaluation.losses):
        return DIVERGED
    return GOOD if best is None or evaluation.of("val").mean <= best.mean + MUCH_WORSE else UNKNOWN


class DivergenceCheck:
    """Warns when a run begins to diverge, and ends it when it has."""

    def __init__(self, training: Training, config: RunConfig, warn: Callable[[str], None],
                 set_aside: Callable[[], SetAside]) -> None:
        self._training, self._config, self._warn, self._set_aside = training, config, warn, set_aside
        self._is_skipping = False

    def evaluated(self, evaluation: Evaluation | Refusal) -> None:
        training, before = self._training, self._training.evaluation_status
        if isinstance(evaluation, Refusal):  # nothing new is known
            training.evaluation_status = DIVERGED if before == DIVERGED else UNKNOWN
            return
        training.evaluation_status = evaluation_status(evaluation, training.best)
        if training.evaluation_status == DIVERGED != before:
            self._warn(f"The loss of the evaluation at step {training.step} is not finite. Checkpoints replace no "
                       "earlier one until it is finite again.")

    def stepped(self) -> None:
        """Reads from the device: called where the host waits for it anyway."""
        skipped, limit = self._skipped(), self._config.max_skipped_steps
        if skipped >= limit:
            raise self._diverged(f"{skipped} steps in a row had gradients that are not finite and were skipped; the "
                                 f"limit is max_skipped_steps = {limit}.")
        is_skipping = skipped >= (WARN_AFTER if self._training.scaler.scaling else 1)
        if is_skipping and not self._is_skipping:
            self._warn(f"Gradients are not finite: {skipped} step{'s' if skipped > 1 else ''} in a row skipped. "
                       "Checkpoints replace no earlier one until a step succeeds.")
        self._is_skipping = is_skipping

    def ended(self) -> None:
        """A run too short for `max_skipped_steps` has diverged, too, if this is how it ends."""
        if (skipped := self._skipped()) >= WARN_AFTER:
            raise self._diverged(f"The last {skipped} steps had gradients that are not finite and were skipped.")
        if self._training.evaluation_status == DIVERGED:
            raise self._diverged(f"The loss of the last evaluation, at step {self._training.evaluated_at}, is not "
                                 "finite.")

    def _skipped(self) -> int:
        return int(self._training.scaler.skipped_in_a_row.item())

    def _diverged(self, why: str) -> NumericsError:
        """Sets the checkpoints after the last good one aside, so that a resume takes that one."""
        config, (good, moved, folder) = self._config, self._set_aside()
        where = f" Those of steps {', '.join(map(str, moved))} are now in {folder}." if moved else ""
        if good is None:
            return NumericsError(f"{why} The run has diverged, and there is no good checkpoint.{where}",
                                 f"Start again with {' '.join(smaller_steps(config))}")
        before = RunConfig.from_dict(good.state["config"])
        changed = [f"--{name}={shown(getattr(before, name))}" for name in STEP_SETTINGS
                   if getattr(before, name) != getattr(config, name)]  # it trained well with those
        return NumericsError(
            f"{why} The run has diverged. Its last good checkpoint is of step {good.step}: {good.path}.{where}",
            shlex.join(["fitgpt", "train", "--init_from=resume", f"--out_dir={config.out_dir}",
                        *(changed or smaller_steps(config))]))


def smaller_steps(config: RunConfig) -> list[str]:
    """A third of the learning rate, and no more than is usual; the rest only where it is a likely cause."""
    rates = {"learning_rate": config.learning_rate, "min_lr": config.min_lr}
    flags = [f"--{name}={min(rate / 3, getattr(RunConfig, name)):.1g}" for name, rate in rates.items()]
    if config.grad_clip == 0 and not config.step_in_backward:
        flags.append(f"--grad_clip={RunConfig.grad_clip}")
    if config.learning_rate * config.weight_decay >= 1:  # a step multiplies weights by 1 - this
        flags.append(f"--weight_decay={RunConfig.weight_decay}")
    return flags
