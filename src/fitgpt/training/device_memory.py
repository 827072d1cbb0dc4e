"""In the worker: the run's memory plan on its device as torch sees it, its fallback plans, and what is free now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.run_config import RunConfig
from ..core.units import parse_bytes
from ..engine import oom
from ..engine.device import DeviceChoice, triton_works
from ..hardware.host import spare_memory
from ..memory.platform import Platform
from ..planning import budget
from ..planning.budget import Target, apply_limits
from ..planning.fallback_ladder import fallback_plans
from ..planning.forecast import MemoryPlan
from ..planning.plan import plan_for
from ..planning.plan_file import FallbackPlan
from .memory_check import does_not_fit

NOT_PLANNED = "memory: not planned, because the run is not on an NVIDIA GPU."


@dataclass
class DeviceMemoryPlan:
    """`plan` is None on a CPU and on another vendor's GPU."""

    config: RunConfig
    device: str
    plan: MemoryPlan | None = None
    target: Target | None = None
    cap: int | None = None                           # limit of the allocator, if one was set
    fallbacks: Sequence[FallbackPlan] | None = None  # None: not forecast yet

    @property
    def card_bytes(self) -> int:
        return self.plan.budget.usable if self.plan else 0

    def ladder(self) -> Sequence[FallbackPlan]:
        """The fallback plans, forecast when they are first needed."""
        if self.fallbacks is None:
            self.fallbacks = fallback_plans(self.config, self.target.platform if self.target else Platform(),
                                    host_bytes=spare_memory())
        return self.fallbacks

    def room(self) -> int | None:
        """Bytes that the allocator could reserve in all now, with --leave left free; None: not known."""
        free = oom.room(self.device)
        if free is None:
            return None
        free -= parse_bytes(self.config.leave) if self.config.leave else 0
        return free if self.cap is None else min(free, self.cap)


def plan_on_device(config: RunConfig, choice: DeviceChoice, others: Mapping[str, int] | None = None,
          fallbacks: Sequence[FallbackPlan] | None = None) -> DeviceMemoryPlan:
    """The plan of a run whose shape and dtype are resolved; DeviceError if it does not fit.

    `others`: bytes that others used of each GPU, by uuid, before this process started. `fallbacks`: from a plan.json.
    """
    config = replace(config, compile=choice.compile)
    if not oom.is_nvidia(choice.device):
        return DeviceMemoryPlan(config, choice.device, fallbacks=fallbacks)
    reading, multiprocessors = oom.card_reading(choice.device, others or {})
    here = budget.on_device(reading)
    platform = replace(here.platform, compiles=triton_works(), sms=multiprocessors)
    target = here._replace(platform=platform, budget=apply_limits(config, here.budget))
    plan = plan_for(config, target)
    if not plan.fits and not config.eval_only:
        raise does_not_fit(config, plan, could_wait=False)
    # On Windows a run without a limit does not fail: the driver spills into CPU RAM, which is many times slower.
    is_capped = bool(config.budget or config.leave or oom.may_spill())
    cap = target.budget.reserve_limit if is_capped else None
    if cap is not None:
        oom.cap_memory(choice.device, cap)
    return DeviceMemoryPlan(config, choice.device, plan, target, cap, fallbacks)
