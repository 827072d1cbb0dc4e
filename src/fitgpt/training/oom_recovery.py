"""What happens when memory runs out in a step: all is let go of, and the same step is taken again, then in less.

First as it was: what others took may be free again, and what lay between blocks is. Then down the ladder, to the first
smaller plan that fits what is free now. A step's samples are the same however it is split, dropout's dice are seeded by
the micro-batch's number, and the random generators are put back, so a step that is taken again is the same step; only
dropout's masks are others where its micro-batches are.

No step is applied twice or half. Until the optimizer's own step begins nothing has changed, and the gradients are
simply made again. From there on AdamW's step allocates nothing: its state is there from the start, its kernel works in
place, and so do the counters of the loss scale (float16's make a few scalars, into blocks that the gradients' norm has
just freed). Optimizers that do allocate on the way (Muon, rounded states without Triton) or that apply gradients as
they are made may be left half done: then the training goes back to its last checkpoint, or to its beginning. If that
happens again before a new checkpoint, the same plan would never get beyond it: the next smaller one is taken at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from ..config.run_config import RunConfig
from ..core.errors import DeviceError
from ..core.units import show_bytes
from ..engine.oom import Dice, Refusal, attempt, release
from ..engine.prefetch import Feed
from ..engine.signs import in_pieces
from ..nouns import Rung
from .loop import Rim, Taken, Training, WentBack, train_step

SETTLED = 10     # steps after which a new refusal is a new story, and the same plan is tried once more
LOOK_EVERY = 50  # steps between two looks whether there is room to step up again
TO_SPARE = 1.05  # of what a larger plan needs must be there before it is taken up again

Result = TypeVar("Result")


class Ways(Protocol):
    """How a run is made to compute otherwise; run.py knows."""

    needs: int | None  # of the plan as it was asked for

    def ladder(self) -> Sequence[Rung]: ...
    def adopt(self, config: RunConfig) -> None:
        """Makes the training compute as the config says. May be called again after it ran out of memory itself."""
    def feed(self, config: RunConfig) -> Feed: ...
    def go_back(self) -> None:
        """Brings the training to its last consistent state."""
    def room(self) -> int | None:
        """What the allocator could hold in all now; None: nobody says."""


class Guard:
    """Takes a run's steps. `step_up`: larger plans may be taken up again when there is room."""

    def __init__(self, training: Training, config: RunConfig, ways: Ways, rim: Rim, *, step_up: bool = False) -> None:
        self._training, self._asked, self._ways, self._rim = training, config, ways, rim
        self._may_rise = step_up
        self.config = config                  # as it computes now
        self._place = -1                      # on the ladder; -1: as asked
        self._feed = ways.feed(config)
        self._adopted = True
        self._refused_at: int | None = None   # the step
        self._back_at: int | None = None      # the checkpoint it went back to last, by its step
        self._look_again_at = 0

    def close(self) -> None:
        self._feed.close()

    def take(self, learning_rate: float, stop_asked: Callable[[], bool]) -> Taken | WentBack | DeviceError | None:
        self._rise()
        return self.protected(lambda: train_step(self._training, self.config, self._feed, learning_rate, stop_asked,
                                                 self._rim.advanced))

    def protected(self, work: Callable[[], Result]) -> Result | WentBack | DeviceError:
        """Does the work, again and in less memory until there is enough of it."""
        def adopt_and_work() -> Result:
            if not self._adopted:
                self._ways.adopt(self.config)
                self._adopted = True
            return work()

        while True:
            dice = Dice(self._training.device)
            done = attempt(adopt_and_work)
            if not isinstance(done, Refusal):
                return done
            dice.put_back()
            outcome = self._recover(done)
            if outcome is not None:
                return outcome

    # ---- when it ran out

    def _recover(self, refusal: Refusal) -> WentBack | DeviceError | None:
        training, step = self._training, self._training.step
        half_done = training.half_done
        no_headway = half_done and self._back_at == training.saved_at
        self._let_go()
        new_story = not no_headway and (self._refused_at is None or not 0 <= step - self._refused_at < SETTLED)
        self._refused_at = step
        self._rim.tell({"kind": "oom", "step": step, "phase": "step" if half_done else "train",
                        "words": refusal.words, **({"text": self._told(refusal, half_done)} if new_story else {})})
        if half_done:
            self._ways.go_back()
            self._back_at = training.saved_at
            self._rim.tell({"kind": "went_back", "start_step": training.step,
                            "text": f"The training goes back to step {training.step}, where it was whole."})
        if not new_story and not self._descend(refusal):
            return self._no_way_down(refusal)
        return WentBack() if half_done else None

    def _let_go(self) -> None:
        self._training.half_done = False
        self._training.forget_recorded_work()
        self._adopted = False
        release(self._training.device)

    def _told(self, refusal: Refusal, half_done: bool) -> str:
        again = "" if half_done else ", and the same step is taken again"
        return f"Memory ran out in step {self._refused_at}: {refusal.short}. All is let go of{again}." \
               f"{in_pieces(refusal.words)}"

    def _descend(self, refusal: Refusal) -> bool:
        """To the first rung that fits what is free now, or the last; False where there is none below."""
        rungs, room = self._ways.ladder(), self._ways.room()
        below = range(self._place + 1, len(rungs))
        if not below:
            return False
        place = next((place for place in below if room is None or rungs[place].needs <= room), below[-1])
        self._go_to(place, "step_down", f"Memory ran out again: {refusal.short}")
        return True

    def _no_way_down(self, refusal: Refusal) -> DeviceError:
        room = self._ways.room()
        least = min((rung.needs for rung in self._ways.ladder()), default=self._ways.needs)
        figures = (f" The smallest plan needs {show_bytes(least)}, and {show_bytes(room)} could be had."
                   if room is not None and least is not None else "")
        return DeviceError(f"Memory ran out in step {self._training.step}, and there is no smaller plan to go on with: "
                           f"{refusal.short}.{figures}")

    # ---- up and down

    def _go_to(self, place: int, kind: str, why: str) -> None:
        before, rungs = self.config, self._ways.ladder()
        self._place = place
        changes = rungs[place].changes if place >= 0 else {}
        needs = rungs[place].needs if place >= 0 else self._ways.needs
        self.config = replace(self._asked, **changes)
        if (before.batch_size, before.gradient_accumulation_steps) != (
                self.config.batch_size, self.config.gradient_accumulation_steps):
            self._feed.close()
            self._feed = self._ways.feed(self.config)
        self._adopted = False
        self._look_again_at = self._training.step + LOOK_EVERY
        how = rungs[place].why if place >= 0 else "the plan as it was asked for"
        needing = f" (needs {show_bytes(needs)})" if needs is not None and self._ways.room() is not None else ""
        other_masks = self.config.dropout > 0 and before.batch_size != self.config.batch_size
        same = "steps of the same data" if other_masks else "the same steps, on the same data"
        self._rim.tell({"kind": kind, "step": self._training.step, "changes": changes, "needs_bytes": needs,
                        "text": f"{why}. Going on with {how}{needing}: {same}."})

    def _rise(self) -> None:
        if not self._may_rise or self._place < 0 or self._training.step < self._look_again_at:
            return
        self._look_again_at = self._training.step + LOOK_EVERY
        room, rungs = self._ways.room(), self._ways.ladder()
        needs = {-1: self._ways.needs, **{place: rung.needs for place, rung in enumerate(rungs)}}
        for place in range(-1, self._place):
            needed = needs[place]
            if room is not None and needed is not None and needed * TO_SPARE <= room:
                self._let_go()
                self._go_to(place, "step_up", f"{show_bytes(room)} could be had again")
                return
