"""How accurate forecasts were for recorded runs: track_record.csv, one row per run, written by tools/accuracy.py."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from ..memory.platform import EXPANDABLE
from ..tapes.nanogpt_compiled import ODD_SIZES
from .forecast import Forecast

FILE = Path(__file__).with_name("track_record.csv")
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "vocab_size",
         "dtype")
COLUMNS = ("trainer", "gpu", "torch", "name", *SHAPE, "mode", "reserved_bytes", "figures", "worst_percent")


class TrackRecord(NamedTuple):
    on_card: int                  # recorded runs on this GPU
    in_all: int
    worst_percent: float | None   # the largest error of all their figures; None: there are no runs


def recorded_runs() -> list[dict[str, str]]:
    """The rows of the file, by COLUMNS."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def track_record_of(forecast: Forecast, gpu: str) -> TrackRecord:
    """The recorded runs of that trainer, and the worst error of their forecasts.

    Runs of nanoGPT are counted apart with the native allocator, with expandable segments, and with sizes for which
    torch's compiler times on the GPU whether to pad.
    """
    assumes = forecast.assumes
    kind = record_kind(forecast.trainer, expandable=assumes["allocator"] == EXPANDABLE,
                       odd=ODD_SIZES in assumes["compile"])
    rows = [row for row in recorded_runs() if row["trainer"] == kind]
    errors = [float(row["worst_percent"]) for row in rows]
    return TrackRecord(sum(row["gpu"] == gpu for row in rows), len(rows), max(errors, key=abs) if errors else None)


def record_kind(trainer: str, *, expandable: bool, odd: bool) -> str:
    """The value of the column `trainer`."""
    if trainer != "nanogpt":
        return trainer
    return f"{trainer}, {EXPANDABLE}" if expandable else f"{trainer}, {ODD_SIZES}" if odd else trainer
