"""Reads the next batches in a thread while the device computes the current one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
