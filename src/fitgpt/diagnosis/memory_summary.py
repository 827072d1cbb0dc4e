"""Output of `torch.cuda.memory_summary()` → Diagnosis: what tensors hold, and what PyTorch has reserved beside them."""

from __future__ import annotations

import re

from ..core.units import GiB, KiB, MiB, TiB, show_bytes
from .diagnose import Cause, Diagnosis, MemoryShare, Remedy
from .oom_message import clean
from .rules import EXPANDABLE_SEGMENTS, FRAGMENTED_SHARE, LIST_PROCESSES, SMALLER_BATCH, TOOLS

_SIZE = r"\s*[|│]\s*(\d{1,15})\s*([KMGT]?)i?B"
_ROW = re.compile(rf"(Allocated|GPU reserved) memory{_SIZE}{_SIZE}")
_COUNTS = re.compile(r"CUDA OOMs:\s*(\d{1,9})\s*[|│]\s*cudaMalloc retries:\s*(\d{1,9})")
_UNITS = {"": 1, "K": KiB, "M": MiB, "G": GiB, "T": TiB}  # PyTorch before 2.0 prints KB, MB … and means the same


def explain_memory_summary(text: str) -> Diagnosis | None:
    """None if the text contains no such table."""
    rows = {found[1]: (int(found[2]) * _UNITS[found[3]], int(found[4]) * _UNITS[found[5]])
            for found in _ROW.finditer(clean(text))}
    if len(rows) < 2:
        return None
    (allocated, most_allocated), (reserved, most_reserved) = rows["Allocated"], rows["GPU reserved"]
    unallocated = max(reserved - allocated, 0)
    counts = _COUNTS.search(text)
    ooms, retries = (int(counts[1]), int(counts[2])) if counts else (0, 0)
    failures = f" Failed allocations: {ooms}; retries with an empty cache: {retries}." if counts else ""
    # Without a failure, what is reserved is a cache like any other.
    fragmented = bool(ooms or retries) and unallocated > FRAGMENTED_SHARE * reserved
    cause = Cause("OOM-FRAGMENTED", f"Fragmentation: {show_bytes(unallocated)} are reserved by PyTorch but "
                  "unallocated. A segment with one live tensor in it cannot be released.")
    todo, effect = EXPANDABLE_SEGMENTS
    advice = (*(((todo.format(**TOOLS["nvidia"]), effect),) if fragmented else ()), *SMALLER_BATCH)
    return Diagnosis(
        subject="reading",
        title=f"PyTorch has reserved {show_bytes(reserved)} of the GPU; {show_bytes(allocated)} of it are in tensors.",
        what=(f"At the peak {show_bytes(most_allocated)} were allocated and {show_bytes(most_reserved)} reserved."
              f"{failures}"),
        shares=(MemoryShare("tensors of this process", allocated),
                MemoryShare("reserved by PyTorch but unallocated", unallocated)),
        shares_of=f"{show_bytes(reserved)} reserved by PyTorch", causes=(cause,) if fragmented else (),
        remedies=tuple(Remedy(*each) for each in advice),
        needed=("the out-of-memory message: what was requested, and what was free",
                f"{LIST_PROCESSES[0].format(**TOOLS['nvidia'])}'s output: what other processes hold"))
