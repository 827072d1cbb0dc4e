"""Out of memory: how it is recognised, how memory is freed for a retry, how much is free, and warnings about it."""

from __future__ import annotations

import gc
import platform
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..core.errors import DeviceError
from ..core.units import GiB, parse_bytes, show_bytes
from ..hardware.nvidia import GpuReading
from ..runs.metrics import MemoryReading

# torch's own error has a class. These are messages of the driver, of cuBLAS and cuDNN, and of torch when malloc fails:
# a run on a CPU uses CPU RAM, so that counts too.
MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")

SMALLEST_BLOCK = 512  # bytes: the allocator rounds every size up to a multiple of this

Result = TypeVar("Result")


class EvaluationDoesNotFit(DeviceError):
    """Not even one window fits."""


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation. `message`: the first line of the error; `rank`: where, if there are several."""

    message: str
    rank: int | None = None

    @property
    def short(self) -> str:
        """Without the statistics that torch appends."""
        short = self.message.split(" GPU ")[0].strip().rstrip(".")
        return short if self.rank is None else f"rank {self.rank}: {short}"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES))


def attempt(work: Callable[[], Result]) -> Result | OutOfMemory:
    """What the work returns; or OutOfMemory, and then no tensor of the work is alive any more.

    An exception keeps the frames it passed through, and these keep their tensors: the frames are cleared here.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failed = OutOfMemory((str(error).splitlines() or [type(error).__name__])[0])
        behind: BaseException | None = error
        while behind is not None:
            traceback.clear_frames(behind.__traceback__)
            behind = behind.__context__
    return failed


def release(device: torch.device) -> None:
    """Collects garbage and calls empty_cache()."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # no kernel may still be writing to it
        torch.cuda.empty_cache()


def room(device: str) -> int | None:
    """Bytes that this process could reserve in all now: what it has reserved and what is free. None: not known."""
    if not is_nvidia(device):
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def cap_memory(device: str, nbytes: int) -> None:
    """From now on the allocator raises OutOfMemoryError rather than reserve more, whatever is free."""
    total = torch.cuda.get_device_properties(device).total_memory
    # torch turns the fraction into bytes again and truncates: one block more makes sure that it is never less.
    torch.cuda.set_per_process_memory_fraction(min((nbytes + SMALLEST_BLOCK) / total, 1.0), device)


def is_nvidia(device: str) -> bool:
    return device.startswith("cuda") and torch.version.hip is None


def gpu_reading(device: str, others: Mapping[str, int]) -> tuple[GpuReading, int]:
    """(the GPU as torch sees it, its number of multiprocessors); from now on it is torch's default GPU. `others`: bytes
    used by others, by uuid, read before this process started. Without an entry, everything that is not free counts,
    this process's context included."""
    torch.cuda.set_device(device)
    card = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    uuid = str(getattr(card, "uuid", "")).removeprefix("GPU-").lower()
    known = {name.removeprefix("GPU-").lower(): nbytes for name, nbytes in others.items()}
    used = known.get(uuid, total - free)
    return GpuReading(torch.device(device).index or 0, card.name, uuid, f"{card.major}.{card.minor}",
                      total_bytes=total, free_bytes=total - used, used_bytes=used,
                      reserved_bytes=0), card.multi_processor_count  # all that CUDA reports can be used


class RngState:
    """The state of the random number generators when this was created, to be restored."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cpu = device, torch.get_rng_state()
        self._cuda: Tensor | None = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


# ---- warnings

_TRIED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_UNUSED = re.compile(r"([0-9.]+ [KMGT]?i?B) is reserved by PyTorch but unallocated")
MUCH_UNUSED = GiB     # reserved beyond tensors, before it is worth a warning
FAR_ABOVE = 1.5       # times what is in tensors
NEARLY_ALL = 0.9      # of a GPU: what a driver keeps for the screen is above this
SLOWDOWN = 3.0        # times the usual step: PCIe is many times slower than GPU memory


def fragmentation_hint(message: str) -> str:
    """A sentence if torch's message shows enough unused memory, but not in one block; else empty."""
    tried, unused = _TRIED.search(message), _UNUSED.search(message)
    if not tried or not unused or parse_bytes(unused[1]) < parse_bytes(tried[1]):
        return ""
    return f" (Fragmentation: {unused[1]} was reserved but unallocated, in blocks that are too small.)"


def fragmentation(reserved: int, most_allocated: int) -> str:
    """A warning if far more is reserved than was ever allocated since the start; else empty.

    A single step would not tell: PyTorch counts the tensors of a CUDA graph only while it is captured.
    """
    if reserved - most_allocated < MUCH_UNUSED or reserved < FAR_ABOVE * most_allocated:
        return ""
    return (f"memory: fragmentation. {show_bytes(reserved)} is reserved, and at most {show_bytes(most_allocated)} was "
            "allocated. Expandable segments fragment least (unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF); a "
            "smaller --batch_size helps.")


def may_spill() -> bool:
    """On Windows and under WSL the driver uses CPU RAM when GPU memory is full."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def spill(memory: MemoryReading, card_bytes: int, seconds: float, usual_seconds: float) -> str:
    """A warning if the run is partly in CPU RAM: more is reserved than the GPU has, or nearly all of it while steps
    suddenly take several times as long; else empty."""
    beyond = memory.reserved > card_bytes
    slow = memory.reserved > NEARLY_ALL * card_bytes and usual_seconds > 0 and seconds > SLOWDOWN * usual_seconds
    if not beyond and not slow:
        return ""
    why = (f"{show_bytes(memory.reserved)} is reserved, and the GPU has {show_bytes(card_bytes)}" if beyond else
           f"nearly all of the GPU is reserved, and a step takes {seconds / usual_seconds:.1f} times as long as before")
    return (f"memory: the run has spilled into CPU RAM ({why}), which is many times slower. Close other programs on "
            "the GPU, or use less of it: --budget, a smaller --batch_size. In the NVIDIA control panel, "
            "\"CUDA - Sysmem Fallback Policy\" can forbid it.")
