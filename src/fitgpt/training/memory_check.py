"""Before a run starts: what is really free on the card, who holds the rest, and whether the run fits beside them.

Standard library only: the process that asks has not loaded torch, and where it refuses nobody has waited for that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

from ..config.run_config import RunConfig
from ..core.errors import DeviceError, UsageError
from ..core.units import show_bytes
from ..hardware import nvidia
from ..hardware.host import spare_memory
from ..memory.setting import Setting
from ..nouns import Forecast, MemoryPlan
from ..planning import budget as place
from ..planning import forecast
from ..planning.budget import Place, beside
from ..planning.changes import smallest_that_fit
from ..planning.plan_file import PlanFile
from ..planning.resolve import with_data

LOOK_EVERY_S = 5.0
SAY_EVERY_S = 60.0


@dataclass(frozen=True)
class Checked:
    """What the process that trains should know: what others held of each card, by its uuid, before it came."""

    others: dict[str, int] = field(default_factory=dict)


def check(config: RunConfig, planned: PlanFile | None = None, *, sleep: Callable[[float], None] = time.sleep,
          say: Callable[[str], None] = lambda words: print(words, file=sys.stderr, flush=True)) -> Checked:
    """Waits, if that is allowed, and refuses (DeviceError) what cannot fit. Where there is no NVIDIA GPU, or only
    torch can say which, nothing is checked."""
    _need_library(config)
    last_said, waited = -SAY_EVERY_S, 0.0
    known: dict[tuple[Setting, int], Forecast] = {}
    while True:
        seen = nvidia.survey() if config.device not in ("cpu", "mps") else nvidia.Survey()
        found = _place(config, seen)
        if found is None:
            if planned is not None:
                planned.refuse_elsewhere()
            return Checked()
        if config.eval_only:
            return Checked(_others(seen))
        here = (found.setting, found.budget.reserve_limit)
        if here not in known:
            known[here] = forecast.forecast(with_data(config)[0], found.setting, limit=found.budget.reserve_limit)
        plan = MemoryPlan(known[here], found.budget)
        if planned is not None:
            planned.compare(plan)
        if plan.fits:
            return Checked(_others(seen))
        could_fit = plan._replace(budget=beside(config, found.budget._replace(others=0))).fits
        if not config.wait or not could_fit:
            raise does_not_fit(config, found, plan, could_wait=could_fit)
        if waited - last_said >= SAY_EVERY_S:
            last_said = waited
            say(f"fitgpt: waiting for memory of {_card(found)}: the run needs {show_bytes(plan.forecast.needs)}, and "
                f"{show_bytes(found.budget.reserve_limit)} could be had. {found.neighbours}".rstrip())
        sleep(LOOK_EVERY_S)
        waited += LOOK_EVERY_S


def _need_library(config: RunConfig) -> None:
    if config.adam8bit == "bitsandbytes" and not config.eval_only and find_spec("bitsandbytes") is None:
        raise UsageError(f"adam8bit=bitsandbytes needs the package bitsandbytes, which is not installed for "
                         f"{sys.executable}.", "pip install -e '.[bitsandbytes]', or --adam8bit=own")


def _place(config: RunConfig, seen: nvidia.Survey) -> Place | None:
    if not seen.gpus:
        return None
    try:
        found = place.on_device(place.chosen(seen, config.device))
    except UsageError:  # a card that is not there: whoever loads torch says it best
        return None
    return found._replace(budget=beside(config, found.budget))


def does_not_fit(config: RunConfig, found: Place, plan: MemoryPlan, *, could_wait: bool) -> DeviceError:
    """What is needed, what there is and who has the rest; and the changes that would do."""
    budget, settled = found.budget, forecast.settled(with_data(config)[0], found.setting)
    parts = [f"{show_bytes(budget.usable)} usable"]
    parts += [f"{show_bytes(budget.others)} held by others"] if budget.others else []
    parts += [f"{config.leave} to be left free"] if config.leave else []
    parts += [f"a budget of {config.budget}"] if config.budget else []
    parts += [f"{show_bytes(budget.outside)} outside the allocator"]
    changes = smallest_that_fit(settled, found.setting, budget)
    fixes = ["Add " + "; or ".join(" ".join(change.flags) for change in changes) + "."] if changes else []
    fixes += ["Add --wait to start when others have left."] if could_wait and not config.wait else []
    fixes += [] if changes else [_several_changes(with_data(config)[0], found)]
    return DeviceError(
        f"The run does not fit {_card(found)}: it needs {show_bytes(plan.forecast.needs)}, and may reserve "
        f"{show_bytes(budget.reserve_limit)} ({', '.join(parts)}). {found.neighbours}".rstrip(), "\n".join(fixes))


def _several_changes(config: RunConfig, found: Place) -> str:
    """Where no single change is enough: those that `fit` finds, or what would have to be allowed."""
    from ..planning.choose import fit_config, ways_out_in_words

    fitted = fit_config(config, found.setting, found.budget, card=found.card, host_bytes=spare_memory())
    if fitted.chosen is not None:
        return f"Add {' '.join(fitted.chosen.flags)}."
    how = " `fitgpt fit` with the same words, that flag and -o config/my_run.py writes a config that trains so."
    return ways_out_in_words(fitted) + (how if fitted.ways_out else "")


def _card(found: Place) -> str:
    return f"the {found.budget.card}" if found.budget.card else "the card"


def _others(seen: nvidia.Survey) -> dict[str, int]:
    return {gpu.uuid: gpu.used_bytes for gpu in seen.gpus if gpu.uuid and gpu.used_bytes is not None}
