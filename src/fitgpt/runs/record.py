"""A run folder → RunRecord, the whole run, for `fitgpt report`.

The run may still be writing, or the folder may be a copy from another machine. Nothing in it is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.fields import option_specs
from ..config.run_config import RunConfig
from ..core.errors import CheckpointError, UsageError
from ..core.files import disk_faults
from ..core.units import show_bytes
from ..memory.timeline import OwnerTimeline
from .folder import is_running, lock_owner, recorded_config, runs_near
from .metrics import (
    Evaluation,
    PhaseMemory,
    Row,
    RunFacts,
    StepReport,
    count,
    evaluation_from,
    facts_from,
    last_row,
    measured_peaks,
    owners_from,
    phases_from,
    read_metrics,
    read_with_errors,
    reading_stride,
    rows_by_step,
    step_from,
    text,
    texts,
    whole,
)

_NOT_EVENTS = {"run", "step", "eval", "save", "plan", "plan_measured", "sample"}


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run, as a sentence; or text that the model generated."""

    step: int
    kind: str   # "resumed", "skipped", "warning", "note", "sample", or the kind of its row in metrics.jsonl
    text: str


@dataclass(frozen=True)
class RunRecord:
    """A run, finished or not. What its folder does not contain is absent, NaN or empty."""

    name: str
    facts: RunFacts | None
    config: dict[str, Any]
    unusual: tuple[str, ...]                   # options that differ from their defaults
    steps: tuple[StepReport, ...]
    evaluations: tuple[Evaluation, ...]
    saves: tuple[int, ...]                     # the steps at which a checkpoint was written
    events: tuple[RunEvent, ...]
    samples: tuple[RunEvent, ...]
    planned: dict[str, PhaseMemory]            # by phase; empty: no plan was made
    measured: dict[str, PhaseMemory]
    owners_at_peak: dict[str, int]             # of the plan
    reserve_limit: int | None                  # the most that the allocator can reserve
    unreadable: tuple[str, ...]                # what of the folder could not be read, each a sentence
    running: bool = False                      # a process on this machine trains in the folder now
    timeline: OwnerTimeline | None = None      # one step of the planned tape; commands.report adds it


def read_run(folder: str, name: str = "") -> RunRecord:
    """A run folder → its record, however little it contains; UsageError where it contains no run."""
    path = Path(folder)
    metrics = path / "metrics.jsonl"
    with disk_faults("read", path):
        if not path.is_dir():
            inside = path.is_file() and (path.parent / "metrics.jsonl").exists()
            what = "is a file" if path.exists() else "does not exist"
            raise UsageError(f"{folder} {what}: `fitgpt report` reads a run's folder.",
                             f"fitgpt report {path.parent if inside else 'OUT_DIR'}")
        if not any((path / part).exists() for part in ("metrics.jsonl", "run.json", "checkpoints")):
            near = runs_near(path)
            raise UsageError(f"{folder} contains no run: neither metrics.jsonl nor run.json is in it.",
                             f"fitgpt report {near[0]}" if near else "Name the folder that was a run's --out_dir.")
    unreadable = []
    with disk_faults("read", metrics):
        if metrics.is_file():
            rows, broken = read_with_errors(metrics)
            size = metrics.stat().st_size
            if (stride := reading_stride(size)) > 1:
                unreadable.append(f"{metrics.name} has {show_bytes(size)}: every {stride}th step was read, and all of "
                                  "the last ones.")
            if broken:
                lines = (f"Line {broken[0]:,} of {metrics.name} is" if len(broken) == 1
                         else f"{len(broken):,} lines of {metrics.name} are")
                unreadable.append(f"{lines} broken or half-written, and skipped.")
        else:
            rows = []
            unreadable.append(f"{metrics.name} is missing: the run has recorded nothing.")
        rows += read_metrics(path / "samples.jsonl")
    try:
        config = recorded_config(path)
    except CheckpointError as error:
        unreadable.append(error.what)
        config = None
    record = record_of(name or path.resolve().name, rows, config, unreadable)
    return replace(record, running=is_running(lock_owner(path)))


def record_of(name: str, rows: Sequence[Row], config: dict[str, Any] | None,
              unreadable: Sequence[str] = ()) -> RunRecord:
    """`config`: from run.json; where there is none, the one in the rows."""
    facts = facts_from(start) if (start := last_row(rows, "run")) else None
    config = config or (facts.config if facts else {})
    steps = tuple(step_from(row) for row in rows_by_step(rows, "step"))
    plan = last_row(rows, "plan")
    defaults = {option.name: option.default for option in option_specs(RunConfig).values()}
    return RunRecord(
        name=name, facts=facts, config=config,
        unusual=tuple(key for key, value in config.items() if key not in defaults or defaults[key] != value),
        steps=steps, evaluations=tuple(evaluation_from(row) for row in rows_by_step(rows, "eval")),
        saves=tuple(count(row["step"]) for row in rows_by_step(rows, "save")),
        events=tuple(_events(rows, steps)),
        samples=tuple(RunEvent(count(row.get("step")), "sample", row["text"]) for row in rows
                      if row.get("kind") == "sample" and isinstance(row.get("text"), str)),
        planned=phases_from(plan), measured=phases_from(last_row(rows, "plan_measured")) or measured_peaks(rows),
        owners_at_peak={owner: nbytes for owner, nbytes, _ in owners_from(plan)},
        reserve_limit=whole(plan.get("reserve_limit_bytes")) or None, unreadable=tuple(unreadable))


def _events(rows: Sequence[Row], steps: Sequence[StepReport]) -> list[RunEvent]:
    """Resumes, notes, warnings, skipped steps and rows of any other kind, by step."""
    events = []
    skipped_before = 0
    for report in steps:
        if (skipped := report.skipped - skipped_before) > 0:
            scale = f"; the loss scale is now {report.loss_scale:g}" if report.loss_scale != 1.0 else ""
            were = "step was" if skipped == 1 else "steps were"
            events.append(RunEvent(report.step, "skipped",
                                   f"{skipped:,} {were} skipped: not all gradients were finite{scale}."))
        skipped_before = report.skipped
    step, started, noted = 0, False, set()
    for row in rows:
        kind = text(row.get("kind")) or "unknown"
        step = count(row.get("step"), count(row.get("start_step"), step))
        if kind == "run":
            if started or step > 0:
                events.append(RunEvent(step, "resumed", f"Training resumed from step {step:,}."))
            notes = [note for note in texts(row.get("notes")) if note not in noted]
            events += [RunEvent(step, "note", note) for note in notes]
            noted.update(notes)
            started = True
        elif kind not in _NOT_EVENTS:
            details = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("kind", "step"))
            events.append(RunEvent(step, kind, text(row.get("text")) or details or "no details"))
    return sorted(events, key=lambda event: event.step)
