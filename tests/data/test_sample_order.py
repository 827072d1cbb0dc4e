"""The order of training windows: a pure function with fixed results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fitgpt.core.errors import UsageError
from fitgpt.data.sample_order import hash_of, positions_for, window_of

MASK = 2**64 - 1


def reference_window(sample: int, windows: int, seed: int, stream: str) -> int:
    """The same function written again with Python integers, without numpy."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    def absorb(state: int, word: int) -> int:
        return mix(((state ^ word) + 0x9E3779B97F4A7C15) & MASK)

    key, name = seed & MASK, stream.encode()
    for word in (len(name), *name, sample // windows):
        key = absorb(key, word)
    rows = math.isqrt(windows - 1) + 1
    columns = -(-windows // rows)
    place = sample % windows
    while True:
        row, column = divmod(place, columns)
        for number in range(8):
            if number % 2 == 0:
                row = (row + mix(key ^ (column | number << 56)) % rows) % rows
            else:
                column = (column + mix(key ^ (row | number << 56)) % columns) % columns
        place = row * columns + column
        if place < windows:
            return place


@pytest.mark.parametrize(("samples", "windows", "seed", "stream", "expected"), [
    (range(12), 10, 1337, "train", [8, 6, 4, 0, 9, 7, 5, 3, 2, 1, 9, 3]),
    ([0, 1, 2, 999_999, 1_000_000, 1_000_001], 1_000_000, 1337, "train",
     [878562, 473172, 346213, 673115, 588893, 801056]),
    ([0, 1, 2**40, 2**40 + 1, 2**62], 2**40, 1, "eval",
     [731583262280, 877757728362, 959156607444, 535878311550, 857230048395]),
    ([0, 1, 2], 123457, -1, "x", [12344, 20858, 89887]),
])
def test_the_order_never_changes(samples, windows, seed, stream, expected) -> None:
    """A change would give every saved run other data after a resume."""
    assert window_of(np.array(list(samples)), windows, seed, stream).tolist() == expected
    assert [reference_window(sample, windows, seed, stream) for sample in samples] == expected


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5, 6, 7, 10, 12, 63, 64, 65, 1000, 4097])
def test_every_epoch_visits_every_window_once(windows: int) -> None:
    for epoch in (0, 1, 17, 2**30):
        samples = np.arange(epoch * windows, (epoch + 1) * windows)
        assert sorted(window_of(samples, windows, 7, "train").tolist()) == list(range(windows))


def test_epochs_seeds_and_streams_have_different_orders() -> None:
    samples = np.arange(500)
    orders = [window_of(samples, 500, 1, "train"), window_of(samples + 500, 500, 1, "train"),
              window_of(samples, 500, 2, "train"), window_of(samples, 500, 1, "eval")]
    for first in range(4):
        for second in range(first):
            assert (orders[first] == orders[second]).mean() < 0.05


def test_every_window_is_equally_likely_at_every_position() -> None:
    windows, epochs = 11, 4000
    order = window_of(np.arange(windows * epochs), windows, 3, "train").reshape(epochs, windows)
    for place in range(windows):
        counts = np.bincount(order[:, place], minlength=windows)
        chi_square = float(((counts - epochs / windows) ** 2 / (epochs / windows)).sum())
        assert chi_square < 35  # 10 degrees of freedom: 1 in 10,000 is above
    pairs = np.bincount(order[:, 0] * windows + order[:, 1], minlength=windows**2).reshape(windows, windows)
    apart = pairs[~np.eye(windows, dtype=bool)]
    assert float(((apart - epochs / 110) ** 2 / (epochs / 110)).sum()) < 180  # 109 degrees of freedom


def test_consecutive_samples_read_windows_from_the_whole_range() -> None:
    order = window_of(np.arange(100_000), 1_000_000, 5, "train")
    counts = np.bincount(order // 10_000, minlength=100)
    assert counts.min() > 800
    assert counts.max() < 1200
    assert abs(float(np.corrcoef(order[:-1], order[1:])[0, 1])) < 0.02
    assert (np.abs(np.diff(order)) <= 1).mean() < 0.001


def test_2_to_the_40_windows_and_samples_near_2_to_the_63_stay_in_range() -> None:
    samples = np.concatenate([np.arange(1000), np.arange(2**63 - 1001, 2**63 - 1)])
    for windows in (2**40 - 1, 2**40, 2**40 + 1):
        order = window_of(samples, windows, 2**70, "train")
        assert order.min() >= 0
        assert order.max() < windows
        assert len(np.unique(order[:1000])) == 1000


def test_a_step_has_the_same_samples_for_any_batch_size_and_number_of_ranks() -> None:
    def step(number: int, batch_size: int, accumulation: int, world: int = 1) -> list[int]:
        return [int(sample) for micro in range(accumulation // world) for rank in range(world)
                for sample in positions_for(number, micro, batch_size=batch_size, accumulation=accumulation,
                                            rank=rank, world=world)]

    for number in (0, 1, 12345):
        expected = list(range(number * 32, (number + 1) * 32))
        assert step(number, 8, 4) == expected
        assert step(number, 4, 8) == expected
        assert step(number, 32, 1) == expected
        assert step(number, 8, 4, world=2) == expected
        assert step(number, 2, 16, world=4) == expected


def test_a_sample_reads_the_same_window_alone_and_in_a_batch() -> None:
    together = window_of(np.arange(90, 110), 100, 1, "train")
    assert together.tolist() == [int(window_of(np.array([sample]), 100, 1, "train")[0]) for sample in range(90, 110)]


def test_accumulation_must_be_a_multiple_of_the_number_of_processes() -> None:
    with pytest.raises(UsageError) as raised:
        positions_for(0, 0, batch_size=4, accumulation=5, world=2)
    assert "gradient_accumulation_steps = 5" in raised.value.what
    assert raised.value.fix == "--gradient_accumulation_steps=6"


def test_every_bit_of_the_hash_varies() -> None:
    bits = np.unpackbits(hash_of(1, "x", np.arange(4096, dtype=np.uint64)).view(np.uint8)).reshape(4096, 64)
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 0.05)
