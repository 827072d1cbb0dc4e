"""Forecast beside measurement: the written tape of nanoGPT's train.py against recorded runs of it.

    python -m fitgpt.memory.accuracy bench/results/nanogpt_h200.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .allocator import replay
from .nanogpt import write
from .nanorun import NanoGPTRun


class Figure(NamedTuple):
    """One measured number of one recorded run, and what the tape says of it."""

    run: str
    name: str        # as the record has it: train_peak, eval_first_reserved …
    predicted: int
    measured: int

    @property
    def off(self) -> int:
        return self.predicted - self.measured

    @property
    def percent(self) -> float:
        return 100 * self.off / self.measured


def predict(run: NanoGPTRun) -> dict[str, int]:
    """The recorded figures of a run, under the record's own names; training includes the optimizer's step."""
    timeline = replay(write(run))
    peaks = timeline.peaks()
    return {
        "eval_first_peak": peaks["first_eval"].allocated,
        "eval_first_reserved": peaks["first_eval"].reserved,
        "train_first_peak": peaks["first_train"].allocated,
        "train_peak": max(peaks["train"].allocated, peaks["step"].allocated),
        "train_reserved": peaks["step"].reserved,
        "eval_peak": peaks["eval"].allocated,
        "idle": timeline.allocated[-1],
    }


def compare(rows: Iterable[dict[str, Any]]) -> list[Figure]:
    return [Figure(row["name"], name, predicted, row[name]) for row in rows
            for name, predicted in predict(NanoGPTRun(**row["config"])).items()]


def table(figures: Iterable[Figure]) -> str:
    """Markdown, one line a figure."""
    lines = ["| run | figure | predicted | measured | off | % |", "|---|---|--:|--:|--:|--:|"]
    lines += [f"| {each.run} | {each.name} | {each.predicted:,} | {each.measured:,} | {each.off:+,} | "
              f"{each.percent:+.3f} |" if each.off else
              f"| {each.run} | {each.name} | {each.predicted:,} | {each.measured:,} | 0 | 0 |" for each in figures]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(compare(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"])))
