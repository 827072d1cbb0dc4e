"""Batches on their way: a thread reads the next ones while the device computes this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEPTH = 3  # batches read ahead: one in use by the copy, one ready, one being read


class Feed:
    """`feed.get(k)` is batch k on the device, as (inputs, targets) [B, T] each; k+1 is then being read.

    Batches are a pure function of k, so any k may be asked for at any time: a resume or a repeated step
    only costs the read-ahead. A failed read is raised where its batch is asked for.
    """

    def __init__(self, read: Callable[[int], Any], device: torch.device, last: int) -> None:
        self._read = read
        self._device = device
        self._last = last  # nothing after this batch will be asked for
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
                break  # anything else was read ahead for an order that has since changed
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
                # Pinned memory lets the copy to the card run beside the computation.
                self._ready.put((k, tokens.pin_memory() if self._device.type == "cuda" else tokens))
            except BaseException as error:  # handed to whoever asks for this batch
                self._ready.put((k, error))
