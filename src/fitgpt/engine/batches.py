"""Batches for training and evaluation, read in a thread while the device computes the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.run_config import RunConfig
from ..data.dataset import Dataset
from ..data.sample_order import positions_for

ReadWindows = Callable[["np.ndarray[Any, Any]"], Any]  # window numbers [n] → token ids [n, T + 1]

DEPTH = 3  # batches read ahead: one in use by the copy, one ready, one being read
LOOK_EVERY_S = 0.2  # for a stop request, while a batch is being read
CLOSE_S = 5.0       # a read that takes longer, on a disk that does not answer, is left alone


class Prefetcher:
    """`get(k)` returns batch k on the device, as (inputs, targets) [B, T] each, while k+1 is being read.

    A batch depends only on k, so any k may be requested at any time: a resume or a retried step only discards what was
    read ahead. The error of a failed read is raised when its batch is requested.
    """

    def __init__(self, read: Callable[[int], Any], device: torch.device, last: int) -> None:
        self._read = read
        self._device = device
        self._last = last  # the last batch that will be requested
        self._ahead: dict[int, Future[Tensor]] = {}
        self._requests: SimpleQueue[tuple[int, Future[Tensor]] | None] = SimpleQueue()
        # A daemon: a process that has to end does not wait for a disk.
        self._thread = Thread(target=self._serve, name="fitgpt-feed", daemon=True)
        self._thread.start()

    def get(self, k: int, stop_requested: Callable[[], bool] = lambda: False) -> tuple[Tensor, Tensor] | None:
        """None if a stop was requested before the batch was there."""
        for number in [number for number in self._ahead if not k <= number < k + DEPTH]:
            self._ahead.pop(number).cancel()  # read ahead for an order that has changed
        for number in range(k, min(k + DEPTH, self._last + 1)):
            if number not in self._ahead:
                self._ahead[number] = Future()
                self._requests.put((number, self._ahead[number]))
        batch = self._ahead.pop(k)
        while not batch.done():
            with suppress(TimeoutError, CancelledError):
                batch.exception(LOOK_EVERY_S)
            if not batch.done() and stop_requested():
                return None
        tokens = batch.result().to(self._device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._requests.put(None)
        self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            number, future = request
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._read_pinned(number))
                except BaseException as error:
                    future.set_exception(error)

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
