"""The memory of the card that a run is on, as torch sees it: the run's plan there, smaller ones, what is free now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.run_config import RunConfig
from ..core.units import parse_bytes
from ..engine import oom
from ..engine.chunked_loss import triton_works
from ..engine.device import DeviceChoice
from ..engine.signs import may_spill
from ..hardware.host import spare_memory
from ..memory.setting import Setting
from ..nouns import MemoryPlan, Rung
from ..planning import budget, forecast
from ..planning.budget import Place, beside
from ..planning.fallback_ladder import ladder
from .memory_check import does_not_fit

NOT_PLANNED = "memory: not planned, because the run is not on an NVIDIA GPU."


@dataclass
class Onboard:
    """`plan` is None where there is none to make: on a CPU, on another vendor's GPU."""

    config: RunConfig
    device: str
    plan: MemoryPlan | None = None
    found: Place | None = None
    cap: int | None = None                  # of the allocator, where one was set
    rungs: Sequence[Rung] | None = None     # None: not forecast yet

    @property
    def card_bytes(self) -> int:
        return self.plan.budget.usable if self.plan else 0

    def ladder(self) -> Sequence[Rung]:
        if self.rungs is None:
            self.rungs = ladder(self.config, self.found.setting if self.found else Setting(),
                                host_bytes=spare_memory())
        return self.rungs

    def room(self) -> int | None:
        """What the allocator could hold in all, now, with as much left free as the user asked for."""
        free = oom.room(self.device)
        if free is None:
            return None
        free -= parse_bytes(self.config.leave) if self.config.leave else 0
        return free if self.cap is None else min(free, self.cap)


def board(config: RunConfig, choice: DeviceChoice, others: Mapping[str, int] | None = None,
          rungs: Sequence[Rung] | None = None) -> Onboard:
    """The plan of a run whose shape and precision are settled; DeviceError where it does not fit.

    `others`: what other processes held of each card, by uuid, before this one came. `rungs`: a ladder made before.
    """
    config = replace(config, compile=choice.compile)
    if not oom.is_nvidia(choice.device):
        return Onboard(config, choice.device, rungs=rungs)
    reading, multiprocessors = oom.card_reading(choice.device, others or {})
    here = budget.on_device(reading)
    setting = replace(here.setting, compiles=triton_works(), sms=multiprocessors)
    found = here._replace(setting=setting, budget=beside(config, here.budget))
    plan = forecast.plan(config, setting, found.budget)
    if not plan.fits and not config.eval_only:
        raise does_not_fit(config, found, plan, could_wait=False)
    # On Windows a run without a cap does not fail: it spills into the host's memory, and crawls.
    capped = bool(config.budget or config.leave or may_spill())
    onboard = Onboard(config, choice.device, plan, found, found.budget.reserve_limit if capped else None, rungs)
    if onboard.cap is not None:
        oom.cap_memory(choice.device, onboard.cap)
    return onboard
