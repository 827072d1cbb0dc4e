"""Weights & Biases, if requested and installed: nanoGPT's five keys. The record is metrics.jsonl either way."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.run_config import RunConfig

Log = Callable[[dict[str, Any]], None]


def open_wandb(config: RunConfig, folder: Path) -> tuple[Log | None, tuple[str, ...]]:
    """A function that logs; or none, and a sentence that says where the metrics are."""
    if not config.wandb_log:
        return None, ()
    try:
        wandb: Any = importlib.import_module("wandb")
        wandb.init(project=config.wandb_project, name=config.wandb_run_name, config=config.to_dict())
    except ModuleNotFoundError:
        return None, (f"wandb_log: wandb is not installed; the metrics are in {folder / 'metrics.jsonl'}.",)
    except Exception as error:  # no account, no network: never a reason not to train
        return None, (f"wandb_log: wandb did not start ({error}); the metrics are in {folder / 'metrics.jsonl'}.",)

    def log(row: dict[str, Any]) -> None:
        with suppress(Exception):  # unreachable now: metrics.jsonl has the row
            wandb.log(row)

    return log, ()
