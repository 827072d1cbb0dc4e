"""Which changes would make a run small enough: each with its exact flags, its cost and the forecast after it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from ..config.fields import shown
from ..config.run_config import RunConfig, diff
from ..core.errors import UsageError
from ..core.units import show_bytes
from ..memory.allocator import replay
from ..nouns import Budget, Change
from ..planning.changes import Option, fits, single_changes
from ..planning.forecast import timeline_of
from ..sights import Remedy
from .about import Run

MOST = 4
# What costs nothing comes first, then what costs little; families of memory/changes.py that are not named come last.
CHEAPEST_FIRST = ("trainer", "compile", "evaluation", "loss", "batch", "recompute")
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# Where no single change is enough: together, with fitgpt, the exact ones first.
TOGETHER: tuple[dict[str, Any], ...] = (
    {"batch_size": 1, "recompute": "input"},
    {"batch_size": 1, "recompute": "input", "offload": "optimizer"},
    {"batch_size": 1, "recompute": "input", "offload": "gradients"},
    {"weights": "bfloat16", "optimizer": "adam8bit"},
    {"weights": "bfloat16", "optimizer": "adam8bit", "batch_size": 1, "recompute": "input"},
)


def remedies(run: Run, budget: Budget) -> tuple[Remedy, ...]:
    """The smallest change of each family that makes the run fit; where none does, several together."""
    options = [option for family in _families(run)
               if (option := next((each for each in family if _fits(each, run, budget)), None))]
    options = _cheapest(options)[:MOST] or _together(run, budget)
    return (*(_remedy(option, run, fits=True) for option in options), *_expanded(run, budget))


def savings(run: Run) -> tuple[Remedy, ...]:
    """What the first step of each family saves, where nothing has to be made to fit."""
    first = [family[0] for family in _families(run) if family[0].change.exact]
    helping = (option for option in _cheapest(first) if _peak_after(option, run) < run.timeline.peak)
    return tuple(_remedy(option, run, fits=None) for option in islice(helping, MOST))


def _families(run: Run) -> list[list[Option]]:
    families: dict[str, list[Option]] = {}
    for option in single_changes(run.config, run.trainer, compiles=run.setting.compiles):
        if option.change.trainer != run.trainer:
            option = option._replace(config=_of_fitgpt(run))
        if option.change.comparable and option.change.family != "accumulation":  # other steps are another training
            families.setdefault(option.change.family, []).append(option)
    return list(families.values())


def _of_fitgpt(run: Run) -> RunConfig:
    """As `fitgpt train` will have it: whether another trainer's run was compiled is not said to it."""
    return replace(run.config, compile="auto") if run.guessed and run.trainer != "fitgpt" else run.config


def _cheapest(options: list[Option]) -> list[Option]:
    def place(option: Option) -> tuple[bool, int]:
        family, named = option.change.family, CHEAPEST_FIRST
        return not option.change.exact, named.index(family) if family in named else len(named)

    return sorted(options, key=place)


def _fits(option: Option, run: Run, budget: Budget) -> bool:
    return fits(option.config, run.setting, budget, option.change.trainer)


def _together(run: Run, budget: Budget) -> list[Option]:
    """The first exact one that fits, and the first lossy one."""
    found: dict[bool, Option] = {}
    for knobs in TOGETHER:
        option = _several(_of_fitgpt(run), knobs)
        if option is not None and option.change.exact not in found and _fits(option, run, budget):
            found[option.change.exact] = option
    return list(found.values())


def _several(config: RunConfig, knobs: dict[str, Any]) -> Option | None:
    times = config.batch_size // knobs["batch_size"] if "batch_size" in knobs else 1
    try:
        changed = replace(config, **knobs, grad_checkpoint=False,
                          gradient_accumulation_steps=config.gradient_accumulation_steps * times)
    except UsageError:
        return None
    flags = tuple(f"--{key}={shown(now)}" for key, _, now in diff(config, changed))
    exact = "weights" not in knobs
    slower = "slower" if {"recompute", "offload"} & knobs.keys() else "nothing measured"
    return Option(Change(flags, "", exact, True, slower, "together", "fitgpt"), changed) if flags else None


def _remedy(option: Option, run: Run, *, fits: bool | None) -> Remedy:
    lossy = "" if option.change.exact else "lossy; "
    return Remedy(_typed(option.change, run), effect(run.timeline.peak, _peak_after(option, run)), fits,
                  f"{lossy}{option.change.slower}")


def _peak_after(option: Option, run: Run) -> int:
    return timeline_of(option.config, run.setting, option.change.trainer).peak


def _expanded(run: Run, budget: Budget) -> tuple[Remedy, ...]:
    """nanoGPT does not ask for expandable segments; the environment can."""
    if run.trainer != "nanogpt":
        return ()
    before = run.timeline.reserved
    after = replay(run.tape, budget.reserve_limit, expandable=True)
    if after.failed is None:
        return (Remedy(EXPANDABLE, f"reserves {show_bytes(after.reserved)}, where it would take {show_bytes(before)} "
                       "for the same tensors", True, "nothing; not on Windows"),)
    return ()


def effect(before: int, after: int) -> str:
    change = f"{show_bytes(before - after)} less" if after <= before else f"{show_bytes(after - before)} more"
    return f"{show_bytes(after)} in tensors at its peak, {change}"


def _typed(change: Change, run: Run) -> str:
    """The flags to add; to leave nanoGPT, the command."""
    if change.trainer == run.trainer:
        return " ".join(change.flags)
    flags = "" if change.family == "trainer" else " ".join(("", *change.flags))
    return f"fitgpt train {run.name or 'config.py'}{flags}"
