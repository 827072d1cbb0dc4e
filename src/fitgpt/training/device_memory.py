"""In the worker: the run's memory plan on its device as torch sees it, its fallback plans, what is free now, and the
plan compared with the measured memory, phase by phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config.run_config import RunConfig
from ..core.units import parse_bytes, show_bytes
from ..engine import oom
from ..engine.device import DeviceChoice, read_memory, reset_peaks, synchronize, triton_works
from ..hardware.host import spare_memory
from ..memory.platform import Platform
from ..planning import budget, fallback_ladder
from ..planning.budget import Target, apply_limits
from ..planning.fallback_ladder import fallback_plans
from ..planning.forecast import Forecast, MemoryPlan
from ..planning.plan import plan_for
from ..planning.plan_file import FallbackPlan, fallback_plans_to_json, phases_to_json
from ..runs.metrics import PhaseMemory, PhasePeaks
from .memory_check import does_not_fit

TOLERANCE = 0.01  # relative: a phase that needs more than this above its forecast is reported


@dataclass
class DeviceMemoryPlan:
    """`plan` is None on a CPU and on another vendor's GPU."""

    config: RunConfig
    device: str
    plan: MemoryPlan | None = None
    target: Target | None = None
    cap: int | None = None                           # limit of the allocator, if one was set
    fallbacks: Sequence[FallbackPlan] | None = None  # None: not forecast yet
    planned: bool = False                            # whether they come from a plan.json: then there are no others
    others: int | None = None                        # bytes that others used before this process started

    @property
    def needs(self) -> int | None:
        """Bytes that the plan as requested needs to reserve; None: not planned."""
        return self.plan.forecast.needs if self.plan else None

    def ladder(self) -> Sequence[FallbackPlan]:
        """The fallback plans, forecast when they are first needed."""
        if self.fallbacks is None:
            self.fallbacks = fallback_plans(self.config, self.target.platform if self.target else Platform(),
                                            host_bytes=self._spare())
        return self.fallbacks

    def fastest_within(self, room: int) -> FallbackPlan | None:
        """The fastest smaller plan that needs at most `room` bytes; None if there is none, or a plan.json has them."""
        if self.target is None or self.planned:
            return None
        return fallback_ladder.fastest_within(self.config, self.target.platform, self.target.card, room,
                                              host_bytes=self._spare())

    def _spare(self) -> int | None:
        """This rank's share of the CPU RAM that is free; None: not known."""
        spare = spare_memory()
        return None if spare is None else spare // self.config.ranks

    def outside(self) -> int | None:
        """Bytes of this process outside the allocator, as far as its kernels are loaded by now; what others have taken
        since it started counts too. None: not known."""
        if self.others is None or self.plan is None or (free := oom.room(self.device)) is None:
            return None
        return self.plan.budget.usable - self.others - free

    def expected_room(self) -> int | None:
        """What `room` will be once all kernels are loaded; None: not known."""
        room, outside = self.room(), self.outside()
        if room is None or outside is None or self.plan is None or self.cap is not None:
            return room
        return room - max(self.plan.budget.outside - max(outside, 0), 0)  # below 0: others have freed some

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
        return DeviceMemoryPlan(config, choice.device, fallbacks=fallbacks, planned=fallbacks is not None)
    reading, multiprocessors = oom.gpu_reading(choice.device, others or {})
    here = budget.on_device(reading)
    platform = replace(here.platform, compiles=triton_works(), sms=multiprocessors)
    target = here._replace(platform=platform, budget=apply_limits(config, here.budget))
    plan = plan_for(config, target)
    if plan.headroom < 0 and not config.eval_only:
        raise does_not_fit(config, plan, could_wait=False)
    # On Windows a run without a limit does not fail: the driver spills into CPU RAM, which is many times slower.
    is_capped = bool(config.budget or config.leave or oom.may_spill())
    cap = plan.budget.reserve_limit if is_capped else None
    if cap is not None:
        oom.cap_memory(choice.device, cap)
    return DeviceMemoryPlan(config, choice.device, plan, target, cap, fallbacks, fallbacks is not None,
                            here.budget.others)


# ---- measured memory

class Peaks(PhasePeaks):
    """PhasePeaks that can also measure on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = str(device)

    @property
    def most_allocated(self) -> int:
        return max((each.allocated for each in self.of.values()), default=0)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        reset_peaks(self._device)
        yield
        synchronize(self._device)
        self.seen(phase, read_memory(self._device))


def phases_of(forecast: Forecast) -> dict[str, PhaseMemory]:
    """The phases that can be measured: an iteration includes its optimizer step; resume and sample are left out."""
    phases = {phase: peak for phase, peak in forecast.phases.items() if phase not in ("step", "resume", "sample")}
    if "step" in forecast.phases and "train" in phases:
        train, step = forecast.phases["train"], forecast.phases["step"]
        phases["train"] = PhaseMemory(max(train.allocated, step.allocated), max(train.reserved, step.reserved))
    return phases


def over_forecast(forecast: Mapping[str, PhaseMemory], measured: Mapping[str, PhaseMemory]) -> list[str]:
    """A sentence per phase that used more memory than forecast."""
    found = []
    for phase in (phase for phase in measured if phase in forecast):
        for kind in ("allocated", "reserved"):
            expected, seen = getattr(forecast[phase], kind), getattr(measured[phase], kind)
            if seen > expected * (1 + TOLERANCE):
                found.append(f"{phase}: {show_bytes(seen)} {kind}, forecast {show_bytes(expected)}: "
                             f"{seen / expected - 1:.1%} more.")
    return found


def plan_row(plan: MemoryPlan, fallbacks: Sequence[FallbackPlan]) -> dict[str, Any]:
    """The plan as a row of metrics.jsonl."""
    return {"kind": "plan", "needs_bytes": plan.forecast.needs, "reserve_limit_bytes": plan.budget.reserve_limit,
            "phases": phases_to_json(phases_of(plan.forecast)), "peak_phase": plan.forecast.peak_phase,
            "owners_at_peak": [share._asdict() for share in plan.forecast.owners_at_peak],
            "ladder": fallback_plans_to_json(fallbacks)}
