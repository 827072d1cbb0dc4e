"""OomMessage → GpuUsage: who held the GPU's memory when it ran out, and the budget that this left for the run."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.units import GiB, MiB
from ..hardware.gpus import GpuModel
from ..planning.budget import Budget, budget_for
from .oom_message import OomMessage

# Non-PyTorch memory of a process, CUDA context and kernels: 109 to 767 MiB were measured (cards.csv). Where a message
# does not separate it from other processes, the part above this belongs to them.
MAX_OUTSIDE = GiB


@dataclass(frozen=True)
class GpuUsage:
    """Bytes of one GPU. None: the message does not contain the figure."""

    total: int
    free: int
    allocated: int | None = None
    unallocated: int | None = None  # reserved by PyTorch but unallocated
    process: int | None = None      # of this process, non-PyTorch memory included
    others: int | None = None
    pids: tuple[tuple[int, int], ...] = ()  # other processes, as listed

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated

    @property
    def used(self) -> int:
        return max(self.total - self.free, 0)

    @property
    def not_pytorch(self) -> int:
        """Neither free nor reserved by PyTorch: non-PyTorch memory of this process, and other processes."""
        held = self.reserved if self.reserved is not None else self.process or 0
        return max(self.total - self.free - held, 0)

    @property
    def outside(self) -> int | None:
        """Non-PyTorch memory of this process."""
        if self.process is None or self.reserved is None:
            return None
        return max(self.process - self.reserved, 0)

    @property
    def truncated(self) -> bool:
        """The message ends before the figures of this process and of PyTorch."""
        return self.process is None and self.reserved is None

    @property
    def others_at_least(self) -> int:
        if self.others is not None:
            return self.others
        return 0 if self.truncated else max(self.not_pytorch - MAX_OUTSIDE, 0)

    @property
    def spilled(self) -> bool:
        """More is reserved than the GPU has: Windows and WSL move the rest into CPU RAM."""
        return (self.reserved or 0) > self.total

    @property
    def limit(self) -> int | None:
        """The most that PyTorch could have reserved."""
        return None if self.reserved is None or self.spilled else self.reserved + self.free


def usage_in(message: OomMessage) -> GpuUsage | None:
    """None: the message does not contain the GPU's total and free memory."""
    if message.total is None or message.free is None:
        return None
    process, listed = message.process, list(message.others)
    if process is None and listed and message.reserved is not None:  # a container lists the own process with the others
        own = min((each for each in listed if each[1] >= message.reserved - 8 * MiB), key=lambda each: each[1],
                  default=None)
        if own is not None:
            listed.remove(own)
            process = own[1]
    others = None if process is None else max(message.total - message.free - process, sum(size for _, size in listed))
    return GpuUsage(message.total, message.free, message.allocated, message.unallocated, process, others, tuple(listed))


def budget_at_failure(message: OomMessage, usage: GpuUsage | None, card: GpuModel | None, others: int) -> Budget | None:
    """What the run could have reserved, by the message's figures or else by the card's; None if neither is known.

    `others`: bytes of other processes, for a message that does not contain them.
    """
    if usage is not None and usage.limit is not None:
        outside = usage.outside if usage.outside is not None else min(
            usage.not_pytorch, card.outside_mib * MiB if card and card.outside_mib else usage.not_pytorch)
        limit = usage.limit if message.allowed is None else min(usage.limit, message.allowed)
        return Budget(card.name if card else f"GPU of {usage.total / GiB:.2f} GiB", usage.total,
                      max(usage.not_pytorch - outside, 0), limit + outside, outside,
                      ("The figures are those of the message.",))
    if card is None or card.usable_mib is None or card.outside_mib is None:
        return None
    others = max(others, usage.others_at_least) if usage else others
    budget = budget_for(card, others=others)
    usable = usage.total if usage else budget.usable
    left = max(usable - others, 0)
    return budget._replace(usable=usable, budget=left if message.allowed is None
                           else min(left, message.allowed + budget.outside))
