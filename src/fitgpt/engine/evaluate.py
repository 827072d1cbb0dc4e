"""The loss over fixed windows of each split, without gradients: the same for any evaluation batch.

So when memory runs out, the batch is halved and the evaluation continues with the next window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..runs.metrics import Evaluation, SplitLoss
from .batches import Prefetcher, ReadWindows
from .device import read_memory, reset_peaks
from .model import GPT
from .oom import EvaluationDoesNotFit, OutOfMemory, attempt, release
from .ranks import ALONE, Ranks, Status

TokenLosses = Callable[[Tensor, Tensor], Tensor]  # inputs and targets [B, T] → losses [B, T]
ReportProgress = Callable[[int, int, str], None]  # windows done, total windows, split
Shrunk = Callable[[int, OutOfMemory], None]       # the batch from now on, and why


@torch.no_grad()
def evaluate(model: GPT, splits: Mapping[str, tuple[ReadWindows, int]], *, batch: int, block: int, step: int,
             token_losses: TokenLosses | None = None,
             progress: ReportProgress = lambda done, total, split: None,
             stop_requested: Callable[[], bool] = lambda: False,
             shrunk: Shrunk = lambda batch, why: None, ranks: Ranks = ALONE) -> Evaluation | None:
    """The mean loss of each split; None if a stop was requested before the end. Ranks divide the windows.

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
            def advanced(windows_done: int, before: int = done, split: str = split) -> None:
                progress(before + windows_done, total, split)

            loss, batch = _split_loss(split, token_losses or model.token_losses, device, read, windows, batch, block,
                                      advanced, stop_requested, shrunk, ranks)
            if loss is None:
                return None
            losses.append(loss)
            done += windows
    finally:
        model.train(was_training)
    seconds, memory = max(time.perf_counter() - started, 1e-9), read_memory(str(device))
    reset_peaks(str(device))
    return Evaluation(step=step, losses=tuple(losses), tokens_per_s=total * block / seconds, memory=memory)


def _split_loss(split: str, token_losses: TokenLosses, device: torch.device, read: ReadWindows, windows: int,
                batch: int, block: int, advanced: Callable[[int], None], stop_requested: Callable[[], bool],
                shrunk: Shrunk, ranks: Ranks) -> tuple[SplitLoss | None, int]:
    """(the split's loss or, if a stop was requested, None; the batch at the end)."""
    means: Tensor | None = None  # of the windows. They stay when memory runs out, and are not computed again.
    start, stop = ranks.share_of(windows)
    own, done = stop - start, 0

    def compute(batch: int) -> list[float] | None:
        """The means of this rank's windows. The last batch is padded, so that all have one shape."""
        nonlocal means, done
        first, batches = start + done, math.ceil((own - done) / batch)
        if means is None:
            means = torch.empty(batches * batch, device=device)
        feed = Prefetcher(lambda k: read(np.minimum(first + np.arange(k * batch, (k + 1) * batch), windows - 1)),
                          device, last=batches - 1)
        try:
            for k in range(batches):
                tokens = feed.get(k, stop_requested)
                if tokens is None:
                    return None
                inputs, targets = tokens
                end = min(done + batch, own)
                means[done:end] = token_losses(inputs, targets).mean(dim=1)[:end - done]
                done = end
                advanced(done)
                if stop_requested():
                    return None
        finally:
            feed.close()
        return cast("list[float]", means[:own].tolist())

    while isinstance(computed := attempt(partial(compute, batch)), OutOfMemory):
        release(device)
        if batch == 1:
            break
        batch = -(-batch // 2)
        shrunk(batch, computed)
    failed = isinstance(computed, OutOfMemory)
    status, rank = ranks.worst(Status.OUT_OF_MEMORY if failed else Status.STOP if computed is None else Status.FINE)
    if status == Status.STOP:
        return None, batch
    if status != Status.FINE:
        why = computed.short if isinstance(computed, OutOfMemory) else f"rank {rank} has too little"
        raise EvaluationDoesNotFit(f"Out of memory even with a single window of {block} tokens: {why}.",
                                   "Close other programs on the GPU, or try a smaller --eval_block_size.")
    losses = [loss for part in ranks.all_gather_object(computed) for loss in part]
    mean = sum(losses) / windows
    deviation = sum((loss - mean) ** 2 for loss in losses)
    stderr = math.sqrt(deviation / (windows - 1) / windows) if windows > 1 else math.inf
    return SplitLoss(split=split, mean=mean, stderr=stderr, windows=windows, block=block), batch
