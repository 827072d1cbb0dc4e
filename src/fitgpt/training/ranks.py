"""The only file that knows about ranks. For now there is one; data order is already the same for any number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.errors import UsageError


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1

    @property
    def writes(self) -> bool:
        """The rank that logs, saves and talks to the user."""
        return self.rank == 0


def require_one_process(environment: Mapping[str, str]) -> None:
    world = environment.get("WORLD_SIZE", "1").strip() or "1"
    if world != "1":
        raise UsageError(
            f"WORLD_SIZE is {world}: fitgpt trains with one process on one card for now.",
            "Start it without torchrun: fitgpt train …  (unset WORLD_SIZE if your shell still has it)")
