"""The run that a message or a reading is about, as far as the user said which; and the card it was on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..config.run_config import RunConfig
from ..core.units import MiB
from ..hardware.gpus import Card, load
from ..memory.allocator import Timeline, replay
from ..memory.setting import Setting
from ..memory.tape import Tape
from ..nouns import Budget, Forecast, MemoryPlan
from ..planning.forecast import forecast, settled, tape_of

SAME_CARD = 0.004  # how far two prints of what CUDA gives of one model may differ: 24084 and 24217 MiB of a 4090


@dataclass(frozen=True)
class Run:
    """Whose memory is explained."""

    config: RunConfig
    trainer: str
    setting: Setting
    name: str = ""   # the words after `fitgpt train` that name it: a config file and flags
    guessed: bool = False  # whether `compile` is what the message tells, otherwise than usual, and was not said

    @property
    def expandable(self) -> bool:
        return self.setting.expands(self.trainer)

    @cached_property
    def settled(self) -> RunConfig:
        return settled(self.config, self.setting, self.trainer)

    @cached_property
    def tape(self) -> Tape:
        return tape_of(self.settled, self.setting, self.trainer)

    @cached_property
    def timeline(self) -> Timeline:
        return replay(self.tape, expandable=self.expandable)

    @cached_property
    def forecast(self) -> Forecast:
        return forecast(self.config, self.setting, self.trainer)

    def plan(self, budget: Budget) -> MemoryPlan:
        return MemoryPlan(self.forecast, budget)

    def fits_without_pieces(self, limit: int) -> bool:
        """Whether expandable segments, which this run has not, would be enough."""
        return not self.expandable and replay(self.tape, limit, expandable=True).failed is None

    @property
    def state_bytes(self) -> int:
        """Weights, their gradients and AdamW's moments, in float32: what no smaller batch makes smaller."""
        return 16 * self.settled.gpt_config().count_params()


def card_with(usable: int) -> Card | None:
    """The one model of which CUDA gives so many bytes; None where none or several do."""
    near = [card for card in load() if card.usable_mib and abs(card.usable_mib * MiB / usable - 1) <= SAME_CARD]
    return near[0] if len({card.name for card in near}) == 1 else None
