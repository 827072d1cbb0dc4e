"""Evaluation is the same for any batch, a prefix for fewer windows, and leaves training as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fitgpt import GPT, GPTConfig
from fitgpt.engine.evaluate import evaluate
from fitgpt.runs.metrics import SplitLoss

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=67, block_size=16, dropout=0.2)
TOKENS = np.random.default_rng(0).integers(0, 67, size=(40, 17))


def loss_with(batch: int, windows: int = 40) -> SplitLoss:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    model.train()
    result = evaluate(model, {"val": (lambda k: TOKENS[k], windows)}, batch=batch, block=16, step=0)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    return result.of("val")


@pytest.mark.parametrize("batch", [1, 3, 7, 16, 64])
def test_the_loss_does_not_depend_on_the_evaluation_batch(batch: int) -> None:
    assert loss_with(batch).mean == pytest.approx(loss_with(40).mean, rel=1e-6)
    assert loss_with(batch).stderr == pytest.approx(loss_with(40).stderr, rel=1e-4)


def test_fewer_windows_are_a_prefix_of_the_same_ones() -> None:
    singles = []
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    for row in TOKENS[:12]:
        tokens = torch.from_numpy(row)[None]
        singles.append(model.token_losses(tokens[:, :-1], tokens[:, 1:]).mean().item())
    assert loss_with(5, windows=12).mean == pytest.approx(np.mean(singles), rel=1e-6)
    assert loss_with(5, windows=12).stderr == pytest.approx(np.std(singles, ddof=1) / 12**0.5, rel=1e-4)


def test_progress_counts_windows_over_all_splits() -> None:
    seen = []
    evaluate(GPT(CONFIG), {"train": (lambda k: TOKENS[k], 10), "val": (lambda k: TOKENS[k], 5)}, batch=4,
             block=16, step=0, progress=lambda done, total, split: seen.append((done, total, split)))
    assert seen == [(4, 15, "train"), (8, 15, "train"), (10, 15, "train"), (14, 15, "val"), (15, 15, "val")]


def test_a_failed_read_in_the_thread_is_raised_by_evaluate() -> None:
    def read(k: np.ndarray) -> np.ndarray:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        evaluate(GPT(CONFIG), {"val": (read, 8)}, batch=4, block=16, step=0)


def test_a_clock_that_stands_still_fails_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 5.0)
    assert loss_with(8).windows == 40
