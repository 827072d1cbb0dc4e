"""The page's fix buttons: per family of planning/changes.py the smallest change that makes the run fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..config.memory_savers import SAVER_LABELS
from ..config.resolve import resolve_run
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes
from ..planning.changes import FAMILIES, ChangedRun, single_changes, smallest
from .answers import Answer, fits, replayed
from .query import PageQuery, as_settings

FEW = 3  # if the run fits already, the button recomputes a third of the layers

# The label of every family of planning/changes.py.
LABELS = {
    **SAVER_LABELS, "trainer": "train with fitgpt", "compile": "compile the model",
    "evaluation": "evaluation batch {eval_batch_size}", "batch": "batch {batch_size} × {gradient_accumulation_steps}",
    "accumulation": "no gradient accumulation", "block": "block_size {block_size}",
}


def families(query: PageQuery) -> Answer:
    """The families that apply to this run, in the order of their buttons."""
    found = {option.change.family for option in _options(query)}
    return {"families": [family for family in FAMILIES if family in found]}


def fix(query: PageQuery, family: str) -> Answer:
    """The family's smallest change that makes the run fit, else its largest; None if it saves nothing."""
    platform, limit = query.target.platform, query.target.budget.reserve_limit
    config = resolve_run(query.config, platform, query.trainer)
    before = replayed(config, platform, query.trainer).peak
    fitting = fits(config, platform, query.trainer, limit)
    options = [option for option in _options(query) if option.change.family == family]
    if not options:
        return {"fix": None}

    def fits_with(option: ChangedRun) -> bool:
        return fits(option.resolved(platform), platform, option.change.trainer, limit)

    chosen = options[0] if fitting else smallest(options, fits_with) or options[-1]
    if family == "recompute":
        chosen = _of_some_layers(config, chosen, fitting, fits_with)
    after = replayed(chosen.resolved(platform), platform, chosen.change.trainer).peak
    enough = fits_with(chosen)
    if before - after < MiB and (fitting or not enough):
        return {"fix": None}
    change = chosen.change
    settings = as_settings(config, chosen.config)
    if change.trainer != query.trainer:
        settings["trainer"] = change.trainer
    return {"fix": {
        "family": family, "label": _label(chosen), "settings": settings, "flags": " ".join(change.flags),
        "saves": change.what, "costs": change.slower, "peak": after, "saved": before - after, "fits": enough,
        "kind": change.kind,
        "effect": f"{show_bytes(abs(before - after))} {'less' if after <= before else 'more'} at the peak"}}


def _options(query: PageQuery) -> list[ChangedRun]:
    config = resolve_run(query.config, query.target.platform, query.trainer)
    return list(single_changes(config, query.trainer, compiles=query.target.platform.compiles))


def _of_some_layers(config: RunConfig, all_layers: ChangedRun, fitting: bool, fits_with: Any) -> ChangedRun:
    """The same change in as few layers as make the run fit."""
    before, after = set(config.levels), set(all_layers.config.levels)
    if len(before) > 1 or len(after) > 1 or not (fitting or fits_with(all_layers)):
        return all_layers

    def of(layers: int) -> ChangedRun:
        levels = f"{layers}*{next(iter(after))},{config.n_layer - layers}*{next(iter(before))}"
        try:
            changed = replace(all_layers.config, recompute=levels)
        except UsageError:
            return all_layers
        change = all_layers.change._replace(flags=(f"--recompute={levels}",))
        return ChangedRun(change, changed)

    if fitting:
        return of(-(-config.n_layer // FEW)) if config.n_layer > 1 else all_layers
    too_few, enough = 0, config.n_layer
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits_with(of(middle)) else (middle, enough)
    return all_layers if enough == config.n_layer else of(enough)


def _label(option: ChangedRun) -> str:
    changed = option.config
    counted = re.match(r"(\d+)\*", changed.recompute)
    number = int(counted[1]) if counted else changed.n_layer
    words = {**changed.to_dict(), "layers": f"{number} layer{'s' if number > 1 else ''}"}
    if changed.offload == "gradients":
        words["offload"] = "optimizer and gradients"
    return LABELS.get(option.change.family, " ".join(option.change.flags)).format(**words)
