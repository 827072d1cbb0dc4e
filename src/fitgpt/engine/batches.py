"""Batches for training and evaluation, read in a thread while the device computes the one before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.run_config import RunConfig
from ..data.dataset import Dataset
from ..data.sample_order import positions_for

ReadWindows = Callable[["np.ndarray[Any, Any]"], Any]  # window numbers [n] → token ids [n, T + 1]

DEPTH = 3  # batches read ahead: one in use by the copy, one ready, one being read


class Prefetcher:
    """`get(k)` returns batch k on the device, as (inputs, targets) [B, T] each, while k+1 is being read.

    A batch depends only on k, so any k may be requested at any time: a resume or a retried step only discards what was
    read ahead. The error of a failed read is raised when its batch is requested.
    """

    def __init__(self, read: Callable[[int], Any], device: torch.device, last: int) -> None:
        self._read = read
        self._device = device
        self._last = last  # the last batch that will be requested
        self._expected = -1
        self._ready: queue.Queue[tuple[int, Tensor | BaseException]] = queue.Queue()
        self._wanted: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read_ahead, daemon=True, name="fitgpt-feed")
        self._thread.start()

    def get(self, k: int) -> tuple[Tensor, Tensor]:
        newly_wanted = range(k, k + DEPTH) if k != self._expected else range(k + DEPTH - 1, k + DEPTH)
        for ahead in newly_wanted:
            if ahead <= self._last:
                self._wanted.put(ahead)
        self._expected = k + 1
        while True:
            number, tokens = self._ready.get()
            if number == k:
                break  # others were read ahead for an order that has changed
        if isinstance(tokens, BaseException):
            self._expected = -1
            raise tokens
        tokens = tokens.to(self._device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        self._wanted.put(None)
        self._thread.join()

    def _read_ahead(self) -> None:
        while (k := self._wanted.get()) is not None:
            try:
                tokens = torch.from_numpy(self._read(k))
                # Pinned memory lets the copy to the GPU overlap with computation.
                self._ready.put((k, tokens.pin_memory() if self._device.type == "cuda" else tokens))
            except BaseException as error:  # raised when this batch is requested
                self._ready.put((k, error))


def training_batches(config: RunConfig, dataset: Dataset, device: torch.device) -> Prefetcher:
    """Micro-batches by their number, from the start of the run."""
    split, accumulation = dataset.split("train"), config.gradient_accumulation_steps
    windows, per_step = split.windows(config.block_size), config.batch_size * accumulation

    def read(number: int) -> Any:
        step, micro = divmod(number, accumulation)
        if micro == 0 and step * per_step % windows < per_step:
            split.recheck()  # at the start of an epoch
        samples = positions_for(step, micro, batch_size=config.batch_size, accumulation=accumulation)
        return split.read(samples, config.block_size, config.seed)

    return Prefetcher(read, device, last=config.max_iters * accumulation - 1)


def evaluation_splits(dataset: Dataset, names: Sequence[str], *, windows: int, block: int,
                      seed: int) -> dict[str, tuple[ReadWindows, int]]:
    """Per split its reader and its number of windows: as many as requested, or all there are."""
    def reader(name: str) -> ReadWindows:
        return lambda numbers: dataset.split(name).read_fixed(np.asarray(numbers), block, seed)

    return {name: (reader(name), min(windows, dataset.split(name).windows(block))) for name in names}
