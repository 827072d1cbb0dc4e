"""Run + budget → Remedies: changes that make the run fit, each with its flags, its cost and the peak after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..config.fields import shown
from ..config.run_config import RunConfig, diff
from ..core.errors import UsageError
from ..core.units import show_bytes
from ..memory.timeline import replay
from ..planning.budget import Budget
from ..planning.changes import Change, ChangedRun, by_family, single_changes, smallest
from ..planning.forecast import MemoryPlan, fits, replay_run
from .case import ExplainedRun

MAX_REMEDIES = 4
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# Tried if no single change is enough: several together, with fitgpt, the exact ones first.
COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"batch_size": 1, "recompute": "input"},
    {"batch_size": 1, "recompute": "input", "offload": "optimizer"},
    {"batch_size": 1, "recompute": "input", "offload": "gradients"},
    {"weights": "bfloat16", "optimizer": "adam8bit"},
    {"weights": "bfloat16", "optimizer": "adam8bit", "batch_size": 1, "recompute": "input"},
)


@dataclass(frozen=True)
class Remedy:
    """Something to type or do, and its effect. None: not known."""

    todo: str
    effect: str                  # "7.31 GiB allocated at the peak, 3.1 GiB less", or another text
    fits: bool | None = None
    costs: str = ""


def remedies_for(run: ExplainedRun, plan: MemoryPlan) -> tuple[Remedy, ...]:
    """Changes that save memory if the plan fits; otherwise changes that make it fit."""
    return _savings(run) if plan.fits else _fitting_changes(run, plan.budget)


def _fitting_changes(run: ExplainedRun, budget: Budget) -> tuple[Remedy, ...]:
    """The smallest change of each family that makes the run fit; if none does, several together."""
    found = [changed for family in _families(run)
             if (changed := smallest(family, lambda each: _fits(each, run, budget)))]
    changes = found[:MAX_REMEDIES] or _combined_changes(run, budget)
    return (*(_remedy(changed, run, fits=True) for changed in changes), *_expandable_segments(run, budget))


def _savings(run: ExplainedRun) -> tuple[Remedy, ...]:
    """What the smallest change of each family saves."""
    first = [family[0] for family in _families(run) if family[0].change.exact]
    helping = (changed for changed in first if _peak_after(changed, run) < run.timeline.peak)
    return tuple(_remedy(changed, run, fits=None) for changed in islice(helping, MAX_REMEDIES))


def _families(run: ExplainedRun) -> list[list[ChangedRun]]:
    """Without changes of what is trained: another context, or other tokens per step."""
    changes = tuple(
        changed if changed.change.trainer == run.trainer else changed._replace(config=_fitgpt_config(run))
        for changed in single_changes(run.config, run.trainer, compiles=run.platform.compiles)
        if changed.change.comparable and changed.change.family != "accumulation")
    return list(by_family(changes).values())


def _fitgpt_config(run: ExplainedRun) -> RunConfig:
    """The config for `fitgpt train`, without a `compile` that was inferred from another trainer's run."""
    return replace(run.config, compile="auto") if run.inferred and run.trainer != "fitgpt" else run.config


def _fits(option: ChangedRun, run: ExplainedRun, budget: Budget) -> bool:
    return fits(option.resolved(run.platform), run.platform, budget.reserve_limit, option.change.trainer)


def _combined_changes(run: ExplainedRun, budget: Budget) -> list[ChangedRun]:
    """The first exact combination that fits, and the first lossy one."""
    found: dict[bool, ChangedRun] = {}
    for options in COMBINATIONS:
        changed = _combination(_fitgpt_config(run), options)
        if changed is not None and changed.change.exact not in found and _fits(changed, run, budget):
            found[changed.change.exact] = changed
    return list(found.values())


def _combination(config: RunConfig, options: dict[str, Any]) -> ChangedRun | None:
    times = config.batch_size // options["batch_size"] if "batch_size" in options else 1
    try:
        changed = replace(config, **options, grad_checkpoint=False,
                          gradient_accumulation_steps=config.gradient_accumulation_steps * times)
    except UsageError:
        return None
    flags = tuple(f"--{key}={shown(now)}" for key, _, now in diff(config, changed))
    exact = "weights" not in options
    slower = "slower" if {"recompute", "offload"} & options.keys() else "nothing measured"
    return ChangedRun(Change(flags, "", exact, True, slower, "together", "fitgpt"), changed) if flags else None


def _remedy(option: ChangedRun, run: ExplainedRun, *, fits: bool | None) -> Remedy:
    lossy = "" if option.change.exact else "lossy; "
    return Remedy(_command(option.change, run), _effect(run.timeline.peak, _peak_after(option, run)), fits,
                  f"{lossy}{option.change.slower}")


def _peak_after(option: ChangedRun, run: ExplainedRun) -> int:
    return replay_run(option.resolved(run.platform), run.platform, option.change.trainer).peak


def _expandable_segments(run: ExplainedRun, budget: Budget) -> tuple[Remedy, ...]:
    """nanoGPT does not enable expandable_segments; the environment variable can."""
    if run.trainer != "nanogpt":
        return ()
    before = run.timeline.reserved
    after = replay(run.tape, budget.reserve_limit, expandable=True)
    if after.failed is None:
        return (Remedy(EXPANDABLE, f"reserves {show_bytes(after.reserved)} instead of {show_bytes(before)} "
                       "for the same tensors", True, "nothing; not on Windows"),)
    return ()


def _effect(before: int, after: int) -> str:
    change = f"{show_bytes(before - after)} less" if after <= before else f"{show_bytes(after - before)} more"
    return f"{show_bytes(after)} allocated at the peak, {change}"


def _command(change: Change, run: ExplainedRun) -> str:
    """The flags to add; for a change of the trainer, the whole command."""
    if change.trainer == run.trainer:
        return " ".join(change.flags)
    flags = "" if change.family == "trainer" else " ".join(("", *change.flags))
    return f"fitgpt train {run.name or 'config.py'}{flags}"
