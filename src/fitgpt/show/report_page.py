"""RunRecords as a page in one file: summary, curves, memory against the plan, events, samples, config."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ..core.units import show_bytes, show_count, show_seconds
from ..runs.metrics import PHASES, Evaluation, SplitLoss
from ..runs.record import RunEvent, RunRecord
from .charts import (
    SERIES_COLOURS,
    EventMark,
    Level,
    Series,
    breakable,
    escaped,
    html_page,
    line_chart,
    owner_bar,
    stacked_chart,
)
from .progress import show_mfu

MAX_RUNS = SERIES_COLOURS
MAX_EVENTS = 200
MAX_SAMPLES = 12
MAX_OPTIONS = 300
MAX_SAMPLE_LENGTH = 4000  # characters shown; a run folder may hold anything
MAX_VALUE_LENGTH = 300
UNMARKED = {"note"}       # kinds of events without a line in the curves


def report_page(records: Sequence[RunRecord], made_by: str) -> str:
    title = " and ".join(record.name for record in records)
    parts = [header(records, title), summary(records), curves(records), memory(records),
             events(records), samples(records), config(records), versions(records),
             f"<footer>Made by {escaped(made_by)}. Point at a curve for its values; drag to zoom, or click and turn "
             "the wheel; arrow keys, + and − work too, and 0 shows everything again.</footer>"]
    return html_page(f"{title} · fitgpt", "\n".join(part for part in parts if part))


# ---- at the top


def header(records: Sequence[RunRecord], title: str) -> str:
    """The title, a line per run, and what could not be read."""
    lines, unreadable = "", ""
    for record in records:
        name, facts = f"{record.name}: " if len(records) > 1 else "", record.facts
        parts = ["The run has not written its header yet."] if facts is None else [
            f"{show_count(facts.params)} parameters" if facts.params else "", clipped(facts.device_name),
            clipped(facts.dtype), "compiled" if facts.compiled else "not compiled",
            f"{show_count(facts.train_tokens)} tokens of data" if facts.train_tokens else ""]
        lines += f"<p>{escaped(name + ' · '.join(part for part in parts if part))}</p>"
        unreadable += "".join(f"<p>{escaped(clipped(name + each))}</p>" for each in record.unreadable)
    callout = f'\n<div class="callout">{unreadable}</div>' if unreadable else ""
    return f"<header><h1>{escaped(clipped(title))}</h1>{lines}</header>{callout}"


def summary(records: Sequence[RunRecord]) -> str:
    """Six figures per run: tiles for one run, a table for several."""
    if len(records) == 1:
        tiles = "".join(f"<div><dt>{name}</dt><dd>{escaped(figure)}</dd><dd>{escaped(more)}</dd></div>"
                        for name, (figure, more) in readings(records[0]).items())
        return f'<dl class="tiles">{tiles}</dl>'
    found = [readings(record) for record in records]
    rows = [(name, [f"{escaped(figure)}<br><small class='quiet'>{escaped(more)}</small>"
                    for figure, more in (each[name] for each in found)]) for name in found[0]]
    return f'<div class="card">{table_of_runs(records, rows)}</div>'


def table_of_runs(records: Sequence[RunRecord], rows: Iterable[tuple[str, Iterable[str]]], kind: str = "") -> str:
    """A row per (name, a cell per run in HTML)."""
    heads = "".join(f'<th class="s{index}"><i></i>{escaped(clipped(record.name))}</th>'
                    for index, record in enumerate(records))
    head = f"<thead><tr><th></th>{heads}</tr></thead>" if len(records) > 1 else ""
    body = "".join(f"<tr><th>{escaped(clipped(name))}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
                   for name, cells in rows)
    return f"<table{kind}>{head}<tbody>{body}</tbody></table>"


def readings(record: RunRecord) -> dict[str, tuple[str, str]]:
    """Name → (figure, what belongs to it)."""
    facts, steps = record.facts, record.steps
    found = {name: ("–", more) for name, more in (
        ("best validation loss", "not evaluated yet"), ("last training loss", "no step yet"), ("steps", ""),
        ("speed", ""), ("peak memory", ""), ("time in steps", ""))}

    evaluated = [(each.step, loss) for each in record.evaluations if (loss := loss_of(each, "val"))
                 and math.isfinite(loss.mean)]
    if evaluated:
        step, best = min(evaluated, key=lambda each: each[1].mean)
        error = f"± {best.stderr:.4f}, " if math.isfinite(best.stderr) else ""
        found["best validation loss"] = f"{best.mean:.4f}", f"{error}block {best.block:,}, step {step:,}"
    if steps:
        found["last training loss"] = f"{steps[-1].loss:.4f}", f"at step {steps[-1].step:,}"

    # The last step reported, evaluated or saved.
    done = max([0, *(each.step + 1 for each in steps[-1:]), *(each.step for each in record.evaluations[-1:]),
                *record.saves[-1:]])
    more = [f"of {facts.max_iters:,}" if facts and facts.max_iters else "",
            f"{show_count(done * facts.tokens_per_step)} tokens" if facts and facts.tokens_per_step else ""]
    found["steps"] = f"{done:,}", ", ".join(each for each in more if each)

    speeds = [each.tokens_per_s for each in steps if each.tokens_per_s > 0 and math.isfinite(each.tokens_per_s)]
    mfus = [each.mfu for each in steps if each.mfu is not None]
    if speeds:
        mfu = f", MFU {show_mfu(statistics.median(mfus))}" if mfus else ""
        found["speed"] = f"{statistics.median(speeds):,.0f}", f"tokens per second{mfu}"

    measured = max((each.reserved for each in record.measured.values()), default=0)
    planned = f"planned {show_bytes(planned_peak(record))}" if planned_peak(record) else ""
    found["peak memory"] = ((show_bytes(measured), f"reserved; {planned}" if planned else "reserved") if measured else
                            ("–", planned or "no counters on this device"))

    # Of steps alone, without evaluations: each report has the mean seconds of the steps since the one before.
    spans = [(after.step - before.step) * after.seconds for before, after in pairwise(steps)]
    seconds = math.fsum(each for each in spans if 0 <= each < math.inf)
    saves = f"saved {len(record.saves):,} time{'' if len(record.saves) == 1 else 's'}"
    found["time in steps"] = show_seconds(seconds) if seconds else "–", saves
    return found


def loss_of(evaluation: Evaluation, split: str) -> SplitLoss | None:
    return next((loss for loss in evaluation.losses if loss.split == split), None)


def planned_peak(record: RunRecord) -> int:
    return max((each.reserved for each in record.planned.values()), default=0)


# ---- curves


def curves(records: Sequence[RunRecord]) -> str:
    """Loss, learning rate, speed, gradient norm and memory, over steps; over tokens where the runs' steps differ in
    size."""
    alone = len(records) == 1
    sizes = [record.facts.tokens_per_step if record.facts else 0 for record in records]
    by_tokens = len(set(sizes)) > 1 and all(sizes)
    units, x_name = (sizes, "tokens") if by_tokens else ([1] * len(records), "step")
    marks = [EventMark(event.step * unit, f"{event.kind}: {clipped(event.text)}")
             for record, unit in zip(records, units, strict=True) for event in record.events
             if event.kind not in UNMARKED]

    def curve_per_run(name: str, value: Callable[..., float]) -> list[Series]:
        return [Series(name if alone else record.name,
                       [(each.step * units[index], value(each)) for each in record.steps], index)
                for index, record in enumerate(records)]

    losses = [one for index, record in enumerate(records) for one in loss_series(record, index, units[index], alone)]
    blocks = {loss.block for record in records for each in record.evaluations for loss in each.losses}
    uneven = "Evaluated at different block sizes: these losses do not compare." if len(blocks) > 1 else ""
    dotted = "Dotted lines: see Events, below." if marks else ""
    charts = [
        line_chart("Loss", losses, x_name=x_name, marks=marks, wide=True, note=f"{uneven} {dotted}".strip()),
        line_chart("Learning rate", curve_per_run("learning rate", lambda each: each.lr), x_name=x_name,
                   from_zero=True),
        line_chart("Tokens per second", curve_per_run("tokens per second", lambda each: each.tokens_per_s),
                   unit="count", x_name=x_name, from_zero=True),
        line_chart("Gradient norm, before clipping", curve_per_run("gradient norm", lambda each: each.grad_norm),
                   x_name=x_name, from_zero=True),
        memory_chart(records, units, x_name),
    ]
    return f'<div class="grid">{"".join(charts)}</div>'


def loss_series(record: RunRecord, index: int, unit: int, alone: bool) -> list[Series]:
    """The loss of each step, and the evaluated losses; with several runs the former is faint."""
    name = "" if alone else f"{record.name}, "
    found = [Series(f"{name}training", [(each.step * unit, each.loss) for each in record.steps], index,
                    "line" if alone else "faint")]
    for split, called, colour in (("train", "training, evaluated", 2), ("val", "validation", 1)):
        if split == "train" and not alone:
            continue
        measured = [(each.step * unit, loss) for each in record.evaluations if (loss := loss_of(each, split))]
        found.append(Series(f"{name}{called}", [(x, loss.mean) for x, loss in measured], colour if alone else index,
                            "dotted", [loss.stderr for _, loss in measured]))
    return [each for each in found if each.points]


def memory_chart(records: Sequence[RunRecord], units: Sequence[int], x_name: str) -> str:
    alone = len(records) == 1
    series: list[Series] = []
    levels: dict[float, Level] = {}  # by value: those of the same value become one, with both names
    for index, (record, unit) in enumerate(zip(records, units, strict=True)):
        name = "" if alone else f"{record.name}, "
        training = [(each.step * unit, each.memory) for each in record.steps if each.memory.peak_reserved]
        evaluating = [(each.step * unit, each.memory) for each in record.evaluations if each.memory.peak_reserved]
        series += [Series(f"{name}reserved, training", [(x, one.peak_reserved) for x, one in training], index),
                   Series(f"{name}reserved, evaluating", [(x, one.peak_reserved) for x, one in evaluating],
                          1 if alone else index, "dotted")]
        if alone:
            series.append(Series("allocated, training", [(x, one.peak_allocated) for x, one in training], 2, "dashed"))
        for called, value, colour in (("planned", planned_peak(record), 5 if alone else index),
                                      ("limit", record.reserve_limit, None)):
            if value:
                same = levels.get(value)
                levels[value] = Level(f"{same.name} and {name}{called}" if same else f"{name}{called}", value, colour)
    series = [each for each in series if each.points]
    if not series and any(record.steps for record in records):
        return line_chart("Memory", [], empty="This device has no memory counters.")
    return line_chart("Peak memory so far", series, unit="bytes", x_name=x_name, levels=list(levels.values()),
                      from_zero=True)


# ---- planned and measured memory


def memory(records: Sequence[RunRecord]) -> str:
    parts = []
    for record in records:
        head = f" of {record.name}" if len(records) > 1 else ""
        if record.timeline:
            chart = stacked_chart(record.timeline, title=f"One step{head} by owner, as planned",
                                  limit=record.reserve_limit)
            parts.append(f'<div class="grid">{chart}</div>')
        if record.owners_at_peak or record.planned:
            bar = owner_bar(record.owners_at_peak, limit=record.reserve_limit) if record.owners_at_peak else ""
            parts.append(f'<h2>Planned and measured memory{escaped(head)}</h2><div class="card">{bar}'
                         f"{plan_table(record) if record.planned else ''}</div>")
    return "".join(parts)


def plan_table(record: RunRecord) -> str:
    rows = []
    for phase, planned in record.planned.items():
        cells = [show_bytes(planned.allocated), show_bytes(planned.reserved), "–", "–", "–"]
        measured = record.measured.get(phase)
        if measured:
            cells[2:4] = show_bytes(measured.allocated), show_bytes(measured.reserved)
            if planned.reserved:
                cells[4] = f"{measured.reserved / planned.reserved - 1:+.2%}"
        figures = "".join(f'<td class="figure">{each}</td>' for each in cells)
        rows.append(f"<tr><th>{escaped(clipped(PHASES.get(phase, phase)))}</th>{figures}</tr>")
    heads = ("planned, allocated", "reserved", "measured, allocated", "reserved", "reserved, difference")
    return ("<table><thead><tr><th>phase</th>" + "".join(f'<th class="figure">{each}</th>' for each in heads)
            + f"</tr></thead><tbody>{''.join(rows[:MAX_EVENTS])}</tbody></table>")


# ---- events and samples


def events(records: Sequence[RunRecord]) -> str:
    found = sorted(((event, record.name) for record in records for event in record.events),
                   key=lambda each: each[0].step)
    if not found:
        return ""

    def row(event: RunEvent, name: str) -> str:
        which = f'<td class="run">{breakable(clipped(name))}</td>' if len(records) > 1 else ""
        alert = "" if event.kind in {*UNMARKED, "resumed"} else " alert"
        return (f'<tr><td class="figure">{event.step:,}</td>{which}<td class="kind{alert}">'
                f"{escaped(clipped(event.kind))}</td><td>{escaped(clipped(event.text))}</td></tr>")

    rows = [row(event, name) for event, name in found]
    left_out = len(rows) - MAX_EVENTS
    if left_out > 0:
        rows[MAX_EVENTS // 2:-(MAX_EVENTS // 2)] = [
            f'<tr><td></td><td colspan="3" class="kind">{left_out:,} more</td></tr>']
    which = "<th>run</th>" if len(records) > 1 else ""
    return ('<h2>Events</h2><div class="card"><table><thead><tr><th class="figure">step</th>'
            f"{which}<th>what</th><th></th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>")


def samples(records: Sequence[RunRecord]) -> str:
    blocks = "".join(
        f'<p class="quiet">{escaped(record.name) + ", " if len(records) > 1 else ""}step {each.step:,}</p>'
        f'<pre class="sample">{escaped(clipped(each.text, MAX_SAMPLE_LENGTH))}</pre>'
        for record in records for each in record.samples[-MAX_SAMPLES:])
    return f'<h2>Samples</h2><div class="card">{blocks}</div>' if blocks else ""


# ---- config and versions


def config(records: Sequence[RunRecord]) -> str:
    """One run: the options that are not at their defaults, then the others. Several: those that differ, then the
    others."""
    first, keys = records[0], list(dict.fromkeys(key for record in records for key in record.config))
    if not keys:
        return ""

    def option_list(names: Iterable[str]) -> str:
        rows = [f"<div><dt>{escaped(clipped(key))}</dt><dd>{escaped(value_of(first, key))}</dd></div>" for key in names]
        return f'<dl class="options">{"".join(rows[:MAX_OPTIONS])}</dl>' if rows else ""

    if len(records) == 1:
        title, rest_title, shown = "Config", "Options at their defaults", [key for key in keys if key in first.unusual]
        top = option_list(shown)
    else:
        title, rest_title = "Config: differences", "The same in all runs"
        shown = [key for key in keys if len({value_of(record, key) for record in records}) > 1]
        rows = [(key, [breakable(value_of(record, key)) for record in records]) for key in shown[:MAX_OPTIONS]]
        top = table_of_runs(records, rows, ' class="whole"') if rows else ""
    rest = option_list(key for key in keys if key not in shown)
    more = f"<details><summary>{rest_title}</summary>{rest}</details>" if rest else ""
    return f'<h2>{title}</h2><div class="card">{top or "<p>None.</p>"}{more}</div>'


def value_of(record: RunRecord, key: str) -> str:
    if key not in record.config:
        return "–"
    value = record.config[key]
    if isinstance(value, float):
        value = float(f"{value:.12g}")  # a tenth of 6e-4 is 6e-05, not 5.9999999999999995e-05
    return clipped(str(value) or "''")


def versions(records: Sequence[RunRecord]) -> str:
    facts = [record.facts for record in records]
    names = list(dict.fromkeys(name for each in facts if each for name in each.versions))
    rows = [(name, [each.versions.get(name, "–") if each else "–" for each in facts]) for name in names[:MAX_OPTIONS]]
    if any(facts):
        rows.append(("device", [f"{each.device_name} ({each.device})" if each else "–" for each in facts]))
    if not rows:
        return ""
    cells = [(name, [escaped(clipped(text)) for text in texts]) for name, texts in rows]
    return f'<h2>Versions</h2><div class="card">{table_of_runs(records, cells)}</div>'


def clipped(text: str, length: int = MAX_VALUE_LENGTH) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"
