"""Out of memory in a step: free everything, retry the same step, then retry it with a smaller fallback plan.

First retry unchanged: another process may have freed memory, and empty_cache() has removed fragmentation. Then search
for the fastest plan that fits what is free now, as measured: the kernels are loaded by then. A retried step is the same
step: its samples do not depend on how it is split into micro-batches, dropout is seeded by the micro-batch's number,
and the RNG state is restored. Only dropout's masks differ if the micro-batches do.

No step is applied twice or half. Until the optimizer's step begins nothing has changed, and the gradients are computed
again. AdamW's step allocates nothing: its state exists from the start, its kernel works in place, and so do the
counters of the loss scale (float16's need a few scalars, in blocks that the gradient norm has just freed). Optimizers
that do allocate (Muon, low-precision states without Triton) or that apply gradients in the backward pass may be left
half done: then the training rolls back to its last checkpoint, or to its start. If that happens again before a new
checkpoint, the same plan would never get further: the next smaller one is taken at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from ..config.run_config import RunConfig
from ..core.errors import CheckpointError, DeviceError
from ..core.units import MiB, show_bytes
from ..data.dataset import Dataset
from ..engine.batches import Prefetcher, training_batches
from ..engine.device import DeviceChoice
from ..engine.oom import OutOfMemory, RngState, attempt, fragmentation_hint, release
from ..engine.optim.adamw import make_optimizer
from ..engine.optim.grad_scaler import FIRST_SCALE
from ..planning.plan_file import FallbackPlan
from ..runs.folder import RunFolder, holds_run
from .build import find_source, reinitialise, set_up_gradients, start_from
from .checkpoint import UNKNOWN
from .device_memory import DeviceMemoryPlan
from .loop import RolledBack, StepResult, Training, train_step
from .reporter import TrainingReporter
from .trained_model import from_run

STABLE_STEPS = 10  # after this many steps a new OOM is a new case, and the same plan is retried once more
CHECK_EVERY = 50   # steps between two checks whether a larger plan fits again
MARGIN = 1.05      # a larger plan is taken again when this times its needs is free
SLACK = 32 * MiB   # of what is free, left for kernels that only the next plan loads
LESS = 0.98        # of what the plan that ran out of memory needs: the next one needs at most this

Result = TypeVar("Result")


class Guard:
    """Takes a run's steps, and changes how the run computes when it is out of memory."""

    def __init__(self, training: Training, config: RunConfig, choice: DeviceChoice, dataset: Dataset,
                 folder: RunFolder, reporter: TrainingReporter, device_memory: DeviceMemoryPlan) -> None:
        self._training, self._requested, self._choice, self._dataset = training, config, choice, dataset
        self._folder, self._reporter, self._memory = folder, reporter, device_memory
        self.config = config                  # of the next attempt
        self._adopted: RunConfig = config     # as the training computes now
        self._must_adopt = False
        self._plan = self._as_requested()     # of `config`
        self._feed = self.batches(config)
        self._oom_step: int | None = None     # the step of the last OOM
        self._rolled_back_to: int | None = None  # the step of the checkpoint it rolled back to last
        self._next_check = 0                  # the step of the next check for room

    def close(self) -> None:
        self._feed.close()

    def batches(self, config: RunConfig) -> Prefetcher:
        return training_batches(config, self._dataset, self._training.device, self._training.ranks.rank)

    def take(self, learning_rate: float,
             stop_requested: Callable[[], bool]) -> StepResult | RolledBack | DeviceError | None:
        """One step. None: a stop was requested. DeviceError: even the smallest plan is out of memory."""
        self._step_up()
        return self.protected(lambda: train_step(self._training, self.config, self._feed, learning_rate,
                                                 stop_requested, self._reporter.advanced))

    def protected(self, work: Callable[[], Result]) -> Result | RolledBack | DeviceError:
        """Does the work; retries it, with less memory each time, until it succeeds or no fallback plan is left."""
        def adopt_and_work() -> Result:
            if self._must_adopt:
                self._adopt()
            return work()

        while True:
            rng_state = RngState(self._training.device)
            done, self._training.half_done = self._training.ranks.agreed(
                attempt(adopt_and_work), half_done=self._training.half_done)
            if not isinstance(done, OutOfMemory):
                return done
            rng_state.restore()
            outcome = self._recover(done)
            if outcome is not None:
                return outcome

    # ---- recovery

    def _recover(self, oom: OutOfMemory) -> RolledBack | DeviceError | None:
        """None: retry now."""
        training, step = self._training, self._training.step
        half_done = training.half_done
        no_progress = half_done and self._rolled_back_to == training.saved_at
        self._free_all()
        retry_unchanged = not no_progress and (self._oom_step is None or not 0 <= step - self._oom_step < STABLE_STEPS)
        self._oom_step = step
        row = {"kind": "oom", "step": step, "phase": "step" if half_done else "train", "words": oom.message}
        if retry_unchanged:
            retry = "" if half_done else "; retrying the same step"
            row["text"] = (f"Out of memory in step {step}: {oom.short}. Memory is freed{retry}."
                           f"{fragmentation_hint(oom.message)}")
        self._reporter.tell(row)
        if half_done:
            self._roll_back()
            self._rolled_back_to = training.saved_at
            self._reporter.tell({"kind": "went_back", "start_step": training.step,
                                  "text": f"The optimizer step was incomplete: rolled back to step {training.step}."})
        if not retry_unchanged:
            room = self._least(self._memory.room())
            smaller = self._smaller_plan(room)
            if smaller is None:
                figures = (f" The smallest plan needs {show_bytes(self._plan.needs)}, and {show_bytes(room)} is free."
                           if room is not None and self._memory.needs is not None else "")
                return DeviceError(f"Out of memory in step {training.step}, and there is no smaller fallback plan: "
                                   f"{oom.short}.{figures}")
            self._change_plan(smaller, "step_down", f"Out of memory again: {oom.short}")
        return RolledBack() if half_done else None

    def fit_free_memory(self) -> None:
        """Before the first step: takes a smaller plan if less memory is free than was planned with."""
        room = self._least(self._memory.expected_room())
        if room is not None and room < (self._training.ranks.broadcast_object(self._memory.needs) or 0):
            smaller = self._smaller_plan(room)
            if smaller is not None:
                self._free_all()
                self._change_plan(smaller, "step_down", f"Only {show_bytes(room)} is free for the run")

    def _smaller_plan(self, room: int | None) -> FallbackPlan | None:
        """The fastest plan that fits what is free now; else the next one of the ladder that does, or the last one; None
        if there is none that needs less than the present one."""
        def smaller() -> FallbackPlan | None:
            if room is not None:
                found = self._memory.fastest_within(min(room - SLACK, int(LESS * self._plan.needs)))
                if found is not None:
                    return found
            plans = [each for each in self._memory.ladder() if each.needs < self._plan.needs]
            return next((each for each in plans if room is None or each.needs <= room), plans[-1] if plans else None)

        return self._from_first(smaller)

    def _free_all(self) -> None:
        self._training.half_done = False
        self._training.drop_cuda_graphs()
        self._must_adopt = True
        release(self._training.device)

    # ---- changing the plan

    def _as_requested(self) -> FallbackPlan:
        """The plan as requested, which needs more than any other if it is not known how much."""
        return FallbackPlan({}, self._memory.needs or sys.maxsize, "the plan as requested")

    def _least(self, room: int | None) -> int | None:
        """The room of the rank that has least; None: not known."""
        return min((each for each in self._training.ranks.all_gather_object(room) if each is not None), default=None)

    def _from_first(self, choose: Callable[[], FallbackPlan | None]) -> FallbackPlan | None:
        """What rank 0 chooses, for all ranks: which plans there are depends on the CPU RAM that is free."""
        ranks = self._training.ranks
        chosen = ranks.broadcast_object(choose() if ranks.is_first else None)
        return FallbackPlan(*chosen) if chosen else None

    def _change_plan(self, plan: FallbackPlan, kind: str, why: str) -> None:
        before, self._plan = self.config, plan
        self.config = replace(self._requested, **plan.changes)
        if (before.batch_size, before.gradient_accumulation_steps) != (
                self.config.batch_size, self.config.gradient_accumulation_steps):
            self._feed.close()
            self._feed = self.batches(self.config)
        self._must_adopt = True
        self._next_check = self._training.step + CHECK_EVERY
        needing = f" (needs {show_bytes(plan.needs)})" if self._memory.room() is not None else ""
        other_masks = self.config.dropout > 0 and before.batch_size != self.config.batch_size
        same = "same data, other dropout masks" if other_masks else "same steps, same data"
        self._reporter.tell({"kind": kind, "step": self._training.step, "changes": plan.changes,
                             "needs_bytes": plan.needs,
                             "text": f"{why}. Continuing with {plan.why}{needing}: {same}."})

    def _step_up(self) -> None:
        """Takes a larger plan again if there is room for it."""
        if not self._requested.step_up or not self._plan.changes or self._training.step < self._next_check:
            return
        self._next_check = self._training.step + CHECK_EVERY
        room = self._least(self._memory.room())

        def larger() -> FallbackPlan | None:
            plans = (self._as_requested(), *self._memory.ladder())
            return next((plan for plan in plans if room is not None and self._plan.needs < plan.needs
                         and plan.needs * MARGIN <= room), None)

        plan = self._from_first(larger)
        if plan is not None and room is not None:
            self._free_all()
            self._change_plan(plan, "step_up", f"{show_bytes(room)} is free again")

    # ---- what a change does to the training

    def _adopt(self) -> None:
        """Makes the training compute as the config says. May be called again if it was out of memory itself."""
        training, config = self._training, self.config
        training.drop_cuda_graphs()
        training.model.recompute_policies, training.model.loss_chunk = list(config.policies), config.loss_chunk
        if config.offload != self._adopted.offload:
            moved = make_optimizer(config, training.model)
            wrong = moved.load_tensors(training.optimizer.tensors())
            if wrong:
                raise CheckpointError(f"The optimizer's state cannot be moved to offload={config.offload}: "
                                      f"{', '.join(wrong[:5])} {'and others ' if len(wrong) > 5 else ''}do not match.",
                                      "Resume without this --plan.")
            training.optimizer = moved
            release(training.device)
        self._adopted = config
        self._reporter.eval_batch = min(self._reporter.eval_batch, config.eval_batch)
        set_up_gradients(training, config, self._choice)
        self._must_adopt = False

    def _roll_back(self) -> None:
        """Restores the last checkpoint, or the start of the run."""
        training = self._training
        saved = training.ranks.broadcast_object(holds_run(self._folder.path))
        has_state = saved or self._requested.init_from == "resume"
        source = None
        if training.ranks.is_first:
            source = from_run(self._folder.path) if saved else find_source(self._requested, self._folder)
        if self._adopted.offload != "none":  # it may have copied only some of the gradients
            training.optimizer = make_optimizer(self._adopted, training.model)
        if source is None:
            reinitialise(training, self._requested)
        start_from(training, source, everything=has_state)
        if not has_state:
            zeros = {name: torch.zeros_like(each, device="cpu")  # except master weights, which follow the weights
                     for name, each in training.optimizer.tensors().items() if not name.endswith(".master")}
            training.optimizer.load_tensors(zeros)
            training.scaler.load_dict(dict(scale=FIRST_SCALE, good_steps=0.0, skipped=0.0, skipped_in_a_row=0.0))
            training.step, training.evaluated_at, training.saved_at, training.best = 0, -1, -1, None
            training.evaluation_status, training.last_good = UNKNOWN, None
