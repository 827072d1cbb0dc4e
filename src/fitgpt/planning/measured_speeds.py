"""Runs whose tokens per second were measured: those that come with fitgpt, and those of this user's GPUs. Estimates are
compared with them.

The user's are in one file of JSON lines, speeds.jsonl in FITGPT_HOME; by default in the user's data directory,
~/.local/share/fitgpt. `fit --measure`, `record` and finished training runs write it. A row has the GPU, the options
that speed depends on, the torch version, the date and the tokens per second. The file is never a reason for a command
to fail: a line that cannot be read is skipped, and a file that cannot be written stays as it is.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..config.run_config import SPEED_OPTIONS, RunConfig
from ..core.errors import FitError, SystemFault
from ..core.files import MAX_JSON_BYTES, data_home, read_limited, write_atomically
from ..core.units import show_count

MOST_ROWS = 500  # the newest are kept


class MeasuredSpeed(NamedTuple):
    card: str
    config: RunConfig
    tokens_per_s: float
    source: str   # the benchmark, or the command: "fit --measure"
    basis: str    # a phrase with the source, for an estimate


def measured_on(gpu: str, trainer: str = "fitgpt") -> list[MeasuredSpeed]:
    """Runs on this GPU: those in the user's file, the newest first, then those that come with fitgpt."""
    return [*(load(gpu) if trainer == "fitgpt" else []), *(each for each in shipped(trainer) if each.card == gpu)]


@cache
def shipped(trainer: str = "fitgpt") -> tuple[MeasuredSpeed, ...]:
    """From recorded.json, which tools/recorded.py writes."""
    document = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
    return tuple(MeasuredSpeed(row["card"], RunConfig(**row["options"]), row["tokens_per_s"], row["source"],
                               f"measured: {row['source']}")
                 for row in document["nanogpt" if trainer == "nanogpt" else "runs"])


# ---- the user's file


def store_path() -> Path:
    return data_home() / "speeds.jsonl"


def load(gpu: str) -> list[MeasuredSpeed]:
    """The runs that were measured on this GPU, the newest first."""
    found = (_parse(row) for row in reversed(_rows()) if row.get("gpu") == gpu)
    return [each for each in found if each is not None]


def add(gpu: str, config: RunConfig, tokens_per_s: float, torch: str, command: str) -> None:
    """Adds a measurement; it replaces an earlier one of the same run on the same GPU with the same torch. `config`:
    resolved, with the vocabulary of its data."""
    row = {"gpu": gpu, "torch": torch, "options": {name: getattr(config, name) for name in SPEED_OPTIONS},
           "tokens_per_s": round(tokens_per_s, 1), "date": date.today().isoformat(), "command": command}
    kept = [each for each in _rows() if any(each.get(key) != row[key] for key in ("gpu", "torch", "options"))]
    path = store_path()
    with suppress(SystemFault, OSError):  # a full or read-only disk: the measurement is not kept
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{json.dumps(each)}\n" for each in [*kept, row][-MOST_ROWS:]))


def _rows() -> list[dict[str, Any]]:
    """The JSON objects of the store, the oldest first."""
    try:
        lines = read_limited(store_path(), MAX_JSON_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                found.append(row)
    return found


def _parse(row: dict[str, Any]) -> MeasuredSpeed | None:
    """None where the row is damaged, or of a version of fitgpt with other options."""
    try:
        speed = float(row["tokens_per_s"])
        if not (math.isfinite(speed) and speed > 0):
            return None
        command = str(row["command"])
        return MeasuredSpeed(row["gpu"], RunConfig(**row["options"]), speed, command,
                             f"measured here on {row['date']}: {show_count(round(speed))} tokens/s ({command}, torch "
                             f"{row['torch']})")
    except (KeyError, TypeError, ValueError, FitError):
        return None
