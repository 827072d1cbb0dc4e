"""How well have forecasts held so far? Counted by accuracy.py, which compares them with recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

from ..nouns import Basis, MemoryPlan
from .setting import EXPANDABLE

FILE = Path(__file__).parent / "basis.json"


def basis_of(plan: MemoryPlan) -> Basis:
    """The recorded runs of that trainer, and the worst of all their forecasts; nanoGPT's with its own allocator, or
    with the one it is asked to use."""
    trainer, allocator = plan.forecast.trainer, plan.forecast.assumes["allocator"]
    kind = f"{trainer}, {allocator}" if trainer == "nanogpt" and allocator == EXPANDABLE else trainer
    rows = [row for row in json.loads(FILE.read_text(encoding="utf-8"))["runs"] if row["trainer"] == kind]
    errors = [row["worst_percent"] for row in rows]
    return Basis(sum(row["card"] == plan.budget.card for row in rows), len(rows),
                 max(errors, key=abs) if errors else None)
