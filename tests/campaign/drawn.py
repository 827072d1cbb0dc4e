"""Options of a run, drawn at random from every combination that a run accepts."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from tests.helpers import OPTIMIZER_OPTIONS, accepted_settings

try:
    import bitsandbytes  # here, since it takes seconds: before the forks
except ImportError:
    bitsandbytes = None

DRAWN = (*OPTIMIZER_OPTIONS, "dtype", "gradients", "casts", "residual", "grad_checkpoint")


@cache
def accepted(**fixed: Any) -> list[dict[str, Any]]:
    libraries = ("own", "bitsandbytes") if bitsandbytes else ("own",)
    return [settings for settings in accepted_settings(*DRAWN, **fixed) if settings["adam8bit"] in libraries]


def drawn_settings(chance: random.Random, **fixed: Any) -> dict[str, Any]:
    return chance.choice(accepted(**fixed))
