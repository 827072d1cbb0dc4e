"""Which matmuls of nanoGPT's output head torch.compile pads when the vocabulary is not a multiple of 8 (float32: 4).

Inductor times each of the head's three matmuls on the GPU, unpadded and padded, and pads where that is at least a tenth
faster (torch/_inductor/fx_passes/pad_mm.py). Which of them are faster cannot be computed: the thresholds here are those
of recorded runs on an H200, which docs/log.md lists. A padded copy of the logits' gradient is as large as the logits.
"""

from __future__ import annotations

from typing import NamedTuple

from ...config.run_config import RunConfig

ODD_SIZES = "odd sizes padded as on an H200"
MULTIPLE, MULTIPLE_FLOAT32 = 8, 4  # elements: 16 bytes
# Half precision. Below FEW_TOKENS the logits' matmul was faster unpadded; up to SMALL_VOCABULARY and below LITTLE_WORK
# elements of its input, all three were.
FEW_TOKENS, SMALL_VOCABULARY, LITTLE_WORK = 1024, 128, 4 * 2**20
# float32. Vocabularies from which the logits' matmul was padded, and those of its gradients.
LARGE_FLOAT32, LARGER_FLOAT32 = 4096, 8192
WIDE, WIDE_FLOAT32 = 512, 1024     # n_embd from which the matmul of the weight's gradient was padded


class HeadPadding(NamedTuple):
    """Which of the head's matmuls are padded: the one that makes the logits, and those of its two gradients."""

    columns: int  # the vocabulary, padded
    timed: bool   # whether the compiler times the matmuls at all
    forward: bool = False
    input_grad: bool = False
    weight_grad: bool = False


def head_padding(config: RunConfig) -> HeadPadding:
    n, c, v = config.batch_size * config.block_size, config.n_embd, config.vocab_size
    columns = round_up(v, _multiple(config.dtype))
    if columns == v:
        return HeadPadding(columns, timed=False)
    if config.dtype == "float32":
        return HeadPadding(columns, timed=True, forward=v >= LARGE_FLOAT32, input_grad=v >= LARGER_FLOAT32,
                           weight_grad=v >= LARGER_FLOAT32 and c >= WIDE_FLOAT32)
    if v <= SMALL_VOCABULARY and n * c < LITTLE_WORK:
        return HeadPadding(columns, timed=True)
    return HeadPadding(columns, timed=True, forward=n >= FEW_TOKENS, input_grad=True,
                       weight_grad=c >= WIDE or v <= SMALL_VOCABULARY)


def has_odd_sizes(dtype: str, tokens: int, vocab_size: int) -> bool:
    """Whether the compiler times padded matmuls. Padding of the tokens of a micro-batch is not on the tape."""
    return bool(vocab_size % _multiple(dtype) or tokens % _multiple(dtype))


def _multiple(dtype: str) -> int:
    return MULTIPLE_FLOAT32 if dtype == "float32" else MULTIPLE


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
