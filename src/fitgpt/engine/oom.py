"""Memory ran out: what that looks like, how everything is let go of, and how much there is now."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..core.errors import DeviceError
from ..hardware.nvidia import GpuReading

# Torch's own error has a class; these are words of the driver, of cuBLAS and cuDNN, and of torch where malloc gave
# nothing. A run on a CPU lives in the host's memory, so that counts too.
SAID = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")

SMALLEST = 512  # bytes of a block of the allocator: less than that more or less changes nothing

Result = TypeVar("Result")


class NoRoom(DeviceError):
    """There is too little memory for the least that could be done."""


@dataclass(frozen=True)
class Refusal:
    """In the words of whoever had no more memory to give, on one line."""

    words: str

    @property
    def short(self) -> str:
        """Without the inventory that torch appends."""
        return self.words.split(" GPU ")[0].strip().rstrip(".")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in SAID))


def attempt(work: Callable[[], Result]) -> Result | Refusal:
    """What the work returns; or, where memory ran out, a Refusal, and then nothing of the work is alive any more.

    An exception holds the frames it went through, and they hold their tensors: they are emptied before it goes.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        refusal = Refusal((str(error).splitlines() or [type(error).__name__])[0])
        behind: BaseException | None = error
        while behind is not None:
            traceback.clear_frames(behind.__traceback__)
            behind = behind.__context__
    return refusal


def release(device: torch.device) -> None:
    """Gives back to the driver what no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # nothing may still be writing there
        torch.cuda.empty_cache()


def room(device: str) -> int | None:
    """What this process's allocator could hold in all now: what it has, and what is free. None: nobody says."""
    if not is_nvidia(device):
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def cap_memory(device: str, nbytes: int) -> None:
    """From now on the allocator refuses to hold more, whatever is free."""
    total = torch.cuda.get_device_properties(device).total_memory
    # Torch makes bytes of the fraction again, and cuts them off: the allocator's smallest unit more is never one less.
    torch.cuda.set_per_process_memory_fraction(min((nbytes + SMALLEST) / total, 1.0), device)


def is_nvidia(device: str) -> bool:
    return device.startswith("cuda") and torch.version.hip is None


def card_reading(device: str, others: Mapping[str, int]) -> tuple[GpuReading, int]:
    """The card as torch sees it, and its multiprocessors. What others hold of it was read before this process came;
    where it was not, it is what is not free now, this process's own context included."""
    card = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    uuid = str(getattr(card, "uuid", "")).removeprefix("GPU-").lower()
    held = {name.removeprefix("GPU-").lower(): nbytes for name, nbytes in others.items()}
    used = held.get(uuid, total - free)
    return GpuReading(torch.device(device).index or 0, card.name, uuid, f"{card.major}.{card.minor}",
                      total_bytes=total, free_bytes=total - used, used_bytes=used,
                      reserved_bytes=0), card.multi_processor_count  # CUDA gives all that it tells of


class Dice:
    """The random generators as they are now, to be put back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, torch.get_rng_state()
        self._card: Tensor | None = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        torch.set_rng_state(self._host)
        if self._card is not None:
            torch.cuda.set_rng_state(self._card, self._device)
