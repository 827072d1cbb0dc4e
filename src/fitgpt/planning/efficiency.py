"""What share of a card's own figures do our kernels reach? Measured on an H200; for other kinds of card assumed.

Where nothing was recorded, three shares are told: the least to expect, the likely, the most. Public figures that the
assumed ones were held against, all for GPT-2 124M unless said otherwise:

- RTX 4090: 106k tokens/s compiled (29 % of an A100's rate: nanoGPT's issue 182), 110k (half of what two such cards did
  with llm.c's train_gpt2.py: tylerromero.com's worklog).
- A100: 110k tokens/s with an early torch 2.0 (nanoGPT's issue 110).
- V100: 62.4 TFLOP/s, 48 % of the most, for a GPT-2 of 1.2B (Megatron-LM 1.0's notes).
- T4: 24 of its 65 TFLOP/s in cuBLAS's own products, because it may draw only 70 W (NVIDIA's developer forum, 264462).
"""

from __future__ import annotations

from typing import NamedTuple

from ..hardware.gpus import Card


class Reach(NamedTuple):
    """The share of a card's own figures that our kernels reach."""

    products: float   # of its matrix rate, where a product fills the card
    attention: float
    bytes: float      # of its bandwidth


class Kind(NamedTuple):
    """Cards alike in this, in words."""

    words: str
    least: Reach
    likely: Reach
    most: Reach


# GPT-2 124M, 4 × 12 × 1024: products 54.5 ms, attention 13.8 ms, pointwise, loss, casts and AdamW 24 ms (docs/log.md).
HOPPER = Kind("Hopper, as an H200 reaches them", Reach(0.60, 0.18, 0.58), Reach(0.715, 0.24, 0.70),
              Reach(0.80, 0.35, 0.82))
# GeForce since Ampere: matrix rates are half a workstation card's, which is easier to reach, and flash attention was
# made for them.
GEFORCE = Kind("GeForce cards since Ampere", Reach(0.70, 0.30, 0.65), Reach(0.80, 0.45, 0.80), Reach(0.92, 0.60, 0.92))
# The whole matrix rate at boost clock, which their power does not allow for long.
FULL_RATE = Kind("workstation and data-centre cards since Ampere", Reach(0.50, 0.20, 0.60), Reach(0.65, 0.30, 0.75),
                 Reach(0.85, 0.50, 0.90))
LOW_POWER = Kind("cards held back by 70 W", Reach(0.25, 0.08, 0.60), Reach(0.34, 0.14, 0.70), Reach(0.45, 0.25, 0.85))
# Before Ampere there is no flash attention: torch's memory-efficient kernel does it, whose backward pass is slow there.
TURING = Kind("GeForce cards of Turing, without flash attention", Reach(0.55, 0.10, 0.55), Reach(0.70, 0.18, 0.70),
              Reach(0.88, 0.32, 0.85))
VOLTA = Kind("Volta and full-rate Turing, without flash attention", Reach(0.38, 0.07, 0.55), Reach(0.52, 0.12, 0.70),
             Reach(0.72, 0.24, 0.85))
# Half precision has no units of its own, and nothing is compiled.
PASCAL = Kind("Pascal, which has no matrix units", Reach(0.45, 0.06, 0.55), Reach(0.62, 0.14, 0.70),
              Reach(0.85, 0.30, 0.85))

ANOTHER_VENDORS = Kind("another vendor's cards", Reach(0.35, 0.12, 0.50), Reach(0.55, 0.25, 0.65),
                       Reach(0.80, 0.50, 0.85))

OF_LOW_POWER = ("T4", "L4", "RTX A2000 12GB")  # 70 to 72 W, by their spec sheets
HALF_RATE = 768  # FLOP a clock and multiprocessor: GeForce cards have 512, others 1024 or more (gpus.csv)


def kind_of(card: Card) -> Kind:
    if card.capability is None:
        return ANOTHER_VENDORS
    if card.name in OF_LOW_POWER:
        return LOW_POWER
    if card.capability < (7, 0):
        return PASCAL
    if card.capability < (8, 0):
        return TURING if _is_half_rate(card) else VOLTA
    if card.capability == (9, 0):
        return HOPPER
    return GEFORCE if _is_half_rate(card) else FULL_RATE


def _is_half_rate(card: Card) -> bool:
    """As GeForce cards are; one whose clock is not known is taken to be of the other sort."""
    clocks = (card.sms or 0) * (card.boost_mhz or 0)
    return clocks > 0 and 1e6 * (card.tflops or 0) / clocks < HALF_RATE
