"""metrics.jsonl: what a run writes, one JSON object per line; how rows are encoded, read, parsed and repaired.

This is the only parser of these rows. A reader trusts nothing: a value may be missing or of any type, the last line may
be half-written, and the run may have been resumed from an earlier step.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..core.errors import SystemFault
from ..core.files import open_own, open_regular

Row = Mapping[str, Any]

END_BYTES = 2**20        # at the end of a long file, where every step is read
LONG_FILE = 32 * 2**20   # bytes: about 90,000 steps, which take seconds to parse
MAX_LINE = 16 * 2**20    # bytes; a longer one is no row, and is read in parts
MAX_COUNT = 2**63        # bytes and steps beyond it are no measurement

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STEP_ROW = b'{"kind": "step", '       # as encode_row writes it
_PROGRESS = ("step", "eval", "save")   # kinds of rows that a later `start_step` undoes

# The phases of a run, as tapes, plans and metrics.jsonl name them, with their labels for people; in the order in which
# a run reaches them. The first evaluation and the first step are phases of their own, because they hold other tensors
# than later ones.
PHASES = {
    "load": "load",
    "first_eval": "first evaluation",
    "first_train": "first step",
    "train": "training",
    "step": "optimizer step",
    "eval": "evaluation",
    "save": "checkpoint",
    "resume": "resume",
    "sample": "sampling",
}


class PhaseMemory(NamedTuple):
    """Peak bytes of a phase: in tensors, and in segments since the run began."""

    allocated: int
    reserved: int


# ---- what the rows contain

@dataclass(frozen=True)
class SplitLoss:
    """A loss over fixed windows of one split. Losses at different block sizes are not comparable."""

    split: str
    mean: float
    stderr: float
    windows: int
    block: int


@dataclass(frozen=True)
class MemoryReading:
    """Bytes as PyTorch's allocator counts them; zeros where the device has no such counters."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0


@dataclass(frozen=True)
class Evaluation:
    """The loss over fixed windows of each split, at one step, with speed and memory."""

    step: int
    losses: tuple[SplitLoss, ...]
    tokens_per_s: float
    memory: MemoryReading  # its peaks are those of this evaluation

    def of(self, split: str) -> SplitLoss:
        return next(loss for loss in self.losses if loss.split == split)


@dataclass(frozen=True)
class StepReport:
    """One logged training step."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float         # per step, averaged since the last report
    tokens_per_s: float
    mfu: float | None      # of `RunFacts.peak_flops`; None where the GPU's peak is unknown
    skipped: int           # non-finite steps skipped since the start
    loss_scale: float      # 1.0 except in float16
    memory: MemoryReading  # its peaks are those of training since the last evaluation
    seconds_left: float
    rank_memory: tuple[MemoryReading, ...] = ()  # of each rank, if there are several


@dataclass(frozen=True)
class RankFacts:
    """One of several processes that train together."""

    host: str
    pid: int
    device: str
    device_name: str


@dataclass(frozen=True)
class RunFacts:
    """What is known before step 0: the row that begins each start of a run."""

    config: dict[str, Any]
    params: int
    device: str            # "cuda:0", "cpu"
    device_name: str       # "NVIDIA GeForce RTX 4070"
    dtype: str             # "bfloat16"
    compiled: bool
    peak_flops: float | None
    peak_source: str       # where that peak comes from
    tokens_per_step: int
    train_tokens: int
    val_tokens: int
    start_step: int
    max_iters: int
    versions: dict[str, str]
    notes: tuple[str, ...]  # each a sentence on a value that was chosen for the user
    tokenizer: str = ""     # of the dataset: "gpt2", "bytes"; empty: not known
    ranks: tuple[RankFacts, ...] = ()  # of each rank, if there are several

    @property
    def devices(self) -> str:
        """The device with its name; of several ranks each."""
        if not self.ranks:
            return f"{self.device_name} ({self.device})"
        hosts = {rank.host for rank in self.ranks}
        names = {rank.device_name for rank in self.ranks}
        listed = ", ".join((f"{rank.host} " if len(hosts) > 1 else "") + rank.device +
                           (f" {rank.device_name}" if len(names) > 1 else "") for rank in self.ranks)
        return f"{len(self.ranks)} ranks" + (f" on {self.device_name}" if len(names) == 1 else "") + f": {listed}"


# ---- writing

def encode_row(row: Row) -> bytes:
    """A row → a line of valid JSON, whatever its numbers."""
    return (json.dumps(spell_nonfinite(dict(row)), allow_nan=False) + "\n").encode()


def spell_nonfinite(value: Any) -> Any:
    """The value with NaN and infinity as strings: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_nonfinite(item) for item in value]
    return value


def append_sample(out_dir: Path | str, step: int, text: str) -> None:
    """Adds generated text to samples.jsonl, for the report. A folder that cannot be written to is no error."""
    with suppress(OSError, SystemFault), open(Path(out_dir) / "samples.jsonl", "a", encoding="utf-8",
                                              opener=open_own) as file:
        file.write(json.dumps({"kind": "sample", "step": step, "text": text}) + "\n")


# ---- reading

def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The rows that are still valid, in file order. Lines that are no JSON object are skipped."""
    return read_with_errors(path)[0]


def read_with_errors(path: Path | str) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows that are still valid, in file order; and the numbers of lines that are no JSON object.

    A row with `start_step` is a resume or a rollback: steps, evaluations and saves beyond it were undone; other events
    happened nevertheless. Of two progress rows of one step the later one counts.
    """
    kept: dict[object, dict[str, Any]] = {}
    broken: list[int] = []
    if not Path(path).exists():
        return [], []
    with open_regular(path) as file:
        lines = iterate_lines(file, os.fstat(file.fileno()).st_size)
        for number, (line, wanted) in enumerate(lines, 1):
            if not wanted or not line.strip():
                continue
            row = parse_line(line)
            if row is None:
                broken.append(number)
                continue
            start, kind, step = row.get("start_step"), row.get("kind"), row.get("step")
            if isinstance(start, int):
                kept = {key: other for key, other in kept.items() if not _undone(other, start)}
            key = (kind, step) if kind in _PROGRESS and isinstance(step, int) else number
            kept.pop(key, None)
            kept[key] = row
    return list(kept.values()), broken


def _undone(row: Row, start: int) -> bool:
    """Step 7 leads from 7 steps done to 8; an evaluation or a save at 7 is of 7 steps done."""
    kind, step = row.get("kind"), row.get("step")
    return kind in _PROGRESS and isinstance(step, int) and (step >= start if kind == "step" else step > start)


def reading_stride(nbytes: int) -> int:
    """Of a file of this size, every how manieth step is read; 1: all are."""
    return max(-(-nbytes // LONG_FILE), 1)


def iterate_lines(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bool]]:
    """The lines from the file's position on, each with whether to parse it.

    Of a file longer than LONG_FILE only every n-th step is parsed, but all other rows and everything near its end: a
    chart has no more points than a page has pixels, and parsing all would take minutes.
    """
    position = file.tell()
    stride, steps = reading_stride(size - position), 0
    for line in iter(partial(file.readline, MAX_LINE), b""):
        position += len(line)
        may_skip = stride > 1 and position < size - END_BYTES and line.startswith(_STEP_ROW)
        steps += may_skip
        yield line, not may_skip or steps % stride == 0


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line → its row, NaN and infinity as floats again; None where it is no JSON object."""
    try:
        row = _parse_nonfinite(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _parse_nonfinite(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _parse_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_parse_nonfinite(item) for item in value]
    return value


# ---- rows → typed objects

def last_row(rows: Sequence[Row], kind: str) -> Row:
    """The last row of a kind: the last start of a run counts. Empty where there is none."""
    return next((row for row in reversed(rows) if row.get("kind") == kind), {})


def rows_by_step(rows: Iterable[Row], kind: str) -> list[Row]:
    """Rows of a kind that have a step, sorted by it."""
    found = [row for row in rows if row.get("kind") == kind and whole(row.get("step")) is not None]
    return sorted(found, key=lambda row: int(row["step"]))


def facts_from(row: Row) -> RunFacts:
    peak = number(row.get("peak_flops"))
    return RunFacts(
        config=mapping(row.get("config")), params=count(row.get("params")), device=text(row.get("device")),
        device_name=text(row.get("device_name")), dtype=text(row.get("dtype")), compiled=row.get("compiled") is True,
        peak_flops=peak if peak > 0 else None, peak_source=text(row.get("peak_source")),
        tokens_per_step=count(row.get("tokens_per_step")), train_tokens=count(row.get("train_tokens")),
        val_tokens=count(row.get("val_tokens")), start_step=count(row.get("start_step")),
        max_iters=count(row.get("max_iters")),
        versions={key: str(value) for key, value in mapping(row.get("versions")).items()},
        notes=tuple(texts(row.get("notes"))), tokenizer=text(row.get("tokenizer")),
        ranks=tuple(RankFacts(text(each.get("host")), count(each.get("pid")), text(each.get("device")),
                              text(each.get("device_name"))) for each in _mappings(row.get("ranks"))))


def step_from(row: Row) -> StepReport:
    mfu = number(row.get("mfu"))
    return StepReport(
        step=count(row.get("step")), loss=number(row.get("loss")), lr=number(row.get("lr")),
        grad_norm=number(row.get("grad_norm")), seconds=number(row.get("seconds")),
        tokens_per_s=number(row.get("tokens_per_s")), mfu=mfu if math.isfinite(mfu) else None,
        skipped=count(row.get("skipped")), loss_scale=number(row.get("loss_scale"), 1.0),
        memory=memory_from(row), seconds_left=number(row.get("seconds_left")),
        rank_memory=tuple(memory_from({"memory": each}) for each in _mappings(row.get("rank_memory"))))


def evaluation_from(row: Row) -> Evaluation:
    return Evaluation(
        step=count(row.get("step")), tokens_per_s=number(row.get("tokens_per_s")), memory=memory_from(row),
        losses=tuple(SplitLoss(text(each.get("split")), number(each.get("mean")), number(each.get("stderr")),
                               count(each.get("windows")), count(each.get("block")))
                     for each in _mappings(row.get("losses"))))


def memory_from(row: Row) -> MemoryReading:
    values = mapping(row.get("memory"))
    return MemoryReading(*(count(values.get(name)) for name in MemoryReading.__dataclass_fields__))


def phases_from(row: Row) -> dict[str, PhaseMemory]:
    """Peak bytes by phase, of a row `plan` (predicted) or `plan_measured`."""
    phases = {phase: mapping(peak) for phase, peak in mapping(row.get("phases")).items()}
    return {phase: PhaseMemory(count(peak.get("allocated_bytes")), count(peak.get("reserved_bytes")))
            for phase, peak in phases.items() if peak}


def owners_from(row: Row) -> list[tuple[str, int, str]]:
    """(owner, bytes at the peak, formula) per owner, of a row `plan`."""
    found = [(text(each.get("owner")), count(each.get("nbytes")), text(each.get("formula")))
             for each in _mappings(row.get("owners_at_peak"))]
    return [share for share in found if share[0] and share[1]]


class PhasePeaks:
    """The measured peak of each phase of a run since it was started; empty where the device counts no memory."""

    def __init__(self) -> None:
        self.of: dict[str, PhaseMemory] = {}

    def add(self, row: Row) -> None:
        """Takes the row's memory, if it has any. The first evaluation and the first step are phases of their own."""
        kind = str(row.get("kind"))
        if kind == "run":
            self.of = {}
            self.seen("load", memory_from(row))
        elif kind in ("step", "eval"):
            name = {"step": "train", "eval": "eval"}[kind]
            self.seen(name if f"first_{name}" in self.of else f"first_{name}", memory_from(row))
        elif kind == "save":
            self.seen("save", memory_from(row))
        elif kind == "rehearsal":
            for phase, peak in phases_from(row).items():
                self.seen(phase, MemoryReading(peak_allocated=peak.allocated, peak_reserved=peak.reserved))

    def seen(self, phase: str, memory: MemoryReading) -> None:
        if memory.peak_reserved:  # 0: the device has no counters
            before = self.of.get(phase, PhaseMemory(0, 0))
            self.of[phase] = PhaseMemory(max(before.allocated, memory.peak_allocated),
                                         max(before.reserved, memory.peak_reserved))

    def since_start(self) -> dict[str, PhaseMemory]:
        """The phases in their order, `reserved` as in forecasts: the maximum since the start of the run."""
        most, found = 0, {}
        for phase in (phase for phase in PHASES if phase in self.of):
            most = max(most, self.of[phase].reserved)
            found[phase] = PhaseMemory(self.of[phase].allocated, most)
        return found


def measured_peaks(rows: Iterable[Row]) -> dict[str, PhaseMemory]:
    """The peak of each phase since the run's last start, as far as its rows go."""
    peaks = PhasePeaks()
    for row in rows:
        peaks.add(row)
    return peaks.since_start()


# ---- single values of any type

def whole(value: Any) -> int | None:
    """A size or a count; None where the value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_COUNT:
        return None
    return int(value)


def count(value: Any, default: int = 0) -> int:
    found = whole(value)
    return default if found is None else found


def number(value: Any, default: float = math.nan) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [mapping(each) for each in value] if isinstance(value, list) else []


# ---- repair, before a run resumes or another one starts

def repair(path: Path) -> list[str]:
    """Completes or drops a last line without newline, which was being written when the run was killed. → notes."""
    if not path.exists():
        return []
    with open(path, "rb+", opener=open_own) as file:
        end = file.seek(0, os.SEEK_END)
        tail_start, tail = end, b""
        while tail_start > 0 and b"\n" not in tail and len(tail) < MAX_LINE:
            tail_start = max(0, tail_start - 65536)
            file.seek(tail_start)
            tail = file.read(end - tail_start)
        if b"\n" not in tail and tail_start > 0:  # no row is so long
            file.seek(end)
            file.write(b"\n")
            return [f"The last line of {path} is damaged, and is ignored."]
        torn = tail[tail.rfind(b"\n") + 1:]
        if not torn:
            return []
        if parse_line(torn) is not None:
            file.seek(end)
            file.write(b"\n")
            return []
        file.truncate(end - len(torn))
        return [f"The last line of {path} was cut short when the run stopped, and was dropped."]


def set_aside(folder: Path) -> list[str]:
    """Renames the metrics of an earlier run that never reached a checkpoint: they are not this run's. → notes."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_size == 0:
        return []
    number = 1
    while (aside := folder / f"metrics-{number}.jsonl").exists():
        number += 1
    metrics.rename(aside)
    return [f"{metrics} was from an earlier run without a checkpoint: it is now {aside.name}."]
