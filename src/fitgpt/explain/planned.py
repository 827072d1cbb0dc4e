"""A plan, or a run with its record → why it holds this much, what dominates, what would change it, and how it came."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.units import show_bytes, show_count
from ..nouns import MemoryPlan
from ..runs.rows import Row, last_of, peaks_in, phases_in
from ..sights import Diagnosis, MemoryShare, Remedy
from .about import Run
from .names import PHASES
from .remedies import remedies, savings


def explain_plan(plan: MemoryPlan, run: Run | None = None, rows: Sequence[Row] = ()) -> Diagnosis:
    """`rows`: the run's record, where there is one."""
    measured = compared(plan, rows)
    return Diagnosis(subject="run" if measured else "plan", title=_title(plan), what=_why(plan),
                     phase=plan.forecast.peak_phase, shares=_shares(plan),
                     shares_of=_whole_card(plan),
                     remedies=_changes(plan, run), notes=measured)


def _title(plan: MemoryPlan) -> str:
    needs, limit = show_bytes(plan.forecast.needs), show_bytes(plan.budget.reserve_limit)
    if plan.fits:
        return (f"The run fits: PyTorch needs {needs} of the {limit} it may reserve, {show_bytes(plan.headroom)} to "
                "spare.")
    return f"The run does not fit: PyTorch needs {needs} and may reserve {limit}, {show_bytes(-plan.headroom)} short."


def _why(plan: MemoryPlan) -> str:
    forecast = plan.forecast
    largest = max(forecast.owners_at_peak, key=lambda share: share.nbytes, default=None)
    told = (f"It holds most {PHASES.get(forecast.peak_phase, forecast.peak_phase)}: {show_bytes(forecast.allocated)} "
            f"in tensors, for {show_count(forecast.params)} parameters.")
    if largest is None:
        return told
    formula = f" ({largest.formula})" if largest.formula else ""
    share = largest.nbytes / forecast.allocated if forecast.allocated else 0
    return f"{told} {share:.0%} of that is {largest.owner}{formula}."


def _whole_card(plan: MemoryPlan) -> str:
    budget = plan.budget
    over = plan.forecast.needs + budget.outside + budget.others - budget.usable
    card = f"{show_bytes(budget.usable)} of the {budget.card}"
    return card if over <= 0 else f"{show_bytes(over)} more than the {card}"


def _shares(plan: MemoryPlan) -> tuple[MemoryShare, ...]:
    forecast, budget = plan.forecast, plan.budget
    shares = [MemoryShare(share.owner, share.nbytes, share.formula) for share in forecast.owners_at_peak]
    pieces = max(forecast.needs - sum(share.nbytes for share in shares), 0)
    shares.append(MemoryShare("more that PyTorch must reserve", pieces, "what lies between blocks"))
    shares.append(MemoryShare("this process outside PyTorch", budget.outside, "context and kernels"))
    if budget.others:
        shares.append(MemoryShare("other processes", budget.others))
    left = budget.usable - sum(share.nbytes for share in shares)
    if left >= 0:
        return (*shares, MemoryShare("free", left))
    return tuple(shares)


def _changes(plan: MemoryPlan, run: Run | None) -> tuple[Remedy, ...]:
    if run is None:
        return ()
    return savings(run) if plan.fits else remedies(run, plan.budget)


# ---- predicted against measured


def compared(plan: MemoryPlan, rows: Sequence[Row]) -> tuple[str, ...]:
    """A line for each phase that the run's record has figures of; none where its device counts no memory.

    What the run planned at its start counts, where it wrote that down; else the forecast of now.
    """
    planned = phases_in(last_of(rows, "plan")) or plan.forecast.phases
    measured = phases_in(last_of(rows, "plan_measured")) or peaks_in(rows)
    lines = []
    for phase, seen in measured.items():
        foreseen = [planned[name] for name in _TOGETHER.get(phase, (phase,)) if name in planned]
        if seen.allocated and foreseen:
            allocated = _beside("allocated", max(held.allocated for held in foreseen), seen.allocated)
            reserved = _beside("reserved", max(held.reserved for held in foreseen), seen.reserved)
            lines.append(f"{_PHASE.get(phase, phase)}: {allocated}; {reserved}.")
    return tuple(lines)


_PHASE = {"load": "Loading", "first_eval": "First evaluation", "first_train": "First iteration", "train": "Training",
          "eval": "Evaluation", "save": "Saving"}
_TOGETHER = {"train": ("first_train", "train", "step"), "eval": ("first_eval", "eval")}  # as steps and evaluations tell


def _beside(what: str, predicted: int, measured: int) -> str:
    off = f" ({measured / predicted - 1:+.1%})" if predicted and measured else ""
    return f"{what} {show_bytes(predicted)} predicted, {show_bytes(measured)} measured{off}"
