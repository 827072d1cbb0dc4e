"""How a card was filled when memory ran out: this process, what it holds outside PyTorch, other processes, the rest."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.units import GiB, MiB
from ..hardware.gpus import Card
from ..nouns import Budget
from ..planning.forecast import budget_for
from ..sights import MemoryShare, OutOfMemory

# What a process holds outside PyTorch's allocator, context and kernels: 109 to 767 MiB were seen (gpus.csv). Where a
# message does not tell it from other processes, what is above this is theirs.
OUTSIDE_AT_MOST = GiB


@dataclass(frozen=True)
class Filling:
    """Bytes; None: not to be told from the message."""

    total: int
    free: int
    allocated: int | None = None
    unallocated: int | None = None
    process: int | None = None
    others: int | None = None
    pids: tuple[tuple[int, int], ...] = ()  # the other processes, as listed

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated

    @property
    def beside(self) -> int:
        """Neither free nor PyTorch's: what this process holds outside it, and other processes."""
        held = self.reserved if self.reserved is not None else self.process or 0
        return max(self.total - self.free - held, 0)

    @property
    def outside(self) -> int | None:
        if self.process is None or self.reserved is None:
            return None
        return max(self.process - self.reserved, 0)

    @property
    def unsaid(self) -> bool:
        """The message ends before it says what this process, or PyTorch, holds."""
        return self.process is None and self.reserved is None

    @property
    def taken(self) -> int:
        return max(self.total - self.free, 0)

    @property
    def others_at_least(self) -> int:
        if self.others is not None:
            return self.others
        return 0 if self.unsaid else max(self.beside - OUTSIDE_AT_MOST, 0)

    @property
    def spilled(self) -> bool:
        """Windows and WSL move what does not fit into the machine's RAM: more is held than the card has."""
        return (self.reserved or 0) > self.total

    @property
    def limit(self) -> int | None:
        """The most PyTorch could have reserved then."""
        return None if self.reserved is None or self.spilled else self.reserved + self.free


def filling(message: OutOfMemory) -> Filling | None:
    if message.total is None or message.free is None:
        return None
    process, listed = message.process, list(message.others)
    if process is None and listed and message.reserved is not None:  # in a container the own one is listed with others
        own = min((each for each in listed if each[1] >= message.reserved - 8 * MiB), key=lambda each: each[1],
                  default=None)
        if own is not None:
            listed.remove(own)
            process = own[1]
    others = None if process is None else max(message.total - message.free - process, sum(size for _, size in listed))
    return Filling(message.total, message.free, message.allocated, message.unallocated, process, others, tuple(listed))


def budget_of(fill: Filling, card: Card | None, allowed: int | None) -> Budget | None:
    """What the run could have held, by the message's own figures."""
    if fill.limit is None:
        return None
    outside = fill.outside if fill.outside is not None else min(
        fill.beside, card.outside_mib * MiB if card and card.outside_mib else fill.beside)
    limit = fill.limit if allowed is None else min(fill.limit, allowed)
    others = max(fill.beside - outside, 0)
    return Budget(card.name if card else f"card of {fill.total / GiB:.2f} GiB", fill.total, others, limit + outside,
                  outside, ("The figures are the message's own.",))


def budget_on(card: Card | None, fill: Filling | None, others: int, allowed: int | None) -> Budget | None:
    """What the run could have held of a card beside others, where the message does not say how it was filled; None:
    the card is not known, or what CUDA gives of it."""
    if card is None or card.usable_mib is None or card.outside_mib is None:
        return None
    others = max(others, fill.others_at_least) if fill else others
    found = budget_for(card, others=others)
    usable = fill.total if fill else found.usable
    left = max(usable - others, 0)
    return found._replace(usable=usable, budget=left if allowed is None else min(left, allowed + found.outside))


def shares_of(fill: Filling, message: OutOfMemory) -> tuple[MemoryShare, ...]:
    """Every MiB of the card, once."""
    shares = []
    if fill.allocated is not None:
        private = f"{message.private / MiB:,.0f} MiB of it in recorded CUDA graphs" if message.private else ""
        shares.append(MemoryShare("tensors of this process", fill.allocated, private))
    if fill.unallocated is not None:
        shares.append(MemoryShare("reserved by PyTorch, in no tensor", fill.unallocated))
    if fill.reserved is None and fill.process is not None:
        shares.append(MemoryShare("this process", fill.process))
    if fill.spilled:
        return tuple(shares)
    if fill.outside is not None:
        shares.append(MemoryShare("this process outside PyTorch", fill.outside, "context and kernels"))
    listed = ", ".join(f"process {pid}: {size / MiB:,.0f} MiB" for pid, size in fill.pids)
    if fill.unsaid:
        unsaid = "the message does not say by whom"
        shares.append(MemoryShare("taken", fill.beside, f"{listed}; of the rest {unsaid}" if listed else unsaid))
    elif fill.others is not None:
        shares.append(MemoryShare("other processes", fill.others, listed))
    elif fill.beside:
        shares.append(MemoryShare("neither free nor PyTorch's", fill.beside,
                                  "this process's context, and other processes"))
    return (*shares, MemoryShare("free", fill.free))
