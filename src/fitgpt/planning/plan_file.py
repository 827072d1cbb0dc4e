"""A plan in JSON, written and read here alone: as `plan --json` prints it, and as `fit` writes it for `train --plan`.

`train --plan` reads leniently: what is missing is not compared. What is there must hold, or the run is refused.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.fields import Assignment, checked, knobs_of, shown
from ..config.run_config import RunConfig
from ..core.errors import DeviceError, UsageError
from ..core.files import is_own_json
from ..core.units import show_bytes, with_article
from ..nouns import PHASES, Basis, Budget, Forecast, MemoryPlan, OwnerShare, PhaseForecast, Rung

SCHEMA = 1
PLAN_AGAIN = "Plan again: fitgpt fit; or train without --plan."
LARGEST = 64 * 2**20  # bytes; a plan has some kilobytes
LARGEST_BYTES = 2**63  # beyond it nothing was planned or measured
SAME = 0.01           # of what is needed: a plan made elsewhere for this card may know its figures less well
# What a run's memory depends on: the plan has decided these.
DECIDED = ("batch_size", "gradient_accumulation_steps", "block_size", "n_layer", "n_head", "n_embd", "dropout", "bias",
           "vocab_size", "dtype", "compile", "cuda_graphs", "recompute", "grad_checkpoint", "weights", "residual",
           "optimizer", "adam8bit", "offload", "step_in_backward", "casts", "gradients", "states", "loss_chunk",
           "eval_batch_size", "eval_block_size")
# What a smaller plan of the same run may do otherwise: see fit/ladder.py.
MAY_CHANGE = frozenset(("batch_size", "gradient_accumulation_steps", "eval_batch_size", "recompute", "loss_chunk",
                        "cuda_graphs", "offload"))


# ---- written


def document(plan: MemoryPlan, torch: str, basis: Basis) -> dict[str, Any]:
    """As `plan --json` has it. Every key is always there; a phase that the tape has not is null."""
    forecast, budget, phases = plan.forecast, plan.budget, in_bytes(plan.forecast.phases)
    if "train" in phases and "step" in phases:  # a training iteration ends with its optimizer's step
        phases["train"] = {key: max(phases[each][key] for each in ("train", "step")) for key in phases["train"]}
    return {
        "schema": SCHEMA, "trainer": forecast.trainer, "card": budget.card or None, "torch": torch,
        "params": forecast.params, "usable_bytes": budget.usable, "others_bytes": budget.others,
        "budget_bytes": budget.budget, "outside_bytes": budget.outside, "reserve_limit_bytes": budget.reserve_limit,
        "needs_bytes": forecast.needs, "headroom_bytes": plan.headroom, "fits": plan.fits,
        "process_bytes": plan.process_bytes, "card_bytes": plan.process_bytes + budget.others,
        "phases": {phase: phases.get(phase) for phase in PHASES},
        "peak_phase": forecast.peak_phase,
        "owners_at_peak": {share.owner: share.nbytes for share in forecast.owners_at_peak},
        "reserved_range_bytes": list(forecast.reserved_range), "assumes": forecast.assumes,
        "basis": {"recorded_runs_on_this_card": basis.on_card, "recorded_runs_in_all": basis.in_all,
                  "worst_error_percent": basis.worst_percent},
    }


def text_of_fit(forecast: dict[str, Any], config: RunConfig, budget: Budget, rungs: Sequence[Rung],
                speed: dict[str, Any] | None) -> str:
    """As `fit` writes it. `forecast`: the `document` of the plan, whose keys are here too; `config`: as it was said."""
    held = {"card": budget.card, "usable": budget.usable, "others": budget.others, "budget": budget.budget,
            "outside": budget.outside, "margin": budget.margin}
    return json.dumps({**forecast, "config": config.to_dict(), "card": budget.card, "budget": held,
                       "forecast": forecast, "tokens_per_s": speed, "ladder": in_rows(rungs)}, indent=1) + "\n"


def is_of_fit(text: str) -> bool:
    return is_own_json(text, "config", "forecast", "ladder")


def in_bytes(phases: Mapping[str, PhaseForecast]) -> dict[str, dict[str, int]]:
    return {phase: {"allocated_bytes": held.allocated, "reserved_bytes": held.reserved}
            for phase, held in phases.items()}


def in_rows(rungs: Sequence[Rung]) -> list[dict[str, Any]]:
    return [{"changes": rung.changes, "needs_bytes": rung.needs, "why": rung.why} for rung in rungs]


# ---- read by `explain`


def plan_from(document: Any) -> MemoryPlan | None:
    """Of either kind; None where it is none, or lacks what matters."""
    try:
        phases = _phases(document["phases"])
        formulas = document.get("formulas") or {}
        owners = tuple(OwnerShare(owner, int(nbytes), str(formulas.get(owner, "")))
                       for owner, nbytes in document["owners_at_peak"].items())
        low, high = document.get("reserved_range_bytes") or (0, 0)
        forecast = Forecast(
            str(document["trainer"]), int(document["params"]), phases, str(document["peak_phase"]), owners,
            int(document["needs_bytes"]), (int(low), int(high)), dict(document["assumes"]), host_bytes=0,
            checkpoint_bytes=0)
        usable, others, whole, outside = (int(document[f"{name}_bytes"])
                                          for name in ("usable", "others", "budget", "outside"))
        budget = Budget(str(document["card"] or "card"), usable, others, whole, outside)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    held = (most for phase in phases.values() for most in (phase.allocated, phase.reserved))
    figures = (forecast.params, forecast.needs, *forecast.reserved_range, usable, others, whole, outside, *held,
               *(share.nbytes for share in owners))
    if any(abs(figure) > LARGEST_BYTES for figure in figures):
        return None
    return MemoryPlan(forecast, budget) if phases and owners else None


def _phases(told: Any) -> dict[str, PhaseForecast]:
    """What `in_bytes` wrote; KeyError, TypeError, ValueError or AttributeError where it is something else."""
    return {str(phase): PhaseForecast(int(held["allocated_bytes"]), int(held["reserved_bytes"]))
            for phase, held in told.items() if held}


# ---- read by `train --plan`


@dataclass(frozen=True)
class PlanFile:
    """The run that `fit` decided on, as far as the file says."""

    path: str
    knobs: dict[str, Any]
    card: str = ""
    needs: int | None = None
    rungs: tuple[Rung, ...] | None = None

    def refuse_elsewhere(self) -> None:
        if self.card:
            raise self._differs([f"it was made for {with_article(self.card)}, and the run is not on an NVIDIA GPU"])

    def compare(self, plan: MemoryPlan) -> None:
        """DeviceError, naming what is not as planned here."""
        here, differences = plan.budget.card, []
        if self.card and here and self.card != here:
            differences.append(f"it was made for {with_article(self.card)}, and here is {with_article(here)}")
        if self.needs is not None and abs(plan.forecast.needs - self.needs) > SAME * self.needs:
            differences.append(f"by it the run needs {show_bytes(self.needs)}, and here, with torch "
                               f"{plan.forecast.assumes['torch']}, {show_bytes(plan.forecast.needs)}")
        if differences:
            raise self._differs(differences)

    def refuse_other_words(self, said: Iterable[Assignment]) -> None:
        """What the user says besides may not be what the plan has decided."""
        last = {each.key: each for each in said if each.key in DECIDED and each.key in self.knobs}
        differences = [f"{key}={shown(self.knobs[key])} there, and {each.source} says {shown(each.value)}"
                       for key, each in last.items() if each.value != self.knobs[key]]
        if differences:
            raise self._differs(differences)

    def rungs_of(self, config: RunConfig) -> tuple[Rung, ...]:
        """Smaller plans of this run; UsageError where one could not be taken up when memory runs out."""
        for rung in self.rungs or ():
            where = f"--plan {self.path}: the rung {rung.why or rung.changes}"
            try:
                smaller = replace(config, **rung.changes)
            except UsageError as error:
                raise UsageError(f"{where}: {error.what}", PLAN_AGAIN) from error
            if smaller.cuda_graphs is True and (config.cuda_graphs is not True or smaller.offload == "gradients"):
                raise UsageError(f"{where}: cuda_graphs=True is no way to need less, and works with no "
                                 "offload=gradients.", PLAN_AGAIN)
            if smaller.tokens_per_step != config.tokens_per_step:
                raise UsageError(f"{where} has {smaller.tokens_per_step:,} tokens in a step, and the run has "
                                 f"{config.tokens_per_step:,}.", PLAN_AGAIN)
        return self.rungs or ()

    def _differs(self, differences: Sequence[str]) -> DeviceError:
        return DeviceError(f"This is not the run that {self.path} plans: {'; '.join(differences)}.",
                           "Plan again for what you have: fitgpt fit; or train without --plan.")


def with_plan(assignments: Sequence[Assignment]) -> list[Assignment]:
    """What the plan decided comes first; the rest of what the user said may add to it, not contradict it."""
    path = {each.key: each.value for each in assignments}.get("plan")
    if not path:
        return list(assignments)
    planned = read(str(path))
    planned.refuse_other_words(assignments)
    return [*(Assignment(key, value, f"{path}: {key}") for key, value in planned.knobs.items()), *assignments]


def read(path: str) -> PlanFile:
    try:
        if Path(path).stat().st_size > LARGEST:
            raise ValueError("it is too large")
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--plan {path}: {error.strerror or error}.", "fitgpt fit writes one.") from error
    except (ValueError, RecursionError) as error:
        beside = Path(path).with_suffix(".plan.json")
        raise UsageError(f"--plan {path} is no plan: {error}.", f"--plan {shlex.quote(str(beside))} lies beside it."
                         if beside.is_file() else "fitgpt fit writes one.") from error
    if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
        raise UsageError(f"--plan {path} is no plan: it has no config.", "fitgpt fit writes one.")
    if document.get("schema", SCHEMA) != SCHEMA:
        raise UsageError(f"--plan {path} has schema {document['schema']!r}, and this fitgpt knows {SCHEMA}.",
                         f"Plan again: fitgpt fit -o {shlex.quote(path)}")
    card = document.get("card")
    return PlanFile(path, _knobs(path, document["config"]), card if isinstance(card, str) else "",
                    _needs(document.get("forecast")), _rungs(path, document.get("ladder")))


def _knobs(path: str, told: dict[str, Any]) -> dict[str, Any]:
    """Those that `train` knows, each checked as a flag would be."""
    known = knobs_of(RunConfig)
    return {key: checked(known[key], value, f"{path}: {key}={value!r}") for key, value in told.items()
            if key in known and key != "plan"}


def _needs(told: Any) -> int | None:
    """Of a forecast or of a rung."""
    needs = told.get("needs_bytes") if isinstance(told, dict) else None
    return needs if isinstance(needs, int) and not isinstance(needs, bool) else None


def _rungs(path: str, told: Any) -> tuple[Rung, ...] | None:
    """None where the file has no ladder that can be read: then one is made. Values are checked as a flag would be."""
    rungs: list[Rung] = []
    for each in told if isinstance(told, list) else []:
        needs = _needs(each)
        if needs is None or not isinstance(each.get("changes"), dict):
            return None
        changes = each["changes"]
        if other := sorted(changes.keys() - MAY_CHANGE):
            raise UsageError(f"--plan {path}: a rung changes {', '.join(other)}; smaller plans of the same run differ "
                             f"in {', '.join(sorted(MAY_CHANGE))}.", PLAN_AGAIN)
        rungs.append(Rung(_knobs(f"{path}: a rung", changes), needs, str(each.get("why", ""))))
    return tuple(rungs) if isinstance(told, list) else None
