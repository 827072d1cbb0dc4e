"""The loss over fixed windows of each split, without gradients: the same for any evaluation batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..nouns import Evaluation, SplitLoss
from .device import read_memory, reset_peaks
from .feed import Feed
from .model import GPT

ReadWindows = Callable[["np.ndarray[Any, Any]"], Any]  # numbers of windows [n] → token ids [n, T + 1]
TokenLosses = Callable[[Tensor, Tensor], Tensor]       # inputs and targets [B, T] → losses [B, T]
Progress = Callable[[int, int, str], None]             # windows done, windows in all, split


@torch.no_grad()
def evaluate(model: GPT, splits: Mapping[str, tuple[ReadWindows, int]], *, batch: int, block: int, step: int,
             token_losses: TokenLosses | None = None,
             progress: Progress = lambda done, total, split: None,
             stop_asked: Callable[[], bool] = lambda: False) -> Evaluation | None:
    """`splits` maps a name to its reader and how many windows to take: always the first ones of a fixed order.

    Each window's mean loss is kept apart and averaged in float64 at the end, so that `batch` only says how many
    are computed at once. `token_losses` stands in for the model's own where that is recorded. The result is None
    if a stop was asked for before it was done.
    """
    was_training, device = model.training, model.lm_head.weight.device
    model.eval()
    reset_peaks(str(device))
    total = sum(windows for _, windows in splits.values())
    started, done, losses = time.perf_counter(), 0, []
    try:
        for split, (read, windows) in splits.items():
            means = _window_losses(token_losses or model.token_losses, device, read, windows, batch,
                                   lambda n, split=split, before=done: progress(before + n, total, split),  # type: ignore[misc]
                                   stop_asked)
            if means is None:
                return None
            losses.append(_summary(split, means, block))
            done += windows
    finally:
        model.train(was_training)
    seconds, memory = time.perf_counter() - started, read_memory(str(device))
    reset_peaks(str(device))
    return Evaluation(step=step, losses=tuple(losses), tokens_per_s=total * block / seconds, memory=memory)


def _window_losses(token_losses: TokenLosses, device: torch.device, read: ReadWindows, windows: int, batch: int,
                   progress: Callable[[int], None], stop_asked: Callable[[], bool]) -> Tensor | None:
    """The mean loss of each window, on the host. The last batch is filled up, so that all have one shape."""
    def read_batch(k: int) -> Any:
        return read(np.minimum(np.arange(k * batch, (k + 1) * batch), windows - 1))

    batches = math.ceil(windows / batch)
    means = torch.empty(batches * batch, device=device)
    feed = Feed(read_batch, device, last=batches - 1)
    try:
        for k in range(batches):
            inputs, targets = feed.get(k)
            means[k * batch:(k + 1) * batch] = token_losses(inputs, targets).mean(dim=1)
            progress(min((k + 1) * batch, windows))
            if stop_asked():
                return None
    finally:
        feed.close()
    return means[:windows].cpu()


def _summary(split: str, means: Tensor, block: int) -> SplitLoss:
    wide, n = means.double(), len(means)
    stderr = (wide.std() / math.sqrt(n)).item() if n > 1 else math.inf
    return SplitLoss(split=split, mean=wide.mean().item(), stderr=stderr, windows=n, block=block)
