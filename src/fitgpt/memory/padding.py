"""Does torch's compiler pad a vocabulary that is no multiple of 8 (4 in float32)? Product by product of nanoGPT's head.

It times each of the three on the card, as it is and padded, and pads where that is a tenth quicker
(torch/_inductor/fx_passes/pad_mm.py). Which are quicker cannot be computed: here they are as recorded runs of an H200
had them, which docs/log.md lists. It matters, for a padded copy of the logits' gradient is as large as any array.
"""

from __future__ import annotations

from typing import NamedTuple

from .aten import up_to
from .nanorun import NanoGPTRun

ODD_SIZES = "odd sizes padded as on an H200"
MULTIPLE, MULTIPLE_FLOAT32 = 8, 4  # 16 bytes
FEW_TOKENS = 1024                  # below which the logits' own product was quicker as it is
SMALL_VOCABULARY, LITTLE_WORK = 128, 4 * 2**20  # and all three, of so few columns and numbers to multiply them with
LARGE_FLOAT32, LARGER_FLOAT32 = 4096, 8192      # in float32: from where on the logits' was padded, and its gradients'
WIDE, WIDE_FLOAT32 = 512, 1024     # a model's width from which the weight's gradient was padded


class Padding(NamedTuple):
    """Of the product that makes the logits, and of those that make its input's and its weight's gradients."""

    columns: int  # the vocabulary's, padded
    weighed: bool
    forward: bool = False
    inputs: bool = False
    weights: bool = False


def padding(run: NanoGPTRun) -> Padding:
    half, n, c, v = run.dtype != "float32", run.tokens, run.n_embd, run.vocab_size
    columns = up_to(v, _multiple(run.dtype))
    if columns == v:
        return Padding(columns, weighed=False)
    if not half:
        return Padding(columns, weighed=True, forward=v >= LARGE_FLOAT32, inputs=v >= LARGER_FLOAT32,
                       weights=v >= LARGER_FLOAT32 and c >= WIDE_FLOAT32)
    if v <= SMALL_VOCABULARY and n * c < LITTLE_WORK:
        return Padding(columns, weighed=True)
    return Padding(columns, weighed=True, forward=n >= FEW_TOKENS, inputs=True,
                   weights=c >= WIDE or v <= SMALL_VOCABULARY)


def has_odd_sizes(dtype: str, tokens: int, vocab_size: int) -> bool:
    """Whether the compiler has anything to weigh. Where it is the tokens of a micro-batch, the tape does not follow."""
    return bool(vocab_size % _multiple(dtype) or tokens % _multiple(dtype))


def _multiple(dtype: str) -> int:
    return MULTIPLE_FLOAT32 if dtype == "float32" else MULTIPLE
