"""Signs of trouble with a card's memory that no error tells of: memory in pieces, and memory that is the host's."""

from __future__ import annotations

import platform
import re
import sys

from ..core.units import GiB, parse_bytes, show_bytes
from ..nouns import MemoryReading

_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_UNUSED = re.compile(r"([0-9.]+ [KMGT]?i?B) is reserved by PyTorch but unallocated")
MUCH = GiB        # lost between blocks before it is worth a word
FAR_ABOVE = 1.5   # times what lies in tensors
NEARLY_ALL = 0.9  # of a card: what a driver keeps for the screen lies above it
JUMP = 3.0        # times the usual length of a step: a bus is many times slower than a card's memory


def in_pieces(message: str) -> str:
    """Of torch's message: a sentence where it had enough in all, and not in one piece."""
    asked, unused = _ASKED.search(message), _UNUSED.search(message)
    if not asked or not unused or parse_bytes(unused[1]) < parse_bytes(asked[1]):
        return ""
    return f" ({unused[1]} were held and lay unused, but in pieces too small.)"


def fragmentation(held: int, most_in_tensors: int) -> str:
    """A note where far more is held from the driver than lay in tensors at any time since the start. Of a step alone it
    would be no sign: PyTorch counts a recorded step's tensors only while it is recorded."""
    if held - most_in_tensors < MUCH or held < FAR_ABOVE * most_in_tensors:
        return ""
    return (f"memory: {show_bytes(held)} are held from the driver where at most {show_bytes(most_in_tensors)} "
            "lay in tensors: the rest lies between blocks. Expandable segments "
            "lose least (unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF); a smaller --batch_size helps.")


def may_spill() -> bool:
    """On Windows, and under WSL, the driver hands out the host's memory when the card's is used up."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def spill(memory: MemoryReading, card_bytes: int, seconds: float, usual_seconds: float) -> str:
    """A note where a run lies partly in the host's memory: it holds more than the card has, or nearly all of it and
    steps suddenly take several times as long."""
    beyond = memory.reserved > card_bytes
    slow = memory.reserved > NEARLY_ALL * card_bytes and usual_seconds > 0 and seconds > JUMP * usual_seconds
    if not beyond and not slow:
        return ""
    why = (f"{show_bytes(memory.reserved)} are held, and the card has {show_bytes(card_bytes)}" if beyond else
           f"nearly all of the card is held, and a step takes {seconds / usual_seconds:.1f} times as long as before")
    return (f"memory: the run has spilled into the host's memory ({why}), which is many times slower. Close other "
            "programs on the card, or use less of it: --budget, a smaller --batch_size. In the NVIDIA control panel, "
            "\"CUDA - Sysmem Fallback Policy\" can forbid it.")
