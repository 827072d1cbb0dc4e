"""Which of a few candidates is really the fastest? Each is timed, one after another, under the same cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config.run_config import RunConfig
from ..nouns import Fitted, Standing

Timer = Callable[[RunConfig, int], "float | str"]  # a config, the allocator's cap → tokens a second, or what went wrong
SECONDS_EACH = 2.0  # for steps of one micro-step, and as much for steps of two
NOISE = 0.005  # two that lie closer are as fast as each other: then the estimate decides


def measured(fitted: Fitted, timer: Timer, say: Callable[[str], None] = lambda words: None) -> Fitted:
    """The same answer, with the fastest as timed in its first place. Those that could not be timed come last."""
    if fitted.chosen is None:
        return fitted
    unchanged = (fitted.asked,) if fitted.asked.fits and fitted.chosen.flags else ()
    timed, failed, notes = [], [], []
    candidates = (fitted.chosen, *fitted.runners_up, *unchanged)
    say(f"timing {len(candidates)} plans, each for some seconds once it is compiled …")
    for number, standing in enumerate(candidates, 1):
        found = timer(standing.config, fitted.budget.reserve_limit)
        if isinstance(found, str):
            failed.append(standing)
            notes.append(f"{_name(standing)} could not be timed: {found}")
        else:
            timed.append(standing._replace(measured=found))
            say(f"{number} of {len(candidates)}: {_name(standing)}: {found:,.0f} tokens/s")
    if not timed:
        return fitted._replace(notes=(*fitted.notes, *notes))
    best = fastest(timed)
    others = sorted((each for each in timed if each is not best), key=lambda each: -(each.measured or 0))
    return fitted._replace(chosen=best, runners_up=(*others, *failed), notes=(*fitted.notes, *notes))


def fastest(timed: Sequence[Standing]) -> Standing:
    """The first of those that are as fast as any."""
    most = max(each.measured or 0 for each in timed)
    return next(each for each in timed if (each.measured or 0) >= (1 - NOISE) * most)


def _name(standing: Standing) -> str:
    return " ".join(standing.flags) or "as asked"
