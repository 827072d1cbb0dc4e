"""A sample's number and a seed → the window of the data it reads: a pure function, with no state to save.

Samples are numbered through the whole run: step × (batch_size × gradient_accumulation_steps) + position.
Sample i lies in epoch i // windows, and each epoch visits every window once, in an order given by a keyed
permutation. So the order is the same for any split of a step into micro-batches, for any number of ranks,
and after a resume. Everything is unsigned 64-bit arithmetic that wraps, so that any language, and any
version of numpy, gives the same numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_ROUNDS = 8   # four for each half: two more than a pseudo-random permutation needs in theory
_MASK = 2**64 - 1

# The 64-bit golden ratio and the two multipliers of SplitMix64 (Steele, Lea, Flood 2014; Stafford's mix 13).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def positions_for(
    step: int, micro: int, *, batch_size: int, accumulation: int, rank: int = 0, world: int = 1
) -> I64:
    """The sample numbers of one micro-batch. `accumulation` counts the micro-batches of a step over all ranks, as
    nanoGPT's gradient_accumulation_steps does; each rank takes every world-th of them."""
    if accumulation % world:
        raise UsageError(f"gradient_accumulation_steps = {accumulation} is not a multiple of the {world} processes.",
                         f"--gradient_accumulation_steps={math.ceil(accumulation / world) * world}")
    first = step * batch_size * accumulation + (micro * world + rank) * batch_size
    return np.arange(first, first + batch_size, dtype=np.int64)


def window_of(samples: I64, windows: int, seed: int, stream: str) -> I64:
    """The window, from 0 to windows - 1, that each sample reads."""
    index = samples.astype(np.uint64)
    count = np.uint64(windows)
    return _permute(index % count, windows, hash_of(seed, stream, index // count)).astype(np.int64)


def hash_of(seed: int, stream: str, *words: U64) -> U64:
    """64 well-mixed bits for each element of `words`, different for each seed and stream."""
    state = np.array([seed & _MASK], dtype=np.uint64)
    name = stream.encode()
    for word in (len(name), *name, *words):
        state = _mix((state ^ np.asarray(word, dtype=np.uint64)) + _GOLDEN)
    return state


def _mix(x: U64) -> U64:
    """A bijection of 64 bits in which each bit of the input changes each bit of the output half of the time."""
    x = (x ^ (x >> _S30)) * _FIRST
    x = (x ^ (x >> _S27)) * _SECOND
    return x ^ (x >> _S31)


def _permute(index: U64, windows: int, key: U64) -> U64:
    """A Feistel network over rows × columns, the smallest near-square that holds all windows. The few places
    beyond the last window are left by walking on along the permutation's own cycle."""
    rows = math.isqrt(windows - 1) + 1
    columns = -(-windows // rows)
    key = np.broadcast_to(key, index.shape)
    place = _feistel(index, rows, columns, key)
    while True:
        beyond = np.flatnonzero(place >= np.uint64(windows))
        if not beyond.size:
            return place
        place[beyond] = _feistel(place[beyond], rows, columns, key[beyond])


def _feistel(index: U64, rows: int, columns: int, key: U64) -> U64:
    r, c = np.uint64(rows), np.uint64(columns)
    row, column = index // c, index % c
    for number in range(_ROUNDS):
        tag = np.uint64(number << 56)
        if number % 2 == 0:
            row = (row + _mix(key ^ (column | tag)) % r) % r
        else:
            column = (column + _mix(key ^ (row | tag)) % c) % c
    return row * c + column
