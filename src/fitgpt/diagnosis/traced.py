"""A saved trace of a script, and an out-of-memory message of it or nothing else → Diagnosis."""

from __future__ import annotations

from dataclasses import replace

from ..core.units import MiB, show_bytes
from ..hardware.gpus import GpuModel
from ..memory.timeline import Timeline, replay
from ..planning import budget as budgets
from ..tracing.plan import PASSES, SCRIPT, TracedPlan, plan_trace
from ..tracing.trace_file import Trace
from .case import budget_at_failure, has_requested_size, is_segment_size, usage_in
from .diagnose import Diagnosis, Remedy, diagnose
from .oom_message import OomMessage
from .plan_or_run import explain_plan


def explain_trace(trace: Trace, gpu: str, others: int | None) -> Diagnosis:
    """Does the traced script fit, and what dominates its memory?"""
    target = budgets.named(gpu, others=others, budget=None) if gpu else budgets.installed("auto", others=others,
                                                                                         budget=None)
    plan = plan_trace(trace, target)
    return replace(explain_plan(plan), remedies=() if plan.headroom >= 0 else remedies_of(plan),
                   notes=(*plan.notes, *trace.notes))


def explain_traced_message(message: OomMessage, trace: Trace, card: GpuModel | None, others: int) -> Diagnosis:
    """The message, with the tensor of the trace that requested the memory."""
    found = diagnose(message, None, card, SCRIPT, others)
    budget = budget_at_failure(message, usage_in(message), card, others)
    platform = budgets.platform_for(card) if card else trace.platform
    traced = trace.on(platform)
    timeline = replay(traced.tape, budget.reserve_limit if budget else None, expandable=trace.expandable)
    what = tensor_text(message, traced, timeline)
    if budget is None or not what:
        return replace(found, what=" ".join(filter(None, (what or NOT_FOUND, found.what))))
    plan = plan_trace(trace, budgets.Target(platform, budget, card))
    changes = remedies_of(plan)
    others_found = (each for each in found.remedies if each.todo not in [change.todo for change in changes])
    return replace(found, what=what, needed=(), remedies=(*changes, *others_found))


NOT_FOUND = "No allocation of the trace has this size: the message comes from another run, or from a later step."


def tensor_text(message: OomMessage, trace: Trace, timeline: Timeline) -> str:
    """Which tensor of the trace was requested; empty if none has the size."""
    requested = requested_event(message, trace, timeline)
    if requested is None:
        return ""
    events = trace.tape.events
    kind = trace.tensors[int(events[requested].name.partition(" ")[0]) - 1]
    step = sum(after <= requested for after in trace.steps) + 1
    phase = next(name for name, start in reversed(trace.phases) if start <= requested)
    module = f" of {kind.module}" if kind.module else ""
    segment = f", in a new segment of {show_bytes(message.requested or 0)}" if is_segment_size(message) else ""
    text = (f"{kind.describe()}, {kind.nbytes / MiB:,.1f} MiB{segment}: {kind.owner}{module} ({kind.op}), allocated at "
            f"{kind.source}, in {PASSES.get(phase, phase)} of step {step}.")
    if requested == timeline.failed:
        text += " Replayed with the same limit, the trace runs out of memory at exactly this allocation."
    return text


def requested_event(message: OomMessage, trace: Trace, timeline: Timeline) -> int | None:
    """The number of the allocation that the message is about: the one at which the timeline fails if it has the size,
    else of those that have it the one with the most similar amount allocated before it."""
    if message.requested is None:
        return None
    events, failed = trace.tape.events, timeline.failed
    if failed is not None and has_requested_size(events[failed].nbytes, message):
        return failed
    if is_segment_size(message):
        return None
    before = (0, *replay(trace.tape, expandable=trace.expandable).allocated)
    return min((number for number, event in enumerate(events)
                if event.alloc and has_requested_size(event.nbytes, message)),
               key=lambda number: abs(before[number] - (message.allocated or 0)), default=None)


def remedies_of(plan: TracedPlan) -> tuple[Remedy, ...]:
    return tuple(Remedy(each.change, f"needs {show_bytes(each.needs)}, by arithmetic on the trace; saves {each.what}",
                        each.fits) for each in plan.changes)
