"""A plan, a config or a run folder → Diagnosis: does it fit, what dominates its memory, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.fields import option_specs
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import show_bytes, show_count
from ..hardware.gpus import find, match_device
from ..planning import budget as budgets
from ..planning.forecast import MemoryPlan, OwnerShare
from ..planning.plan import plan_for
from ..planning.plan_file import PLAN_AGAIN, check_schema, plan_from
from ..planning.request import with_data
from ..planning.verdict import Verdict
from ..runs.folder import recorded_config
from ..runs.metrics import (
    PHASES,
    Row,
    facts_from,
    last_row,
    measured_peaks,
    owners_from,
    phases_from,
    read_metrics,
    whole,
)
from .case import ExplainedRun, ExplainRequest
from .diagnose import Diagnosis, MemoryShare, remedies_for

# ---- from the user's input


def explain_document(document: dict[str, Any], request: ExplainRequest) -> Diagnosis | None:
    """JSON of `plan --json`, or the plan file of a run, which contains its config; None if it is neither."""
    plan, values, planned = plan_from(document), document.get("config"), None
    if {"trainer", "phases", "needs_bytes"} <= document.keys():
        check_schema(document, "The plan", PLAN_AGAIN if "config" in document else "fitgpt plan --json")
    if isinstance(values, dict) and set(values) <= set(option_specs(RunConfig)):
        planned = RunConfig.from_dict(values)
    if plan is not None:
        card = find(request.gpu) if request.gpu else match_device(plan.budget.card)  # None: a plan for a budget only
        if request.config is None and planned is not None:
            request = replace(request, config=with_data(planned)[0])
        return explain_plan(plan, request.run_on(card))
    if planned is None:
        return None
    return explain_run(replace(request, config=planned, gpu=request.gpu or str(document.get("gpu") or "")))


def explain_run(request: ExplainRequest, folder: Path | None = None) -> Diagnosis:
    """A config on a GPU, or the run of a folder, by the plan in its metrics if it has one."""
    assert request.config is not None
    rows: list[dict[str, Any]] = read_metrics(folder / "metrics.jsonl") if folder else []

    # The GPU that was named, the one of the run, or the installed one.
    facts = facts_from(last_row(rows, "run"))
    card = match_device(facts.device_name)
    if request.gpu:
        target = budgets.named(request.gpu, others=request.others, budget=None)
    elif facts.device.startswith("cpu"):
        raise UsageError(f"The run in {folder} trained on the CPU: it used no GPU memory.",
                         "--gpu=4070 explains what it would use there.")
    elif card is not None and card.vendor == "nvidia":
        target = budgets.on_card(card, others=request.others or 0)
    else:
        target = budgets.installed(request.config.device, others=request.others, budget=None)

    run = request.run_with(target.platform)
    plan: MemoryPlan = plan_for(run.config, target, run.trainer)
    values = recorded_config(folder) if folder and not request.gpu and run.trainer == "fitgpt" else None
    if values is not None:
        recorded = RunConfig.from_dict(values)
        recorded = replace(recorded, vocab_size=recorded.vocab_size or run.config.vocab_size)
        if replace(run.config, init_from=recorded.init_from) == recorded:  # unchanged by flags
            plan = recorded_plan(plan, rows)
    diagnosis = explain_plan(plan, run, rows)
    return replace(diagnosis, notes=(*diagnosis.notes, *target.notes))


def recorded_plan(plan: MemoryPlan, rows: Sequence[Row]) -> MemoryPlan:
    """The plan with the figures that the run recorded at its last start; unchanged if it recorded none."""
    row = last_row(rows, "plan")
    phases, peak = phases_from(row), row.get("peak_phase")
    owners = tuple(OwnerShare(*share) for share in owners_from(row))
    needs, limit = whole(row.get("needs_bytes")), whole(row.get("reserve_limit_bytes"))
    if not phases or not owners or needs is None or limit is None or not isinstance(peak, str):
        return plan
    return MemoryPlan(plan.forecast._replace(phases=phases, owners_at_peak=owners, needs=needs, peak_phase=peak),
                      plan.budget._replace(budget=limit + plan.budget.outside))


# ---- the diagnosis

TITLES = {Verdict.FITS: "The run fits", Verdict.TIGHT: "The run fits, but it is tight",
          Verdict.NOT_ALL_SEEN: "What was seen of the run fits"}
_MEASURED_TOGETHER = {"train": ("train", "step")}  # a step is measured as a whole


def explain_plan(plan: MemoryPlan, run: ExplainedRun | None = None, rows: Sequence[Row] = ()) -> Diagnosis:
    """`rows`: the metrics of the run, if it has any."""
    forecast, budget = plan.forecast, plan.budget
    needs, limit = show_bytes(forecast.needs), show_bytes(budget.reserve_limit)
    difference = show_bytes(abs(plan.headroom))
    title = (f"{TITLES[plan.verdict]}: PyTorch needs {needs} of the {limit} available to it: headroom {difference}."
             if plan.headroom >= 0 else
             f"The run does not fit: PyTorch needs {needs}, {limit} is available: {difference} short.")
    what = (f"The peak is in the {PHASES.get(forecast.peak_phase, forecast.peak_phase)} phase: "
            f"{show_bytes(forecast.allocated)} allocated, for {show_count(forecast.params)} parameters.")
    largest = max(forecast.owners_at_peak, key=lambda share: share.nbytes, default=None)
    if largest is not None:
        formula = f" ({largest.formula})" if largest.formula else ""
        part = largest.nbytes / forecast.allocated if forecast.allocated else 0
        what = f"{what} {part:.0%} of that is {largest.owner}{formula}."

    shares = [MemoryShare(share.owner, share.nbytes, share.formula) for share in forecast.owners_at_peak]
    unallocated = max(forecast.needs - sum(share.nbytes for share in shares), 0)
    shares.append(MemoryShare("reserved by PyTorch but unallocated", unallocated, "fragmentation and rounding"))
    shares.append(MemoryShare("this process outside PyTorch", budget.outside, "context and kernels"))
    if budget.others:
        shares.append(MemoryShare("other processes", budget.others))
    free = budget.usable - sum(share.nbytes for share in shares)
    if free >= 0:
        shares.append(MemoryShare("free", free))
    over = forecast.needs + budget.outside + budget.others - budget.usable
    gpu = f"{show_bytes(budget.usable)} of the {budget.card or 'GPU'}"

    measured = compare_phases(plan, rows)
    return Diagnosis(subject="run" if measured else "plan", title=title, what=what, phase=forecast.peak_phase,
                     shares=tuple(shares), shares_of=gpu if over <= 0 else f"{show_bytes(over)} more than the {gpu}",
                     remedies=remedies_for(run, plan) if run is not None else (), notes=(*plan.caveats, *measured))


def compare_phases(plan: MemoryPlan, rows: Sequence[Row]) -> tuple[str, ...]:
    """One line per phase with measured memory; none if the device does not report it.

    Predicted figures are those that the run recorded at its start, or else the plan's.
    """
    def compared(what: str, predicted: int, measured: int) -> str:
        error = f" ({measured / predicted - 1:+.1%})" if predicted and measured else ""
        return f"{what} {show_bytes(predicted)} predicted, {show_bytes(measured)} measured{error}"

    planned = phases_from(last_row(rows, "plan")) or plan.forecast.phases
    measured = phases_from(last_row(rows, "plan_measured")) or measured_peaks(rows)
    lines = []
    for phase, seen in measured.items():
        predicted = [planned[name] for name in _MEASURED_TOGETHER.get(phase, (phase,)) if name in planned]
        if seen.allocated and predicted:
            allocated = compared("allocated", max(each.allocated for each in predicted), seen.allocated)
            reserved = compared("reserved", max(each.reserved for each in predicted), seen.reserved)
            lines.append(f"{PHASES.get(phase, phase).capitalize()}: {allocated}; {reserved}.")
    return tuple(lines)
