"""GPU → the share of its spec-sheet figures that our kernels reach. Measured on an H200; assumed for other classes.

Where nothing was recorded there are three shares: the least to expect, the likely, the most. Public figures that the
assumed shares were compared with, all for GPT-2 124M unless stated otherwise:

- RTX 4090: 106k tokens/s compiled (29 % of an A100's rate: nanoGPT's issue 182), 110k (half of what two such GPUs did
  with llm.c's train_gpt2.py: tylerromero.com's worklog).
- A100: 110k tokens/s with an early torch 2.0 (nanoGPT's issue 110).
- V100: 62.4 TFLOP/s, 48 % of the most, for a GPT-2 of 1.2B (Megatron-LM 1.0's notes).
- T4: 24 of its 65 TFLOP/s in cuBLAS's matmuls, because it may draw only 70 W (NVIDIA's developer forum, 264462).
"""

from __future__ import annotations

from typing import NamedTuple

from ..hardware.gpus import GpuModel


class SpeedEstimate(NamedTuple):
    """Tokens per second to expect of a run; low and high are equal where that very run was measured."""

    low: float
    high: float
    likely: float
    basis: str    # what it is based on


class Efficiency(NamedTuple):
    """The share of a GPU's spec-sheet figures that our kernels reach."""

    matmuls: float    # of its matmul rate, where a matmul fills the GPU
    attention: float  # of its matmul rate
    bytes: float      # of its memory bandwidth


class GpuClass(NamedTuple):
    """GPUs with similar efficiency."""

    text: str
    least: Efficiency
    likely: Efficiency
    most: Efficiency


# GPT-2 124M, 4 × 12 × 1024: matmuls 54.5 ms, attention 13.8 ms, pointwise, loss, casts and AdamW 24 ms (docs/log.md).
HOPPER = GpuClass("Hopper, as an H200 reaches them", Efficiency(0.60, 0.18, 0.58),
                  Efficiency(0.715, 0.24, 0.70), Efficiency(0.80, 0.35, 0.82))
# GeForce since Ampere: matmul rates are half those of workstation GPUs, which is easier to reach, and flash attention
# was made for them.
GEFORCE = GpuClass("GeForce GPUs since Ampere", Efficiency(0.70, 0.30, 0.65),
                   Efficiency(0.80, 0.45, 0.80), Efficiency(0.92, 0.60, 0.92))
# The full matmul rate at boost clock, which their power limit does not allow for long.
FULL_RATE = GpuClass("workstation and data-centre GPUs since Ampere", Efficiency(0.50, 0.20, 0.60),
                     Efficiency(0.65, 0.30, 0.75), Efficiency(0.85, 0.50, 0.90))
LOW_POWER = GpuClass("GPUs limited to 70 W", Efficiency(0.25, 0.08, 0.60),
                     Efficiency(0.34, 0.14, 0.70), Efficiency(0.45, 0.25, 0.85))
# Before Ampere there is no flash attention: torch uses its memory-efficient kernel, whose backward pass is slow there.
TURING = GpuClass("GeForce GPUs of Turing, without flash attention", Efficiency(0.55, 0.10, 0.55),
                  Efficiency(0.70, 0.18, 0.70), Efficiency(0.88, 0.32, 0.85))
VOLTA = GpuClass("Volta and full-rate Turing, without flash attention", Efficiency(0.38, 0.07, 0.55),
                 Efficiency(0.52, 0.12, 0.70), Efficiency(0.72, 0.24, 0.85))
# No tensor cores, and no torch.compile.
PASCAL = GpuClass("Pascal, which has no tensor cores", Efficiency(0.45, 0.06, 0.55),
                  Efficiency(0.62, 0.14, 0.70), Efficiency(0.85, 0.30, 0.85))

OTHER_VENDOR = GpuClass("GPUs of another vendor", Efficiency(0.35, 0.12, 0.50),
                        Efficiency(0.55, 0.25, 0.65), Efficiency(0.80, 0.50, 0.85))

LOW_POWER_NAMES = ("T4", "L4", "RTX A2000 12GB")  # 70 to 72 W, by their spec sheets
HALF_RATE = 768  # FLOP per clock and multiprocessor: GeForce GPUs have 512, others 1024 or more (gpus.csv)


def gpu_class(card: GpuModel) -> GpuClass:
    if card.capability is None:
        return OTHER_VENDOR
    if card.name in LOW_POWER_NAMES:
        return LOW_POWER
    if card.capability < (7, 0):
        return PASCAL
    if card.capability < (8, 0):
        return TURING if _is_half_rate(card) else VOLTA
    if card.capability == (9, 0):
        return HOPPER
    return GEFORCE if _is_half_rate(card) else FULL_RATE


def _is_half_rate(card: GpuModel) -> bool:
    """Whether the matmul rate is half that of workstation GPUs, as on GeForce; False if the clock is not known."""
    clocks = (card.sms or 0) * (card.boost_mhz or 0)
    return clocks > 0 and 1e6 * (card.tflops or 0) / clocks < HALF_RATE
