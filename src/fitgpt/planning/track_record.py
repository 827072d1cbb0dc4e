"""How well have forecasts held so far? Counted by accuracy.py, which compares them with recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

from ..memory.padding import ODD_SIZES
from ..memory.setting import EXPANDABLE
from ..nouns import Basis, MemoryPlan

FILE = Path(__file__).parent / "track_record.json"


def basis_of(plan: MemoryPlan) -> Basis:
    """The recorded runs of that trainer, and the worst of all their forecasts. nanoGPT's with its own allocator, or
    with the one it is asked to use; and those apart in which the compiler weighs whether to pad."""
    trainer, assumes = plan.forecast.trainer, plan.forecast.assumes
    kind = kind_of(trainer, expandable=assumes["allocator"] == EXPANDABLE, odd=ODD_SIZES in assumes["compile"])
    rows = [row for row in json.loads(FILE.read_text(encoding="utf-8"))["runs"] if row["trainer"] == kind]
    errors = [row["worst_percent"] for row in rows]
    return Basis(sum(row["card"] == plan.budget.card for row in rows), len(rows),
                 max(errors, key=abs) if errors else None)


def kind_of(trainer: str, *, expandable: bool, odd: bool) -> str:
    if trainer != "nanogpt":
        return trainer
    return f"{trainer}, {EXPANDABLE}" if expandable else f"{trainer}, {ODD_SIZES}" if odd else trainer
