"""The loss over fixed windows of each split, without gradients: the same for any evaluation batch.

So when memory runs out, the batch is halved and the evaluation continues with the next window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..runs.metrics import Evaluation, SplitLoss
from .device import read_memory, reset_peaks
from .model import GPT
from .oom import EvaluationDoesNotFit, OutOfMemory, attempt, release
from .prefetch import Prefetcher

ReadWindows = Callable[["np.ndarray[Any, Any]"], Any]  # window numbers [n] → token ids [n, T + 1]
TokenLosses = Callable[[Tensor, Tensor], Tensor]       # inputs and targets [B, T] → losses [B, T]
ReportProgress = Callable[[int, int, str], None]             # windows done, total windows, split
Shrunk = Callable[[int, OutOfMemory], None]                # the batch from now on, and why


@torch.no_grad()
def evaluate(model: GPT, splits: Mapping[str, tuple[ReadWindows, int]], *, batch: int, block: int, step: int,
             token_losses: TokenLosses | None = None,
             progress: ReportProgress = lambda done, total, split: None,
             stop_requested: Callable[[], bool] = lambda: False,
             shrunk: Shrunk = lambda batch, why: None) -> Evaluation | None:
    """The mean loss of each split; None if a stop was requested before the end.

    `splits` maps a name to its reader and its number of windows: always the first ones of a fixed order. Window means
    are averaged in float64 at the end, so that `batch` only decides how many are computed at once. `token_losses`
    replaces the model's own, with CUDA graphs.
    """
    was_training, device = model.training, model.lm_head.weight.device
    model.eval()
    model.refresh_casts()
    reset_peaks(str(device))
    total = sum(windows for _, windows in splits.values())
    started, done, losses = time.perf_counter(), 0, []
    try:
        for split, (read, windows) in splits.items():
            work = _Windows(token_losses or model.token_losses, device, read, windows,
                            lambda n, split=split, before=done: progress(before + n, total, split),  # type: ignore[misc]
                            stop_requested)
            while isinstance(loss := attempt(partial(work.loss, split, batch, block)), OutOfMemory):
                release(device)
                if batch == 1:
                    raise EvaluationDoesNotFit(
                        f"Out of memory even with a single window of {block} tokens: {loss.short}.",
                        "Close other programs on the GPU, or try a smaller --eval_block_size.")
                batch = -(-batch // 2)
                shrunk(batch, loss)
            if loss is None:
                return None
            losses.append(loss)
            done += windows
    finally:
        model.train(was_training)
    seconds, memory = time.perf_counter() - started, read_memory(str(device))
    reset_peaks(str(device))
    return Evaluation(step=step, losses=tuple(losses), tokens_per_s=total * block / seconds, memory=memory)


class _Windows:
    """The windows of one split. Losses that are computed are kept when memory runs out."""

    def __init__(self, token_losses: TokenLosses, device: torch.device, read: ReadWindows, windows: int,
                 progress: Callable[[int], None], stop_requested: Callable[[], bool]) -> None:
        self._token_losses, self._device, self._read, self._windows = token_losses, device, read, windows
        self._progress, self._stop_requested = progress, stop_requested
        self._means: Tensor | None = None
        self._done = 0

    def loss(self, split: str, batch: int, block: int) -> SplitLoss | None:
        """None if a stop was requested."""
        means = self._losses(batch)
        return None if means is None else _summary(split, means, block)

    def _losses(self, batch: int) -> Tensor | None:
        """The mean loss of each window, on the CPU. The last batch is padded, so that all have one shape."""
        windows, first = self._windows, self._done

        def read_batch(k: int) -> Any:
            return self._read(np.minimum(np.arange(first + k * batch, first + (k + 1) * batch), windows - 1))

        batches = math.ceil((windows - first) / batch)
        if self._means is None:
            self._means = torch.empty(batches * batch, device=self._device)
        means = self._means
        feed = Prefetcher(read_batch, self._device, last=batches - 1)
        try:
            for k in range(batches):
                inputs, targets = feed.get(k)
                end = min(self._done + batch, windows)
                means[self._done:end] = self._token_losses(inputs, targets).mean(dim=1)[:end - self._done]
                self._done = end
                self._progress(self._done)
                if self._stop_requested():
                    return None
        finally:
            feed.close()
        self._means = means[:windows].cpu()
        return self._means


def _summary(split: str, means: Tensor, block: int) -> SplitLoss:
    wide, n = means.double(), len(means)
    stderr = (wide.std() / math.sqrt(n)).item() if n > 1 else math.inf
    return SplitLoss(split=split, mean=wide.mean().item(), stderr=stderr, windows=n, block=block)
