from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from fitgpt.engine.batches import Prefetcher

CPU = torch.device("cpu")


def numbered(k: int) -> np.ndarray:
    return np.full((2, 5), k)


def test_batches_can_be_requested_in_any_order() -> None:
    feed = Prefetcher(numbered, CPU, last=100)
    for k in (0, 1, 2, 50, 51, 3, 3, 100):
        inputs, targets = feed.get(k)
        assert inputs.shape == targets.shape == (2, 4)
        assert (inputs == k).all()
    feed.close()


def test_the_next_batch_is_read_while_this_one_is_in_use() -> None:
    read_second = threading.Event()

    def read(k: int) -> np.ndarray:
        if k == 1:
            read_second.set()
        return numbered(k)

    feed = Prefetcher(read, CPU, last=10)
    feed.get(0)
    assert read_second.wait(5)  # nobody has asked for batch 1
    feed.close()


def test_nothing_beyond_the_last_batch_is_read() -> None:
    seen = []

    def read(k: int) -> np.ndarray:
        seen.append(k)
        return numbered(k)

    feed = Prefetcher(read, CPU, last=2)
    for k in range(3):
        feed.get(k)
    feed.close()
    assert seen == [0, 1, 2]


def test_after_a_failed_read_the_same_batch_can_be_requested_again() -> None:
    failures = iter([True, False])

    def read(k: int) -> np.ndarray:
        if k == 0 and next(failures):
            raise OSError("stalled")
        return numbered(k)

    feed = Prefetcher(read, CPU, last=10)
    with pytest.raises(OSError, match="stalled"):
        feed.get(0)
    assert (feed.get(0)[0] == 0).all()
    feed.close()
