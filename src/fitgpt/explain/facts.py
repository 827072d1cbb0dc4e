"""All that is known of a case when the rules are asked: the message, how the card was filled, and the run if named."""

from __future__ import annotations

from dataclasses import dataclass

from ..nouns import MemoryPlan
from ..sights import OutOfMemory
from .about import Run
from .filling import Filling
from .match import Match
from .unsaid import Tried


@dataclass(frozen=True)
class Facts:
    """What is known of a refusal, as far as it is."""

    message: OutOfMemory
    phase: str = ""               # load, eval, forward, backward or step, by the traceback; empty: not known
    fill: Filling | None = None
    match: Match | None = None    # the event of the run's tape that asked
    run: Run | None = None
    plan: MemoryPlan | None = None  # the run within what the message leaves it, or else within its card
    tried: tuple[Tried, ...] = ()   # ways in which it may have been run; `run` is the one of them that explains best

    @property
    def asked(self) -> int:
        return self.message.asked or 0

    @property
    def missing(self) -> int:
        """What was asked for and not free."""
        return max(self.asked - (self.fill.free if self.fill else 0), 0)

    @property
    def unallocated(self) -> int:
        return (self.fill.unallocated if self.fill else None) or 0

    @property
    def reserved(self) -> int:
        return (self.fill.reserved if self.fill else None) or 0

    @property
    def in_phase(self) -> str:
        return self.match.phase if self.match else self.phase

    @property
    def owner(self) -> str:
        return self.match.event.owner if self.match else ""

    @property
    def by_the_card(self) -> bool:
        """Whether the plan is within the card's figures, as the message does not say what was left of it."""
        return self.fill is None or self.fill.limit is None

    @property
    def vendor(self) -> str:
        """Of the card, by the words of the message."""
        said = f"{self.message.kind} {self.message.wording} {self.message.words}".lower()
        return "amd" if "hip" in said or "rocblas" in said else "intel" if self.message.kind == "xpu" else "nvidia"

    @property
    def of_nanogpt(self) -> bool:
        return self.run is not None and self.run.trainer == "nanogpt"
