"""The fix buttons: for each way to hold less the smallest change that makes the run fit, and what it saves.

Which changes there are, memory/changes.py says; here each family becomes one button.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes
from ..planning import forecast
from ..planning.changes import Option, single_changes
from .answers import Answer, fits, replayed
from .settings import Asked, as_settings

FEW = 3  # where a run fits as it is, a third of its layers is a first step

# Every family of memory/changes.py, the ones that cost least first.
LABELS = {
    "trainer": "train it with fitgpt", "compile": "compile the model", "loss": "chunked loss: {loss_chunk} tokens",
    "evaluation": "evaluate {eval_batch_size} at a time", "batch": "batch {batch_size} × {gradient_accumulation_steps}",
    "recompute": "recompute {layers}", "casts": "half-precision copies freed at once",
    "gradients": "gradients freed after a step", "states": "optimizer made early", "offload": "{offload} on the host",
    "weights": "bfloat16 weights", "residual": "bfloat16 residual stream", "adam8bit": "8-bit Adam", "muon": "Muon",
    "step_in_backward": "step in backward", "accumulation": "no accumulation", "block": "block of {block_size}",
}


def families(asked: Asked) -> Answer:
    """The buttons to ask for, in the order in which they stand."""
    found = {option.change.family for option in _options(asked)}
    known = [family for family in LABELS if family in found]
    return {"families": [*known, *sorted(found - set(known))]}


def fix(asked: Asked, family: str) -> Answer:
    """The family's smallest change that makes the run fit, else its largest; None where it saves nothing."""
    setting, limit = asked.place.setting, asked.place.budget.reserve_limit
    config = forecast.settled(asked.config, setting, asked.trainer)
    before = replayed(config, setting, asked.trainer).peak
    fitting = fits(config, setting, asked.trainer, limit)
    options = [option for option in _options(asked) if option.change.family == family]
    if not options:
        return {"fix": None}

    def fits_with(option: Option) -> bool:
        return fits(option.config, setting, option.change.trainer, limit)

    chosen = options[0] if fitting else _smallest(options, fits_with)
    if family == "recompute":
        chosen = _of_some_layers(config, chosen, fitting, fits_with)
    after = replayed(chosen.config, setting, chosen.change.trainer).peak
    enough = fits_with(chosen)
    if before - after < MiB and (fitting or not enough):
        return {"fix": None}
    change = chosen.change
    settings = as_settings(config, chosen.config)
    if change.trainer != asked.trainer:
        settings["trainer"] = change.trainer
    return {"fix": {
        "family": family, "label": _label(chosen), "settings": settings, "flags": " ".join(change.flags),
        "saves": change.what, "costs": change.slower, "peak": after, "saved": before - after, "fits": enough,
        "kind": change.kind,
        "effect": f"{show_bytes(abs(before - after))} {'less' if after <= before else 'more'} at the peak"}}


def _options(asked: Asked) -> list[Option]:
    config = forecast.settled(asked.config, asked.place.setting, asked.trainer)
    return list(single_changes(config, asked.trainer, compiles=asked.place.setting.compiles))


def _smallest(options: Sequence[Option], fits_with: Any) -> Option:
    """Of changes in order, each saving more than the one before: the first that is enough, else the last."""
    if not fits_with(options[-1]):
        return options[-1]
    return next((option for option in options[:-1] if fits_with(option)), options[-1])


def _of_some_layers(config: RunConfig, all_layers: Option, fitting: bool, fits_with: Any) -> Option:
    """The same, in as few layers as are enough."""
    before, after = set(config.levels), set(all_layers.config.levels)
    if len(before) > 1 or len(after) > 1 or not (fitting or fits_with(all_layers)):
        return all_layers

    def of(layers: int) -> Option:
        levels = f"{layers}*{next(iter(after))},{config.n_layer - layers}*{next(iter(before))}"
        try:
            changed = replace(all_layers.config, recompute=levels)
        except UsageError:
            return all_layers
        change = all_layers.change._replace(flags=(f"--recompute={levels}",))
        return Option(change, changed)

    if fitting:
        return of(-(-config.n_layer // FEW)) if config.n_layer > 1 else all_layers
    too_few, enough = 0, config.n_layer
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits_with(of(middle)) else (middle, enough)
    return all_layers if enough == config.n_layer else of(enough)


def _label(option: Option) -> str:
    changed = option.config
    counted = re.match(r"(\d+)\*", changed.recompute)
    number = int(counted[1]) if counted else changed.n_layer
    words = {**changed.to_dict(), "layers": f"{number} layer{'s' if number > 1 else ''}"}
    if changed.offload == "gradients":
        words["offload"] = "optimizer and gradients"
    return LABELS.get(option.change.family, " ".join(option.change.flags)).format(**words)
