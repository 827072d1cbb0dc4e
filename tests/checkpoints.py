"""Small checkpoints, written and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fitgpt.runs.folder import step_folders
from fitgpt.training import checkpoint
from fitgpt.training.checkpoint import UNKNOWN, save


def tensors(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {"transformer.wte.weight": torch.full((16, 4), float(step)), "transformer.ln_f.weight": torch.ones(4)}
    optimizer = {f"{name}.{part}": torch.full_like(value, step + 0.5)
                 for name, value in model.items() for part in ("exp_avg", "exp_avg_sq")}
    return model, optimizer | {"transformer.wte.weight.step": torch.tensor(float(step))}


def save_step(folder: Path, step: int, *, best: bool = False, keep_last: int = 3, status: str = UNKNOWN,
              **state: Any) -> Any:
    return save(folder, step, *tensors(step), {"of": step, **state}, best=best, keep_last=keep_last, status=status)


def list_checkpoints(folder: Path) -> list[checkpoint.Checkpoint]:
    """Checkpoints that look whole (sizes and state.json; the rest is verified by `load`), oldest first."""
    found = (checkpoint._inspect(slot.path) for slot in step_folders(folder))
    return [each for each in found if each is not None]


def steps(folder: Path) -> list[int]:
    return [found.step for found in list_checkpoints(folder)]
