"""What the page lets one choose: cards, models to begin with, and every knob that moves memory, each with its help."""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..config.command_options import PlanQuestions
from ..config.fields import knobs_of
from ..config.memory_savers import LEVELS
from ..config.run_config import RunConfig
from ..core.errors import DeviceError
from ..hardware import gpus as cards
from ..hardware.nvidia import gpus
from ..memory.setting import KNOWN_TORCH
from .presets import PRESETS
from .settings import KNOBS

EXAMPLE = "RTX 4070"  # the card to begin with where none is here
GROUPS = {
    "size": KNOBS[:KNOBS.index("recompute")],
    "less": KNOBS[KNOBS.index("recompute"):KNOBS.index("dtype")],
    "more": KNOBS[KNOBS.index("dtype"):],
}
# Where a slider halts. Any other number can be typed beside it.
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
STOPS: dict[str, tuple[int, ...]] = {
    "batch_size": _COUNTS, "gradient_accumulation_steps": _COUNTS, "n_layer": (*range(1, 37), 40, 42, 44, 48, 56, 64),
    "block_size": (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    "n_embd": (), "n_head": (),  # as each other allows: they come with the plan
    "eval_batch_size": (0, *_COUNTS), "loss_chunk": (0, 128, 256, 512, 1024, 2048, 4096, 8192),
}
OTHERS_MIB = (0, 128, 256, 512, 768, 1024, 1536, 2118, 2560, 3072, 4096, 5120, 6144, 8192)


def form() -> dict[str, Any]:
    own = knobs_of(PlanQuestions)
    return {
        "version": __version__, "example": EXAMPLE, "here": _here(),
        "cards": [{"name": card.name, "memory": f"{card.memory_gb} GB", "group": _family(card)}
                  for card in cards.load() if card.vendor in ("nvidia", "amd")],
        "presets": [{"group": each.group, "name": each.name, "knobs": {key: str(value) for key, value
                                                                       in each.knobs.items()}} for each in PRESETS],
        "groups": {group: [_control(name) for name in names] for group, names in GROUPS.items()},
        "trainers": list(own["trainer"].choices), "torch": list(KNOWN_TORCH), "others": OTHERS_MIB,
        "help": {name: own[name].help for name in ("gpu", "others", "budget", "trainer", "torch")},
    }


def _control(name: str) -> dict[str, Any]:
    """A knob as its dataclass field declares it: nothing is said twice."""
    one = knobs_of(RunConfig)[name]
    choices = list(one.choices)
    if name == "recompute":
        choices = list(LEVELS)
    elif one.kind in ("bool", "auto"):
        choices = ["auto", "True", "False"] if one.kind == "auto" else []
    kind = "switch" if one.kind == "bool" else "choice" if choices else "slider" if name in STOPS else "number"
    return {"name": name, "kind": kind, "default": str(one.default), "help": one.help, "choices": choices,
            "stops": list(STOPS.get(name, ())), "whole": one.kind == "int"}


def _family(card: cards.Card) -> str:
    """RTX 40, RTX 30, data centre …: by the name, which is how people look for theirs."""
    words = card.name.split()
    if card.vendor == "amd":
        return "AMD: needs a budget"
    if words[0] in ("RTX", "GTX") and words[1].isdecimal() and len(words[1]) == 4 and words[1] != "6000":
        return f"{words[0]} {words[1][:2]}"
    return "workstation" if words[0] in ("RTX", "TITAN") else "data centre"


def _here() -> str:
    """The name of the GPU of this machine, as the driver tells it; empty where there is none."""
    try:
        found = gpus()
    except DeviceError:
        return ""
    return max(found, key=lambda gpu: gpu.free_bytes or 0).name if found else ""
