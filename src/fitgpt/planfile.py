"""plan.json, as `train --plan` reads it: the run that `fit` decided on, and whether this is that run.

Read leniently: what is missing is not compared. What is there must hold, or the run is refused.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import RunConfig
from .errors import DeviceError, UsageError
from .fit.ladder import MAY_CHANGE, Rung
from .knobs import Assignment, checked, knobs_of, shown
from .nouns import MemoryPlan
from .place import Place
from .units import show_bytes

SCHEMA = 1
PLAN_AGAIN = "Plan again: fitgpt fit; or train without --plan."
LARGEST = 64 * 2**20  # bytes; a plan has some kilobytes
SAME = 0.01           # of what is needed: a plan made elsewhere for this card may know its figures less well
# What a run's memory depends on: the plan has decided these.
DECIDED = ("batch_size", "gradient_accumulation_steps", "block_size", "n_layer", "n_head", "n_embd", "dropout", "bias",
           "vocab_size", "dtype", "compile", "cuda_graphs", "recompute", "grad_checkpoint", "weights", "residual",
           "optimizer", "offload", "step_in_backward", "loss_chunk", "eval_batch_size", "eval_block_size")


@dataclass(frozen=True)
class PlanFile:
    path: str
    knobs: dict[str, Any]
    card: str = ""
    needs: int | None = None
    rungs: tuple[Rung, ...] | None = None

    def refuse_elsewhere(self) -> None:
        if self.card:
            raise self._differs([f"it was made for {_article(self.card)}, and the run is not on an NVIDIA GPU"])

    def compare(self, found: Place, plan: MemoryPlan) -> None:
        """DeviceError, naming what is not as planned."""
        here, differences = found.budget.card, []
        if self.card and here and self.card != here:
            differences.append(f"it was made for {_article(self.card)}, and here is {_article(here)}")
        if self.needs is not None and abs(plan.forecast.needs - self.needs) > SAME * self.needs:
            differences.append(f"by it the run needs {show_bytes(self.needs)}, and here, with torch "
                               f"{found.setting.torch}, {show_bytes(plan.forecast.needs)}")
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
        raise UsageError(f"--plan {path} is no plan: {error}.", "fitgpt fit writes one.") from error
    if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
        raise UsageError(f"--plan {path} is no plan: it has no config.", "fitgpt fit writes one.")
    if document.get("schema", SCHEMA) != SCHEMA:
        raise UsageError(f"--plan {path} has schema {document['schema']!r}, and this fitgpt knows {SCHEMA}.",
                         f"Plan again: fitgpt fit -o {shlex.quote(path)}")
    return PlanFile(path, _knobs(path, document["config"]), _card(document), _needs(document.get("forecast")),
                    _rungs(path, document.get("ladder")))


def _knobs(path: str, told: dict[str, Any]) -> dict[str, Any]:
    """Those that `train` knows, each checked as a flag would be."""
    known = knobs_of(RunConfig)
    return {key: checked(known[key], value, f"{path}: {key}={value!r}") for key, value in told.items()
            if key in known and key != "plan"}


def _card(document: dict[str, Any]) -> str:
    told = document.get("card")
    if isinstance(told, dict):
        told = told.get("name")
    return told if isinstance(told, str) else ""


def _needs(forecast: Any) -> int | None:
    told = [forecast.get(key) for key in ("needs", "needs_bytes")] if isinstance(forecast, dict) else []
    return next((each for each in told if isinstance(each, int) and not isinstance(each, bool)), None)


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


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"
