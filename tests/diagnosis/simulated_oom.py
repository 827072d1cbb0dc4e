"""What PyTorch would print: the message of a run that exceeds a cap, its figures taken from the replay."""

from __future__ import annotations

from typing import NamedTuple

from fitgpt.core.units import GiB, KiB, MiB
from fitgpt.diagnosis.case import ExplainedRun
from fitgpt.memory.allocator import CachingAllocator, ExpandableAllocator, MemoryBlock, allocation_size
from fitgpt.memory.tape import EMPTY_CACHE, Event, round_size
from fitgpt.planning.budget import Budget

BY_PROCESS = "Including non-PyTorch memory, this process has {process} memory in use. "
TEXT = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of {total} "
        "of which {free} is free. {by_process}Of the allocated memory {allocated} is allocated by PyTorch, and "
        "{unallocated} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)")
OLD_TEXT = ("RuntimeError: CUDA out of memory. Tried to allocate {size} (GPU 0; {total} total capacity; {allocated} "
            "already allocated; {free} free; {reserved} reserved in total by PyTorch)")


class SimulatedOom(NamedTuple):
    event: Event
    phase: str
    text: str
    old_text: str
    reserved: int
    allocated: int


def printed(nbytes: int) -> str:
    """As torch's format_size."""
    if nbytes <= KiB:
        return f"{nbytes} bytes"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if nbytes <= unit * KiB:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes / GiB:.2f} GiB"


def simulate_oom(run: ExplainedRun, budget: Budget) -> SimulatedOom | None:
    """None where the run fits."""
    cap = budget.reserve_limit
    allocator = ExpandableAllocator(cap) if run.expandable else CachingAllocator(cap)
    blocks: dict[str, MemoryBlock] = {}
    for number, event in enumerate(run.tape.events):
        if event.name == EMPTY_CACHE:
            allocator.release_cached_blocks()
        elif not event.alloc:
            allocator.free(blocks.pop(event.name))
        elif (block := allocator.malloc(round_size(event.nbytes), event.pool)) is not None:
            blocks[event.name] = block
        else:
            phase = next(phase for phase, start, end in run.tape.phases if start <= number < end)
            allocated, reserved = sum(block.size for block in blocks.values()), allocator.reserved
            sizes = {"size": allocation_size(round_size(event.nbytes)), "total": budget.usable, "free": cap - reserved,
                     "allocated": allocated, "unallocated": reserved - allocated, "reserved": reserved,
                     "process": reserved + budget.outside}
            texts = {name: printed(size) for name, size in sizes.items()}
            texts["by_process"] = BY_PROCESS.format(**texts)
            return SimulatedOom(event, phase, TEXT.format(**texts), OLD_TEXT.format(**texts), reserved, allocated)
    return None
