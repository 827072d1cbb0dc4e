"""A tiny dataset in nanoGPT's format and a tiny run over it, shared by the tests that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fitgpt.config import RunConfig

TINY: dict[str, Any] = dict(
    n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, batch_size=4, gradient_accumulation_steps=2,
    max_iters=20, lr_decay_iters=20, warmup_iters=2, learning_rate=1e-2, min_lr=1e-3, eval_interval=10, eval_iters=2,
    device="cpu", compile=False,
)


def write_dataset(folder: Path, tokens: int = 6000, vocab: int = 64) -> str:
    """Text with structure enough that a loss falls: each token tends to follow from the last."""
    dice = np.random.default_rng(0)
    ids = np.cumsum(dice.integers(1, 4, size=tokens)) % vocab
    folder.mkdir(parents=True, exist_ok=True)
    ids[: tokens * 9 // 10].astype(np.uint16).tofile(folder / "train.bin")
    ids[tokens * 9 // 10:].astype(np.uint16).tofile(folder / "val.bin")
    return str(folder)


def tiny_config(tmp_path: Path, **changes: Any) -> RunConfig:
    dataset = write_dataset(tmp_path / "data")
    return RunConfig(**{**TINY, "dataset": dataset, "out_dir": str(tmp_path / "out"), **changes})
