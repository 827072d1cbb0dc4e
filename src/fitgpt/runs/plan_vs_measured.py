"""What was foreseen of a run's memory beside what was measured, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.units import show_bytes
from ..nouns import Forecast, MemoryPlan, PhaseForecast, Rung
from ..planning.plan_file import in_bytes, in_rows

TOO_FAR = 0.01  # of a forecast: a phase that holds more by so much was not foreseen


def phases_of(planned: Forecast) -> dict[str, PhaseForecast]:
    """As they can be measured: an iteration ends with its optimizer's step, and a run neither resumes nor samples."""
    phases = {phase: held for phase, held in planned.phases.items() if phase not in ("step", "resume", "sample")}
    if "step" in planned.phases and "train" in phases:
        train, step = planned.phases["train"], planned.phases["step"]
        phases["train"] = PhaseForecast(max(train.allocated, step.allocated), max(train.reserved, step.reserved))
    return phases


def since_the_start(measured: Mapping[str, PhaseForecast]) -> dict[str, PhaseForecast]:
    """Reserved as forecasts mean it: the most since the run began."""
    most, found = 0, {}
    for phase in ("load", "first_eval", "first_train", "train", "eval", "save"):
        if phase in measured:
            most = max(most, measured[phase].reserved)
            found[phase] = PhaseForecast(measured[phase].allocated, most)
    return found


def exceeding(planned: Mapping[str, PhaseForecast], measured: Mapping[str, PhaseForecast]) -> list[str]:
    """A sentence for each phase that held more than was foreseen."""
    found = []
    for phase, held in measured.items():
        for kind in ("allocated", "reserved"):
            foreseen, seen = (getattr(each, kind) for each in (planned.get(phase, PhaseForecast(0, 0)), held))
            if phase in planned and seen > foreseen * (1 + TOO_FAR):
                found.append(f"{phase}: {show_bytes(seen)} {kind} where {show_bytes(foreseen)} were foreseen, "
                             f"{seen / foreseen - 1:.1%} more.")
    return found


def plan_row(plan: MemoryPlan, rungs: Sequence[Rung]) -> dict[str, Any]:
    """As metrics.jsonl has it."""
    return {"kind": "plan", "needs_bytes": plan.forecast.needs, "reserve_limit_bytes": plan.budget.reserve_limit,
            "phases": in_bytes(phases_of(plan.forecast)), "peak_phase": plan.forecast.peak_phase,
            "owners_at_peak": [share._asdict() for share in plan.forecast.owners_at_peak],
            "ladder": in_rows(rungs)}
