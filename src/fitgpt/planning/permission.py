"""What may be changed to make a run fit? Some things always, some only if the user says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from ..config.fields import nearest
from ..config.run_config import FROZEN_ON_RESUME, RunConfig, gpt2_shapes
from ..core.errors import UsageError
from ..memory.setting import Setting

# From what nobody minds to what only the user may say.
PERMISSIONS = ("free", "places", "lossy", "rules", "context", "model")

# Savers that round: `--allow lossy` means all of them, and each may be allowed by its name.
ROUNDING: dict[str, dict[str, Any]] = {
    "adam8bit": {"optimizer": "adam8bit"}, "weights": {"weights": "bfloat16"}, "residual": {"residual": "bfloat16"}}
# Savers that train by another rule: only by name, and one of them excludes accumulation.
OTHER_RULES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"}, "step_in_backward": {"step_in_backward": True, "grad_clip": 0.0}}
# Savers that cost nothing, and that others need: what is on the host is neither kept nor made late.
COSTLESS: dict[str, Any] = {"gradients": "freed", "states": "early"}
WORDS = ("lossy", "context", "model", *ROUNDING, *OTHER_RULES)
PLACES = ("none", "optimizer", "gradients")  # that `offload` names, the fastest first


class Way(NamedTuple):
    """Savers to use together, and the permission that takes."""

    permission: str
    knobs: dict[str, Any]
    elsewhere: bool  # whether more lives in the host's memory than was asked for


def parse_allow(text: str) -> frozenset[str]:
    """'lossy' or 'adam8bit,context' → the names of what is allowed."""
    words = [word for word in text.replace(" ", ",").split(",") if word]
    for word in words:
        if word not in WORDS:
            near = nearest(word, WORDS)
            raise UsageError(f"--allow {text}: {word!r} is none of {', '.join(WORDS)}.",
                             f"Did you mean --allow {near[0]}?" if near else "--allow lossy")
    return frozenset({*words, *(ROUNDING if "lossy" in words else ())} - {"lossy"})


def in_words(allow: frozenset[str]) -> str:
    """As one would type it."""
    together = frozenset({"lossy", *ROUNDING})
    names = allow - together | {"lossy"} if allow & {"lossy"} or allow >= set(ROUNDING) else allow
    return ",".join(word for word in WORDS if word in names)


def refused(config: RunConfig, allow: frozenset[str]) -> str:
    """A sentence on what was allowed and cannot be: a model that exists already has its shape and its states."""
    if config.init_from == "resume":
        kept = sorted(word for word in allow if word in ("context", "model", "residual", "weights", *OTHER_RULES)
                      or ROUNDING.get(word, {}).keys() & FROZEN_ON_RESUME)
        return f"A resumed run stays what it was: nothing is done with --allow {','.join(kept)}." if kept else ""
    if config.init_from != "scratch" and "model" in allow:
        of = config.init_from if config.init_from in gpt2_shapes else "its weights"
        return f"The model has the shape of {of}: nothing is done with --allow model."
    return ""


def permitted(config: RunConfig, allow: frozenset[str]) -> frozenset[str]:
    if config.init_from == "resume":
        return frozenset()
    return allow - {"model"} if config.init_from != "scratch" else allow


def ways(config: RunConfig, setting: Setting, allow: frozenset[str]) -> list[Way]:
    """Every set of savers that may be used and that go together, the least permission first."""
    found = []
    costless = {knob: value for knob, value in COSTLESS.items() if getattr(config, knob) != value}
    for names in _sets(config, setting, allow):
        knobs = {knob: value for name in names for knob, value in {**ROUNDING, **OTHER_RULES}[name].items()}
        for place in PLACES:
            told = {**knobs, **costless, "offload": place}
            if "step_in_backward" in names:
                told |= {"batch_size": config.batch_size * config.gradient_accumulation_steps,
                         "gradient_accumulation_steps": 1}
            if _goes_together(config, told):
                dearer = PLACES.index(place) > PLACES.index(config.offload)
                saver = "rules" if set(names) & set(OTHER_RULES) else "lossy" if names else ""
                found.append(Way(saver or ("places" if dearer else "free"), told, dearer))
    return sorted(found, key=lambda way: PERMISSIONS.index(way.permission))


def _sets(config: RunConfig, setting: Setting, allow: frozenset[str]) -> Iterator[tuple[str, ...]]:
    known = {**ROUNDING, **OTHER_RULES}
    names = [name for name in known if name in permitted(config, allow)
             and any(getattr(config, knob) != value for knob, value in known[name].items())
             and (setting.has_bf16 or "bfloat16" not in known[name].values())]
    for count in range(len(names) + 1):
        yield from (each for each in combinations(names, count) if not {"muon", "adam8bit"} <= set(each))


def _goes_together(config: RunConfig, knobs: dict[str, Any]) -> bool:
    try:
        replace(config, **knobs)
    except UsageError:
        return False
    return True
