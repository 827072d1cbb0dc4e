"""Out of memory in a step: free everything, retry the same step, then retry it with a smaller fallback plan.

First retry unchanged: another process may have freed memory, and empty_cache() has removed fragmentation. Then take the
first fallback plan that fits what is free now. A retried step is the same step: its samples do not depend on how it is
split into micro-batches, dropout is seeded by the micro-batch's number, and the RNG state is restored. Only dropout's
masks differ if the micro-batches do.

No step is applied twice or half. Until the optimizer's step begins nothing has changed, and the gradients are computed
again. AdamW's step allocates nothing: its state exists from the start, its kernel works in place, and so do the
counters of the loss scale (float16's need a few scalars, in blocks that the gradient norm has just freed). Optimizers
that do allocate (Muon, low-precision states without Triton) or that apply gradients in the backward pass may be left
half done: then the training rolls back to its last checkpoint, or to its start. If that happens again before a new
checkpoint, the same plan would never get further: the next smaller one is taken at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from ..config.run_config import RunConfig
from ..core.errors import DeviceError
from ..core.units import show_bytes
from ..engine.batches import Prefetcher
from ..engine.oom import OutOfMemory, RngState, attempt, fragmentation_hint, release
from ..planning.plan_file import FallbackPlan
from .loop import RolledBack, StepResult, Training, TrainingCallbacks, train_step

STABLE_STEPS = 10  # after so many steps a new OOM is a new case, and the same plan is retried once more
CHECK_EVERY = 50   # steps between two checks whether a larger plan fits again
MARGIN = 1.05      # a larger plan is taken again when this times its needs is free

Result = TypeVar("Result")


class Reconfigurer(Protocol):
    """Changes how a run computes: run.RunReconfigurer."""

    needs: int | None  # bytes, of the plan as requested

    def ladder(self) -> Sequence[FallbackPlan]: ...
    def adopt(self, config: RunConfig) -> None:
        """Makes the training compute as the config says. May be called again if it was out of memory itself."""
    def feed(self, config: RunConfig) -> Prefetcher: ...
    def roll_back(self) -> None:
        """Restores the last checkpoint, or the start of the run."""
    def room(self) -> int | None:
        """Bytes that the allocator could reserve in all now; None: not known."""


class Guard:
    """Takes a run's steps. `step_up`: larger plans may be taken again when there is room."""

    def __init__(self, training: Training, config: RunConfig, reconfigurer: Reconfigurer,
                 callbacks: TrainingCallbacks, *, step_up: bool = False) -> None:
        self._training, self._requested, self._callbacks = training, config, callbacks
        self._reconfigurer = reconfigurer
        self._may_step_up = step_up
        self.config = config                  # as it computes now
        self._position = -1                   # on the fallback ladder; -1: as requested
        self._feed = reconfigurer.feed(config)
        self._adopted = True
        self._oom_step: int | None = None     # the step of the last OOM
        self._rolled_back_to: int | None = None  # the step of the checkpoint it rolled back to last
        self._next_check = 0                  # the step of the next check for room

    def close(self) -> None:
        self._feed.close()

    def take(self, learning_rate: float,
             stop_requested: Callable[[], bool]) -> StepResult | RolledBack | DeviceError | None:
        self._step_up()
        return self.protected(lambda: train_step(self._training, self.config, self._feed, learning_rate,
                                                 stop_requested, self._callbacks.advanced))

    def protected(self, work: Callable[[], Result]) -> Result | RolledBack | DeviceError:
        """Does the work; retries it, with less memory each time, until it succeeds or no fallback plan is left."""
        def adopt_and_work() -> Result:
            if not self._adopted:
                self._reconfigurer.adopt(self.config)
                self._adopted = True
            return work()

        while True:
            rng_state = RngState(self._training.device)
            done = attempt(adopt_and_work)
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
        self._callbacks.tell({"kind": "oom", "step": step, "phase": "step" if half_done else "train",
                              "words": oom.message,
                              **({"text": self._describe(oom, half_done)} if retry_unchanged else {})})
        if half_done:
            self._reconfigurer.roll_back()
            self._rolled_back_to = training.saved_at
            self._callbacks.tell({"kind": "went_back", "start_step": training.step,
                                  "text": f"The optimizer step was incomplete: rolled back to step {training.step}."})
        if not retry_unchanged and not self._step_down(oom):
            return self._no_smaller_plan(oom)
        return RolledBack() if half_done else None

    def _free_all(self) -> None:
        self._training.half_done = False
        self._training.drop_cuda_graphs()
        self._adopted = False
        release(self._training.device)

    def _describe(self, oom: OutOfMemory, half_done: bool) -> str:
        retry = "" if half_done else "; retrying the same step"
        return f"Out of memory in step {self._oom_step}: {oom.short}. Memory is freed{retry}." \
               f"{fragmentation_hint(oom.message)}"

    def _step_down(self, oom: OutOfMemory) -> bool:
        """Takes the first smaller plan that fits what is free now, else the last; False if there is none."""
        ladder, room = self._reconfigurer.ladder(), self._reconfigurer.room()
        smaller = range(self._position + 1, len(ladder))
        if not smaller:
            return False
        position = next((each for each in smaller if room is None or ladder[each].needs <= room), smaller[-1])
        self._change_plan(position, "step_down", f"Out of memory again: {oom.short}")
        return True

    def _no_smaller_plan(self, oom: OutOfMemory) -> DeviceError:
        room = self._reconfigurer.room()
        least = min((each.needs for each in self._reconfigurer.ladder()), default=self._reconfigurer.needs)
        figures = (f" The smallest plan needs {show_bytes(least)}, and {show_bytes(room)} is free."
                   if room is not None and least is not None else "")
        return DeviceError(f"Out of memory in step {self._training.step}, and there is no smaller fallback plan: "
                           f"{oom.short}.{figures}")

    # ---- changing the plan

    def _change_plan(self, position: int, kind: str, why: str) -> None:
        before, ladder = self.config, self._reconfigurer.ladder()
        self._position = position
        changes = ladder[position].changes if position >= 0 else {}
        needs = ladder[position].needs if position >= 0 else self._reconfigurer.needs
        self.config = replace(self._requested, **changes)
        if (before.batch_size, before.gradient_accumulation_steps) != (
                self.config.batch_size, self.config.gradient_accumulation_steps):
            self._feed.close()
            self._feed = self._reconfigurer.feed(self.config)
        self._adopted = False
        self._next_check = self._training.step + CHECK_EVERY
        how = ladder[position].why if position >= 0 else "the plan as requested"
        needing = f" (needs {show_bytes(needs)})" if needs is not None and self._reconfigurer.room() is not None else ""
        other_masks = self.config.dropout > 0 and before.batch_size != self.config.batch_size
        same = "same data, other dropout masks" if other_masks else "same steps, same data"
        self._callbacks.tell({"kind": kind, "step": self._training.step, "changes": changes, "needs_bytes": needs,
                              "text": f"{why}. Continuing with {how}{needing}: {same}."})

    def _step_up(self) -> None:
        """Takes a larger plan again if there is room for it."""
        if not self._may_step_up or self._position < 0 or self._training.step < self._next_check:
            return
        self._next_check = self._training.step + CHECK_EVERY
        room, ladder = self._reconfigurer.room(), self._reconfigurer.ladder()
        needs = {-1: self._reconfigurer.needs, **{position: each.needs for position, each in enumerate(ladder)}}
        for position in range(-1, self._position):
            needed = needs[position]
            if room is not None and needed is not None and needed * MARGIN <= room:
                self._free_all()
                self._change_plan(position, "step_up", f"{show_bytes(room)} is free again")
                return
