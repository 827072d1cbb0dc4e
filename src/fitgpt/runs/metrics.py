"""metrics.jsonl: how a row of a run's record is written, how the record is read, and mended after a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_LINE = 2**20        # bytes; ours are a few hundred
LONG_RECORD = 32 * 2**20    # bytes: some 90,000 steps, which take some seconds to read

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STEP_ROW = b'{"kind": "step", '       # as line_of writes it
_PROGRESS = ("step", "eval", "save")  # kinds of rows that going back undoes


# ---- written

def line_of(row: Mapping[str, Any]) -> bytes:
    """Valid JSON whatever the numbers are."""
    return (json.dumps(speak_nonfinite(dict(row)), allow_nan=False) + "\n").encode()


def speak_nonfinite(value: Any) -> Any:
    """NaN and infinity as words: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): speak_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [speak_nonfinite(item) for item in value]
    return value


def keep_sample(out_dir: Path | str, step: int, text: str) -> None:
    """For the report. A folder that cannot be written to costs the sample nothing."""
    with suppress(OSError), (Path(out_dir) / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "sample", "step": step, "text": text}) + "\n")


# ---- read

def read_every(nbytes: int) -> int:
    """Of a record of that size every so manieth step is read; 1: all are."""
    return max(-(-nbytes // LONG_RECORD), 1)


def record_lines(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bool]]:
    """The lines of a record from where the file stands, and of each whether it is to be read.

    Of a very long record only every so manieth step is, but all else and everything near its end: a curve has no more
    points than a page has dots, and whoever looks at the run is not to wait for minutes.
    """
    place = file.tell()
    every, number = read_every(size - place), 0
    while line := file.readline(LONGEST_LINE):
        place += len(line)
        steps_are_enough = every > 1 and place < size - LONGEST_LINE and line.startswith(_STEP_ROW)
        number += steps_are_enough
        yield line, not steps_are_enough or number % every == 0


def row_of(line: bytes) -> dict[str, Any] | None:
    """None where it is no JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The rows as the run now stands, in file order. Lines that are no JSON object are passed over."""
    return read_record(path)[0]


def read_record(path: Path | str) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows as the run now stands, in file order; and the numbers of lines that are no JSON object.

    A row with `start_step` begins a part of the run, which was resumed or went back: the steps, evaluations
    and saves that lay beyond were undone; other things happened nevertheless. Of two such rows of the same
    step the later one counts.
    """
    kept: dict[object, dict[str, Any]] = {}
    broken: list[int] = []
    if not Path(path).exists():
        return [], []
    with open(path, "rb") as file:
        number, begun = 0, False  # begun: a line too long to be one of ours goes on
        for line, wanted in record_lines(file, os.fstat(file.fileno()).st_size):
            rest_of_a_line, begun = begun, not line.endswith(b"\n")
            number += not rest_of_a_line
            if rest_of_a_line or not wanted or not line.strip():
                continue
            try:
                row = _hear_nonfinite(row_of(line))
            except RecursionError:
                row = None
            if row is None:
                broken.append(number)
            else:
                kept = _with_row(kept, row, number)
    return list(kept.values()), broken


def _with_row(kept: dict[object, dict[str, Any]], row: dict[str, Any], number: int) -> dict[object, dict[str, Any]]:
    start = row.get("start_step")
    if isinstance(start, int):
        kept = {key: other for key, other in kept.items() if not _undone(other, start)}
    kind, step = row.get("kind"), row.get("step")
    key = (kind, step) if kind in _PROGRESS and isinstance(step, int) else number
    kept.pop(key, None)
    kept[key] = row
    return kept


def _undone(row: Mapping[str, Any], start: int) -> bool:
    """Step 7 leads from 7 steps done to 8; an evaluation or a save at 7 is of 7 steps done."""
    kind, step = row.get("kind"), row.get("step")
    return kind in _PROGRESS and isinstance(step, int) and (step >= start if kind == "step" else step > start)


def _hear_nonfinite(value: Any) -> Any:
    if isinstance(value, str):
        return NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _hear_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hear_nonfinite(item) for item in value]
    return value


# ---- mended, before a run goes on or another begins

def repair(path: Path) -> list[str]:
    """A last line without its newline was being written when the run was killed: finish it or drop it."""
    if not path.exists() or path.stat().st_size == 0:
        return []
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        tail_start, tail = end, b""
        while tail_start > 0 and b"\n" not in tail:
            tail_start = max(0, tail_start - 65536)
            file.seek(tail_start)
            tail = file.read(end - tail_start)
        torn = tail[tail.rfind(b"\n") + 1:]
        if not torn:
            return []
        if row_of(torn) is not None:
            file.seek(end)
            file.write(b"\n")
            return []
        file.truncate(end - len(torn))
        return [f"The last line of {path} was cut short when the run stopped, and was dropped."]


def set_aside(folder: Path) -> list[str]:
    """A run that never reached a checkpoint left its metrics here: they are not this run's."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_size == 0:
        return []
    number = 1
    while (aside := folder / f"metrics-{number}.jsonl").exists():
        number += 1
    metrics.rename(aside)
    return [f"{metrics} was of an earlier run without a checkpoint: it is now {aside.name}."]
