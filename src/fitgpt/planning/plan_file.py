"""Plans as JSON: what `plan --json` prints, and what `fit` writes for `train --plan`. Written and read only here.

`train --plan` ignores keys that are missing. Keys that are there must hold, or the run does not start: `checksum` too,
which is of all others. Without it a plan may be edited.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config.fields import Assignment, checked, option_specs, shown
from ..config.run_config import FALLBACK_OPTIONS, FIXED_BY_PLAN, RunConfig
from ..core.errors import DeviceError, UsageError
from ..core.files import MAX_JSON_BYTES, is_own_json, read_limited, seal_json, unseal_json
from ..core.units import show_bytes, with_article
from ..runs.metrics import PHASES, PhaseMemory
from .budget import Budget
from .forecast import Forecast, MemoryPlan, OwnerShare, TrackRecord, lowest_error
from .verdict import tight_reasons, verdict_of

SCHEMA = 2
PLAN_AGAIN = "fitgpt fit -o my_run.plan.json"
LARGEST_BYTES = 2**63  # no plan or measurement is larger
SAME = 0.01           # relative; a plan made on another machine may know this GPU's figures less well


# ---- written


class FallbackPlan(NamedTuple):
    """A smaller plan of the same run: the options to change, the memory it needs, and a description."""

    changes: dict[str, Any]
    needs: int
    why: str


class Estimate(NamedTuple):
    low: float
    likely: float
    high: float

    def times(self, factor: float) -> Estimate:
        return Estimate(*(factor * each for each in self))

    def to_dict(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in self._asdict().items()}


def document(plan: MemoryPlan, torch: str, record: TrackRecord, step_seconds: Estimate | None) -> dict[str, Any]:
    """What `plan --json` prints. Every key is always there; a phase that the run does not have is null."""
    forecast, budget, phases = plan.forecast, plan.budget, phases_to_json(plan.forecast.phases)
    if "train" in phases and "step" in phases:  # a training iteration ends with the optimizer step
        phases["train"] = {key: max(phases[each][key] for each in ("train", "step")) for key in phases["train"]}
    return {
        "schema": SCHEMA, "trainer": forecast.trainer, "torch": torch, "params": forecast.params,
        **rank_document(plan), "budget_bytes": budget.budget, "gpu_bytes": plan.process_bytes + budget.others,
        "phases": {phase: phases.get(phase) for phase in PHASES},
        "step_seconds": step_seconds and step_seconds.to_dict(), "assumes": forecast.assumes,
        "track_record": {"recorded_runs_on_this_gpu": record.on_card, "recorded_runs_in_all": record.in_all,
                         "recorded_with_torch": list(record.torch),
                         "worst_error_percent": record.worst_percent},
    }


def rank_document(plan: MemoryPlan) -> dict[str, Any]:
    """What a plan and one rank of several have in common in `plan --json`."""
    forecast, budget = plan.forecast, plan.budget
    low, high = forecast.reserved_range
    return {"gpu": budget.card or None, "usable_bytes": budget.usable, "others_bytes": budget.others,
            "outside_bytes": budget.outside, "reserve_limit_bytes": budget.reserve_limit,
            "verdict": plan.verdict, "fits": plan.fits, "not_seen": list(forecast.not_seen), "tight": list(plan.tight),
            "needs_bytes": forecast.needs, "headroom_bytes": plan.headroom, "process_bytes": plan.process_bytes,
            "reserved_bytes": {"low": low, "likely": min(max(forecast.reserved, low), high), "high": high},
            "peak": {"phase": forecast.peak_phase, "allocated_bytes": forecast.allocated,
                     "reserved_bytes": forecast.reserved},
            "phases": phases_to_json(forecast.phases),
            "owners": {share.owner: share.nbytes for share in forecast.owners_at_peak}}


def change_document(plan: MemoryPlan, needs: int, *, flags: Mapping[str, str], what: str, costs: str,
                    same_training: bool, paste: Sequence[str] = (),
                    step_seconds: Estimate | None = None) -> dict[str, Any]:
    """A change of a plan's run, after which it needs that much."""
    headroom = plan.budget.reserve_limit - needs
    tight = tight_reasons(needs, plan.budget, lowest_error(plan.forecast.trainer, plan.forecast.assumes))
    return {"flags": dict(flags), "paste": list(paste), "what": what, "costs": costs, "needs_bytes": needs,
            "headroom_bytes": headroom, "verdict": verdict_of(headroom, plan.forecast.not_seen, tight),
            "same_training": same_training, "basis": "computed",
            "step_seconds": step_seconds and step_seconds.to_dict()}


def text_of_fit(forecast: dict[str, Any], config: RunConfig, budget: Budget, plans: Sequence[FallbackPlan],
                speed: dict[str, Any] | None) -> str:
    """What `fit` writes. `forecast` is the plan's `document`, whose keys are repeated at the top level; `config` is as
    the user gave it."""
    held = {"gpu": budget.card, "usable": budget.usable, "others": budget.others, "budget": budget.budget,
            "outside": budget.outside, "margin": budget.margin}
    return seal_json({**forecast, "config": config.to_dict(), "gpu": budget.card, "budget": held,
                      "forecast": forecast, "tokens_per_s": speed, "ladder": fallback_plans_to_json(plans)})


def is_of_fit(text: str) -> bool:
    return is_own_json(text, "config", "forecast", "ladder")


def phases_to_json(phases: Mapping[str, PhaseMemory]) -> dict[str, dict[str, int]]:
    return {phase: {"allocated_bytes": held.allocated, "reserved_bytes": held.reserved}
            for phase, held in phases.items()}


def fallback_plans_to_json(plans: Sequence[FallbackPlan]) -> list[dict[str, Any]]:
    return [{"changes": plan.changes, "needs_bytes": plan.needs, "why": plan.why} for plan in plans]


# ---- read by `explain`


def check_schema(document: Mapping[str, Any], what: str, fix: str) -> None:
    """UsageError for a plan of another fitgpt. `what`: the plan, as in "--plan my_run.plan.json"."""
    if (schema := document.get("schema", SCHEMA)) != SCHEMA:
        raise UsageError(f"{what} has schema {schema!r:.50}, and this fitgpt knows {SCHEMA}.", fix)


def plan_from(document: Mapping[str, Any]) -> MemoryPlan | None:
    """A plan from either JSON; None where it is not one, or lacks a figure."""
    def figure(value: Any) -> int:
        if abs(number := int(value)) > LARGEST_BYTES:
            raise ValueError(f"{value} is too large")
        return number

    try:
        phases = {str(phase): PhaseMemory(figure(held["allocated_bytes"]), figure(held["reserved_bytes"]))
                  for phase, held in document["phases"].items() if held}
        formulas = document.get("formulas") or {}
        owners = tuple(OwnerShare(owner, figure(nbytes), str(formulas.get(owner, "")))
                       for owner, nbytes in document["owners"].items())
        reserved = document["reserved_bytes"]
        forecast = Forecast(
            str(document["trainer"]), figure(document["params"]), phases, str(document["peak"]["phase"]), owners,
            figure(document["needs_bytes"]), (figure(reserved["low"]), figure(reserved["high"])),
            dict(document["assumes"]), host_bytes=0, not_seen=tuple(map(str, document["not_seen"])),
            bounded=tuple(map(str, document["tight"])))
        usable, others, whole, outside = (figure(document[f"{name}_bytes"])
                                          for name in ("usable", "others", "budget", "outside"))
        plan = MemoryPlan(forecast, Budget(str(document["gpu"] or "GPU"), usable, others, whole, outside))
        return plan if phases and owners and plan.verdict else None  # the verdict needs every assumption
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


# ---- read by `train --plan`


@dataclass(frozen=True)
class PlanFile:
    """The run that `fit` chose, as far as the file contains it."""

    path: str
    options: dict[str, Any]
    card: str = ""
    needs: int | None = None
    fallback_plans: tuple[FallbackPlan, ...] | None = None

    def check_same(self, differences: Sequence[str]) -> None:
        """DeviceError naming what differs from the plan, if anything does."""
        if differences:
            raise DeviceError(f"{self.path} is the plan of another run: {'; '.join(differences)}.",
                              "Plan again for what you have: fitgpt fit; or train without --plan.")

    def check_nvidia(self) -> None:
        if self.card:
            self.check_same([f"it was made for {with_article(self.card)}, and the run is not on an NVIDIA GPU"])

    def compare(self, plan: MemoryPlan) -> None:
        """DeviceError naming what differs here from the plan."""
        here, differences = plan.budget.card, []
        if self.card and here and self.card != here:
            differences.append(f"it was made for {with_article(self.card)}, and here is {with_article(here)}")
        if self.needs is not None and abs(plan.forecast.needs - self.needs) > SAME * self.needs:
            differences.append(f"it says the run needs {show_bytes(self.needs)}, and here, with torch "
                               f"{plan.forecast.assumes['torch']}, {show_bytes(plan.forecast.needs)}")
        self.check_same(differences)

    def fallback_plans_of(self, config: RunConfig) -> tuple[FallbackPlan, ...]:
        """The fallback plans of this run; UsageError where one could not be used when memory runs out."""
        for fallback in self.fallback_plans or ():
            where = f"--plan {self.path}: the fallback plan {fallback.why or fallback.changes}"
            try:
                smaller = replace(config, **fallback.changes)
            except UsageError as error:
                raise UsageError(f"{where}: {error.what}", PLAN_AGAIN) from error
            if smaller.cuda_graphs is True and (config.cuda_graphs is not True or smaller.offload == "gradients"):
                raise UsageError(f"{where}: cuda_graphs=True does not save memory, and does not work with "
                                 "offload=gradients.", PLAN_AGAIN)
            if smaller.tokens_per_step != config.tokens_per_step:
                raise UsageError(f"{where} has {smaller.tokens_per_step:,} tokens per step, and the run has "
                                 f"{config.tokens_per_step:,}.", PLAN_AGAIN)
        return self.fallback_plans or ()


def with_plan(assignments: Sequence[Assignment]) -> list[Assignment]:
    """The assignments after those of the file that --plan names. The user's may add to the plan, not contradict it."""
    path = {each.key: each.value for each in assignments}.get("plan")
    if not path:
        return list(assignments)
    planned = read(str(path))
    given = {each.key: each for each in assignments if each.key in FIXED_BY_PLAN and each.key in planned.options}
    planned.check_same([f"it has {key}={shown(planned.options[key])}, and {each.source} says {shown(each.value)}"
                    for key, each in given.items() if each.value != planned.options[key]])
    return [*(Assignment(key, value, f"{path}: {key}") for key, value in planned.options.items()), *assignments]


def read(path: str) -> PlanFile:
    try:
        text = read_limited(path, MAX_JSON_BYTES, pipes=True).decode()
        document = json.loads(text)
        if isinstance(document, dict) and "checksum" in document:
            document = unseal_json(text)
    except OSError as error:
        raise UsageError(f"--plan {path}: {error.strerror or error}.", f"fitgpt fit -o {shlex.quote(path)}") from error
    except (ValueError, RecursionError) as error:
        beside = Path(path).with_suffix(".plan.json")
        fix = f"--plan {shlex.quote(str(beside))}" if beside.is_file() else f"fitgpt fit -o {shlex.quote(path)}"
        raise UsageError(f"--plan {path} is not a plan: {error}.", fix) from error
    if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
        raise UsageError(f"--plan {path} is not a plan: it has no config.", f"fitgpt fit -o {shlex.quote(path)}")
    check_schema(document, f"--plan {path}", f"fitgpt fit -o {shlex.quote(path)}")
    card = document.get("gpu")
    return PlanFile(path, _options(path, document["config"]), card if isinstance(card, str) else "",
                    _needs(document.get("forecast")), _fallback_plans(path, document.get("ladder")))


def _options(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options that `train` has, each checked like a flag."""
    known = option_specs(RunConfig)
    return {key: checked(known[key], value, f"{path}: {key}={value!r}") for key, value in given.items()
            if key in known and key != "plan"}


def _needs(row: Any) -> int | None:
    """Of a forecast or a fallback plan."""
    needs = row.get("needs_bytes") if isinstance(row, dict) else None
    return needs if isinstance(needs, int) and not isinstance(needs, bool) else None


def _fallback_plans(path: str, rows: Any) -> tuple[FallbackPlan, ...] | None:
    """The fallback plans, their values checked like flags; None where there are none or one cannot be read."""
    if not isinstance(rows, list):
        return None
    plans: list[FallbackPlan] = []
    for each in rows:
        needs = _needs(each)
        if needs is None or not isinstance(changes := each.get("changes"), dict):
            return None
        if other := sorted(changes.keys() - set(FALLBACK_OPTIONS)):
            raise UsageError(f"--plan {path}: a fallback plan changes {', '.join(other)}; fallback plans may change "
                             f"{', '.join(sorted(FALLBACK_OPTIONS))}.", PLAN_AGAIN)
        plans.append(FallbackPlan(_options(f"{path}: a fallback plan", changes), needs, str(each.get("why", ""))))
    return tuple(plans)
