"""Where a run takes place, as far as its memory goes: the architecture, torch's version, the allocator's kind."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.run_config import RunConfig
from ..core.units import MiB
from ..hardware.gpus import Card
from .padding import ODD_SIZES, has_odd_sizes

MEASURED_TORCH = ("2.11",)   # with which runs were recorded
KNOWN_TORCH = ("2.11", "2.12", "2.13")
DEFAULT_TORCH = "2.13"

# cuBLAS's workspace, one for each thread's handle: 32 MiB where torch's CUDABlas.cpp says so, else two pieces of 4 MiB
# and eight of 16 KiB.
BIG_WORKSPACE, WORKSPACE = 32 * MiB, 8_519_680
EXPANDABLE = "expandable segments"
CUDNN_PREFERRED = ((9, 0), (10, 0), (10, 3))  # where torch tries cuDNN's attention first


@dataclass(frozen=True)
class Setting:
    """What a tape depends on besides the config."""

    capability: tuple[int, int] = (9, 0)
    torch: str = DEFAULT_TORCH
    expandable: bool = True   # fitgpt's own runs: not on Windows, whose torch has none
    asked_to_expand: bool = False  # by the environment, which nanoGPT's runs go by
    compiles: bool = True     # whether compile=auto will compile
    sms: int = 132            # multiprocessors
    kernel: str = ""          # of attention; "": torch's choice

    @property
    def has_bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def workspace(self) -> int:
        return BIG_WORKSPACE if self.capability >= (9, 0) else WORKSPACE

    @property
    def threads(self) -> int:
        """That a multiprocessor holds at once: the CUDA programming guide's table."""
        if self.capability == (7, 5):
            return 1024
        return 2048 if self.capability in ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)) else 1536

    @property
    def cache(self) -> int:
        """The card's second-level cache, or more: the largest of its kind, so that a plan is never too low for it.

        Spec sheets, MiB: RTX 3060 3, 3090 6; 4060 24, 4070 36, 4070 Ti 48, 4090 72, L40 96; 5070 48, 5090 96; A100 40,
        B200 126. The H200's was seen.
        """
        known = {(8, 0): 40, (9, 0): 60, (10, 0): 126, (10, 3): 126}.get(self.capability)
        return (known or (6 if self.capability < (8, 9) else 48 if self.sms <= 60 else 96)) * MiB

    def attention(self, config: RunConfig, trainer: str = "fitgpt") -> str:
        """torch's choice among its kernels: cudnn, flash, efficient or math. fitgpt pads heads before it asks."""
        if self.kernel:
            return self.kernel
        head = config.n_embd // config.n_head
        if trainer == "fitgpt":
            head += -head % 8
        if config.dtype == "float32":
            return "efficient"
        if self.capability < (7, 5):
            return "efficient" if self.capability >= (5, 0) else "math"
        if self.capability < (8, 0):
            return "efficient"   # flash attention wants Ampere
        if self.capability in CUDNN_PREFERRED and head <= 128 and head % 8 == 0:
            return "cudnn"
        return "flash" if head <= 256 else "efficient"

    def expands(self, trainer: str) -> bool:
        """Whether a run's segments are expandable: fitgpt asks for them, nanoGPT leaves it to the environment."""
        return self.expandable and (trainer == "fitgpt" or self.asked_to_expand)

    def in_words(self, config: RunConfig, trainer: str) -> dict[str, str]:
        told = ("" if self.torch in MEASURED_TORCH else f" (recorded runs are of {MEASURED_TORCH[0]})"
                if self.torch in KNOWN_TORCH else f" (not measured: recorded runs are of {MEASURED_TORCH[0]})")
        tokens = config.batch_size * config.block_size
        odd = trainer == "nanogpt" and has_odd_sizes(config.dtype, tokens, config.vocab_size)
        return {
            "torch": f"{self.torch}{told}",
            "attention": self.attention(config, trainer),
            "compile": (f"compiled, {ODD_SIZES}" if odd else "compiled") if config.compile else "eager",
            "allocator": EXPANDABLE if self.expands(trainer) else "native"}


def setting_for(card: Card, *, torch: str = DEFAULT_TORCH, windows: bool = False) -> Setting:
    capability = card.capability or (9, 0)
    return Setting(capability, torch, expandable=not windows, compiles=capability >= (7, 0) and not windows,
                   sms=card.sms or Setting.sms)
