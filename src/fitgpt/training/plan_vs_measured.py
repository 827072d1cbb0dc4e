"""Compares a run's forecast with its measured memory, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.units import show_bytes
from ..planning.forecast import Forecast, MemoryPlan
from ..planning.plan_file import FallbackPlan, fallback_plans_to_json, phases_to_json
from ..runs.metrics import PhaseMemory

TOLERANCE = 0.01  # relative: a phase that needs more than this above its forecast is reported


def phases_of(forecast: Forecast) -> dict[str, PhaseMemory]:
    """The phases that can be measured: an iteration includes its optimizer step; resume and sample are left out."""
    phases = {phase: peak for phase, peak in forecast.phases.items() if phase not in ("step", "resume", "sample")}
    if "step" in forecast.phases and "train" in phases:
        train, step = forecast.phases["train"], forecast.phases["step"]
        phases["train"] = PhaseMemory(max(train.allocated, step.allocated), max(train.reserved, step.reserved))
    return phases


def cumulative_reserved(measured: Mapping[str, PhaseMemory]) -> dict[str, PhaseMemory]:
    """Measured phases with `reserved` as in forecasts: the maximum since the start of the run."""
    most, found = 0, {}
    for phase in ("load", "first_eval", "first_train", "train", "eval", "save"):
        if phase in measured:
            most = max(most, measured[phase].reserved)
            found[phase] = PhaseMemory(measured[phase].allocated, most)
    return found


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
