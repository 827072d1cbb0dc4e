"""How well have forecasts held so far? Counted by accuracy.py, which compares them with recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

from ..nouns import Basis, MemoryPlan

FILE = Path(__file__).parent / "basis.json"


def basis_of(plan: MemoryPlan) -> Basis:
    """The recorded runs of that trainer, and the worst of all their forecasts."""
    rows = [row for row in json.loads(FILE.read_text(encoding="utf-8"))["runs"]
            if row["trainer"] == plan.forecast.trainer]
    errors = [row["worst_percent"] for row in rows]
    return Basis(sum(row["card"] == plan.budget.card for row in rows), len(rows),
                 max(errors, key=abs) if errors else None)
