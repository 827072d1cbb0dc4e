"""`fitgpt report`: run folders in, one page out. Nothing in a folder is trusted: each value is checked for its kind."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.command_options import ReportOptions
from ..config.fields import knobs_of
from ..config.run_config import RunConfig
from ..core.errors import CheckpointError, FitError, UsageError
from ..core.files import disk_faults, is_own_page, refuse_foreign, write_atomically
from ..core.units import show_bytes
from ..hardware import gpus
from ..memory.setting import DEFAULT_TORCH, setting_for
from ..memory.thinned import one_step
from ..nouns import Evaluation, OwnerTimeline, RunFacts, SplitLoss, StepReport
from ..planning.forecast import timeline_of
from ..runs.folder import recorded_config
from ..runs.metrics import read_every, read_metrics, read_record
from ..runs.rows import Row, last_of, memory_in, owners_in, peaks_in, phases_in, whole
from ..show.report import MOST_RUNS, report_page
from ..sights import RunEvent, RunRecord, RunSample

DEEPEST = 500              # layers; the tape of more takes seconds to write, and no such model is trained here
_NOT_EVENTS = {"run", "step", "eval", "save", "plan", "plan_measured", "sample"}

def report(options: ReportOptions) -> int:
    if len(options.runs) > MOST_RUNS:
        raise UsageError(f"`fitgpt report` shows at most {MOST_RUNS} runs together, and got {len(options.runs)}.",
                         f"fitgpt report {' '.join(options.runs[:MOST_RUNS])}")
    target = Path(options.out)
    with disk_faults("look at", target):
        if not target.parent.is_dir():
            raise UsageError(f"-o {target}: there is no folder {target.parent}.", "-o report.html")
    refuse_foreign(target, is_own_page, "report", "-o")
    records = [read_run(place, name) for place, name in zip(options.runs, run_names(options.runs), strict=True)]
    page = report_page(records, f"fitgpt {__version__}")
    write_atomically(target, page)
    print(f"{target}: {show_bytes(len(page.encode()))}, one file that opens in any browser.")
    return 0


def run_names(places: Sequence[str]) -> list[str]:
    """The folders' own names, or as much of their paths as tells them apart."""
    paths = [Path(place).resolve() for place in places]
    if len(set(paths)) < len(paths):
        raise UsageError("The same run folder is named twice.", f"fitgpt report {places[0]}")
    lengths = range(1, max((len(path.parts) for path in paths), default=1) + 1)
    names = ([str(Path(*path.parts[-length:])) for path in paths] for length in lengths)
    return next(each for each in names if len(set(each)) == len(each))


# ---- a run folder


def read_run(place: str, name: str = "") -> RunRecord:
    """What the folder says of its run, however little; UsageError where it holds none."""
    folder = Path(place)
    metrics = folder / "metrics.jsonl"
    with disk_faults("read", folder):
        if not folder.is_dir():
            inside = folder.is_file() and (folder.parent / "metrics.jsonl").exists()
            raise UsageError(f"{place} is {'a file' if folder.exists() else 'not there'}: a report is made of a run's "
                             "folder.", f"fitgpt report {folder.parent if inside else 'OUT_DIR'}")
        if not any((folder / part).exists() for part in ("metrics.jsonl", "run.json", "checkpoints")):
            raise UsageError(f"{place} holds no run: neither metrics.jsonl nor run.json is in it.", _runs_near(folder))
    with disk_faults("read", metrics):
        rows, broken = read_record(metrics) if metrics.is_file() else ([], [])
        rows += read_metrics(samples) if (samples := folder / "samples.jsonl").is_file() else []
        unreadable = [*_unread(metrics, broken)]
    try:
        config = recorded_config(folder)
    except CheckpointError as error:
        unreadable.append(error.what)
        config = None
    return record_of(name or folder.resolve().name, rows, config, unreadable)


def _runs_near(folder: Path) -> str:
    """A command that works, if there is a run below the folder."""
    runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    return f"fitgpt report {runs[0]}" if runs else "Name the folder that a run was given as --out_dir."


def _unread(metrics: Path, broken: Sequence[int]) -> Iterable[str]:
    if not metrics.is_file():
        yield f"{metrics.name} is missing: the run has recorded nothing."
        return
    size = metrics.stat().st_size
    if (every := read_every(size)) > 1:
        yield (f"{metrics.name} has {show_bytes(size)}: of its steps every {every}th was read, and the last ones all.")
    if broken:
        lines = f"Line {broken[0]:,} of {metrics.name} is" if len(broken) == 1 else (
            f"{len(broken):,} lines of {metrics.name} are")
        yield f"{lines} broken or half-written, and passed over."


def record_of(name: str, rows: Sequence[Row], config: dict[str, Any] | None,
              unreadable: Sequence[str] = ()) -> RunRecord:
    runs = [row for row in rows if row.get("kind") == "run"]
    facts = _facts(runs[-1]) if runs else None
    config = config or (facts.config if facts else {})
    steps = tuple(_step(row) for row in _of_kind(rows, "step"))
    evaluations = tuple(_evaluation(row) for row in _of_kind(rows, "eval"))
    plan = last_of(rows, "plan")
    defaults = {each.name: each.default for each in knobs_of(RunConfig).values()}
    return RunRecord(
        name=name, facts=facts, config=config,
        unusual=tuple(key for key, value in config.items() if key not in defaults or defaults[key] != value),
        steps=steps, evaluations=evaluations,
        saves=tuple(_count(row["step"]) for row in _of_kind(rows, "save")),
        events=tuple(_events(rows, steps)),
        samples=tuple(RunSample(_count(row.get("step")), row["text"]) for row in rows
                      if row.get("kind") == "sample" and isinstance(row.get("text"), str)),
        planned=phases_in(plan), measured=phases_in(last_of(rows, "plan_measured")) or peaks_in(rows),
        owners_at_peak={share.owner: share.nbytes for share in owners_in(plan)},
        reserve_limit=_count(plan.get("reserve_limit_bytes")) or None, timeline=planned_step(facts, config),
        unreadable=tuple(unreadable))


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """Rows of a kind that say a step, in its order."""
    found = [row for row in rows if row.get("kind") == kind and whole(row.get("step")) is not None]
    return sorted(found, key=lambda row: int(row["step"]))


# ---- rows


def _facts(row: Row) -> RunFacts:
    peak = _number(row.get("peak_flops"))
    return RunFacts(
        config=_mapping(row.get("config")), params=_count(row.get("params")), device=_text(row.get("device")),
        device_name=_text(row.get("device_name")), dtype=_text(row.get("dtype")), compiled=row.get("compiled") is True,
        peak_flops=peak if peak > 0 else None, peak_source=_text(row.get("peak_source")),
        tokens_per_step=_count(row.get("tokens_per_step")), train_tokens=_count(row.get("train_tokens")),
        val_tokens=_count(row.get("val_tokens")), start_step=_count(row.get("start_step")),
        max_iters=_count(row.get("max_iters")),
        versions={key: str(value) for key, value in _mapping(row.get("versions")).items()},
        notes=tuple(_texts(row.get("notes"))))


def _step(row: Row) -> StepReport:
    mfu = _number(row.get("mfu"))
    return StepReport(
        step=_count(row.get("step")), loss=_number(row.get("loss")), lr=_number(row.get("lr")),
        grad_norm=_number(row.get("grad_norm")), seconds=_number(row.get("seconds")),
        tokens_per_s=_number(row.get("tokens_per_s")), mfu=mfu if math.isfinite(mfu) else None,
        skipped=_count(row.get("skipped")), loss_scale=_number(row.get("loss_scale"), 1.0),
        memory=memory_in(row), seconds_left=_number(row.get("seconds_left")))


def _evaluation(row: Row) -> Evaluation:
    told = row.get("losses")
    losses = [_mapping(each) for each in told] if isinstance(told, list) else []
    return Evaluation(
        step=_count(row.get("step")), tokens_per_s=_number(row.get("tokens_per_s")), memory=memory_in(row),
        losses=tuple(SplitLoss(_text(each.get("split")), _number(each.get("mean")), _number(each.get("stderr")),
                               _count(each.get("windows")), _count(each.get("block"))) for each in losses))


def _events(rows: Sequence[Row], steps: Sequence[StepReport]) -> list[RunEvent]:
    """What is worth telling, by step: resumes, notes, warnings, skipped steps, and whatever else was written down."""
    found: list[RunEvent] = list(_skips(steps))
    step, started, noted = 0, False, set()
    for row in rows:
        kind = _text(row.get("kind")) or "unknown"
        step = _count(row.get("step"), _count(row.get("start_step"), step))
        if kind == "run":
            if started or step > 0:
                found.append(RunEvent(step, "resumed", f"Training went on from step {step:,}."))
            notes = [note for note in _texts(row.get("notes")) if note not in noted]
            found += [RunEvent(step, "note", note) for note in notes]
            noted.update(notes)
            started = True
        elif kind not in _NOT_EVENTS:
            found.append(RunEvent(step, kind, _text(row.get("text")) or _in_words(row)))
    return sorted(found, key=lambda event: event.step)


def _skips(steps: Sequence[StepReport]) -> Iterable[RunEvent]:
    before = 0
    for each in steps:
        if each.skipped > before:
            count = each.skipped - before
            scale = f"; the loss scale is now {each.loss_scale:g}" if each.loss_scale != 1.0 else ""
            were = "step was" if count == 1 else "steps were"
            yield RunEvent(each.step, "skipped", f"{count:,} {were} skipped: not all gradients were finite{scale}.")
        before = each.skipped


def _in_words(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("kind", "step")) or "no details"


# ---- the plan


def planned_step(facts: RunFacts | None, config: Mapping[str, Any]) -> OwnerTimeline | None:
    """The tape of one step that the config gives on the run's own card; None where that is no card we know."""
    card = gpus.match_device(facts.device_name) if facts and facts.device.startswith("cuda") else None
    if facts is None or card is None or card.vendor != "nvidia":
        return None
    try:
        run = RunConfig.from_dict({key: value for key, value in config.items() if key in knobs_of(RunConfig)})
    except FitError:
        return None
    if run.n_layer > DEEPEST:
        return None
    version = re.match(r"\d{1,3}\.\d{1,3}", facts.versions.get("torch", ""))
    return one_step(timeline_of(run, setting_for(card, torch=version[0] if version else DEFAULT_TORCH)))


# ---- values that may be anything


def _count(value: Any, otherwise: int = 0) -> int:
    count = whole(value)
    return otherwise if count is None else count


def _number(value: Any, otherwise: float = math.nan) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [each for each in value if isinstance(each, str)] if isinstance(
        value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
