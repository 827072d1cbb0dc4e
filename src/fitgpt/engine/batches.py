"""Batches for training and evaluation, read in a thread while the device computes the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fitgpt-feed")
        self._ahead: dict[int, Future[Tensor]] = {}

    def get(self, k: int) -> tuple[Tensor, Tensor]:
        for number in [number for number in self._ahead if not k <= number < k + DEPTH]:
            self._ahead.pop(number).cancel()  # read ahead for an order that has changed
        for number in range(k, min(k + DEPTH, self._last + 1)):
            if number not in self._ahead:
                self._ahead[number] = self._thread.submit(self._read_pinned, number)
        tokens = self._ahead.pop(k).result().to(self._device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read_pinned(self, number: int) -> Tensor:
        """Pinned memory lets the copy to the GPU overlap with computation."""
        tokens = torch.from_numpy(self._read(number))
        return tokens.pin_memory() if self._device.type == "cuda" else tokens


def training_batches(config: RunConfig, dataset: Dataset, device: torch.device, rank: int = 0) -> Prefetcher:
    """A rank's micro-batches by their number, from the start of the run."""
    split, accumulation = dataset.split("train"), config.gradient_accumulation_steps
    windows, per_step = split.windows(config.block_size), config.batch_size * accumulation

    def read(number: int) -> Any:
        step, micro = divmod(number, config.micro_batches)
        if micro == 0 and step * per_step % windows < per_step:
            split.recheck()  # at the start of an epoch
        samples = positions_for(step, micro, batch_size=config.batch_size, accumulation=accumulation,
                                rank=rank, world=config.ranks)
        return split.read(samples, config.block_size, config.seed)

    return Prefetcher(read, device, last=config.max_iters * config.micro_batches - 1)


def evaluation_splits(dataset: Dataset, names: Sequence[str], *, windows: int, block: int,
                      seed: int) -> dict[str, tuple[ReadWindows, int]]:
    """Per split its reader and its number of windows: as many as requested, or all there are."""
    def reader(name: str) -> ReadWindows:
        return lambda numbers: dataset.split(name).read_fixed(np.asarray(numbers), block, seed)

    return {name: (reader(name), min(windows, dataset.split(name).windows(block))) for name in names}
