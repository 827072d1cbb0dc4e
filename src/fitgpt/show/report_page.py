"""RunRecords as a page in one file: summary, curves, memory against the plan, events, samples, config."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ..core.phases import PHASES
from ..core.units import show_bytes, show_count, show_seconds
from ..runs.metrics import Evaluation, SplitLoss
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
_UNMARKED = {"note"}      # kinds of events without a line in the curves

Reading = Callable[[RunRecord], tuple[str, str]]


def report_page(records: Sequence[RunRecord], made_by: str) -> str:
    title = " and ".join(record.name for record in records)
    parts = [header(records, title), notes(records), summary(records), curves(records), memory(records),
             events(records), samples(records), config(records), versions(records),
             f"<footer>Made by {escaped(made_by)}. Point at a curve for its values; drag to zoom, or click and turn "
             "the wheel; arrow keys, + and − work too, and 0 shows everything again.</footer>"]
    return html_page(f"{title} · fitgpt", "\n".join(part for part in parts if part))


# ---- at the top


def header(records: Sequence[RunRecord], title: str) -> str:
    lines = []
    for record in records:
        named = f"{record.name}: " if len(records) > 1 else ""
        lines.append(f"<p>{escaped(named + described(record))}</p>")
    return f"<header><h1>{escaped(clipped(title))}</h1>{''.join(lines)}</header>"


def described(record: RunRecord) -> str:
    facts = record.facts
    if facts is None:
        return "The run has not written its header yet."
    parts = [f"{show_count(facts.params)} parameters" if facts.params else "", clipped(facts.device_name),
             clipped(facts.dtype), "compiled" if facts.compiled else "not compiled",
             f"{show_count(facts.train_tokens)} tokens of data" if facts.train_tokens else ""]
    return " · ".join(part for part in parts if part)


def notes(records: Sequence[RunRecord]) -> str:
    named = len(records) > 1
    found = [f"{record.name}: {each}" if named else each for record in records for each in record.unreadable]
    paragraphs = "".join(f"<p>{escaped(clipped(each))}</p>" for each in found)
    return f'<div class="callout">{paragraphs}</div>' if found else ""


def summary(records: Sequence[RunRecord]) -> str:
    """Six figures per run: tiles for one run, a table for several."""
    rows = [(name, [reading(record) for record in records]) for name, reading in READINGS]
    if len(records) == 1:
        tiles = "".join(f"<div><dt>{name}</dt><dd>{escaped(figure)}</dd><dd>{escaped(more)}</dd></div>"
                        for name, [(figure, more)] in rows)
        return f'<dl class="tiles">{tiles}</dl>'
    body = "".join(
        f"<tr><th>{name}</th>" + "".join(f"<td>{escaped(figure)}<br><small class='quiet'>{escaped(more)}</small></td>"
                                         for figure, more in found) + "</tr>" for name, found in rows)
    return f'<div class="card"><table><thead><tr><th></th>{run_heads(records)}</tr></thead><tbody>{body}</tbody>' \
           "</table></div>"


def run_heads(records: Sequence[RunRecord]) -> str:
    return "".join(f'<th class="s{index}"><i></i>{escaped(clipped(record.name))}</th>'
                   for index, record in enumerate(records))


def progress(record: RunRecord) -> tuple[str, str]:
    done, facts = steps_done(record), record.facts
    more = [f"of {facts.max_iters:,}" if facts and facts.max_iters else "",
            f"{show_count(done * facts.tokens_per_step)} tokens" if facts and facts.tokens_per_step else ""]
    return f"{done:,}", ", ".join(each for each in more if each)


def validation(record: RunRecord) -> tuple[str, str]:
    found = [(each.step, loss) for each in record.evaluations if (loss := loss_of(each, "val"))
             and math.isfinite(loss.mean)]
    if not found:
        return "–", "not evaluated yet"
    step, best = min(found, key=lambda each: each[1].mean)
    error = f"± {best.stderr:.4f}, " if math.isfinite(best.stderr) else ""
    return f"{best.mean:.4f}", f"{error}block {best.block:,}, step {step:,}"


def training(record: RunRecord) -> tuple[str, str]:
    if not record.steps:
        return "–", "no step yet"
    last = record.steps[-1]
    return f"{last.loss:.4f}", f"at step {last.step:,}"


def speed(record: RunRecord) -> tuple[str, str]:
    found = [each.tokens_per_s for each in record.steps if each.tokens_per_s > 0 and math.isfinite(each.tokens_per_s)]
    if not found:
        return "–", ""
    mfus = [each.mfu for each in record.steps if each.mfu is not None]
    mfu = f", MFU {show_mfu(statistics.median(mfus))}" if mfus else ""
    return f"{statistics.median(found):,.0f}", f"tokens per second{mfu}"


def peak_memory(record: RunRecord) -> tuple[str, str]:
    measured = max((each.reserved for each in record.measured.values()), default=0)
    planned = max((each.reserved for each in record.planned.values()), default=0)
    if not measured:
        return "–", f"planned {show_bytes(planned)}" if planned else "no counters on this device"
    return show_bytes(measured), f"reserved; planned {show_bytes(planned)}" if planned else "reserved"


def time_spent(record: RunRecord) -> tuple[str, str]:
    """Of steps alone, without evaluations: each report has the mean seconds of the steps since the one before."""
    spans = [(after.step - before.step) * after.seconds for before, after in pairwise(record.steps)]
    seconds = math.fsum(each for each in spans if 0 <= each < math.inf)
    saves = f"saved {len(record.saves):,} time{'' if len(record.saves) == 1 else 's'}"
    return show_seconds(seconds) if seconds else "–", saves


READINGS: tuple[tuple[str, Reading], ...] = (
    ("best validation loss", validation), ("last training loss", training), ("steps", progress), ("speed", speed),
    ("peak memory", peak_memory), ("time in steps", time_spent),
)


def loss_of(evaluation: Evaluation, split: str) -> SplitLoss | None:
    return next((loss for loss in evaluation.losses if loss.split == split), None)


def steps_done(record: RunRecord) -> int:
    """The last step reported, evaluated or saved."""
    return max([0, *(each.step + 1 for each in record.steps[-1:]), *(each.step for each in record.evaluations[-1:]),
                *record.saves[-1:]])


# ---- curves


def curves(records: Sequence[RunRecord]) -> str:
    per_step, x_name = x_axis(records)
    marks = [EventMark(event.step * per_step(record), f"{event.kind}: {clipped(event.text)}")
             for record in records for event in record.events if event.kind not in _UNMARKED]
    alone = len(records) == 1

    def each(name: str, value: Callable[..., float]) -> list[Series]:
        return [Series(record.name if not alone else name, [(one.step * per_step(record), value(one))
                                                             for one in record.steps], index)
                for index, record in enumerate(records)]

    losses = [one for index, record in enumerate(records)
              for one in loss_series(record, index, per_step(record), alone)]
    charts = [
        line_chart("Loss", losses, x_name=x_name, marks=marks, wide=True, note=loss_note(records, marks)),
        line_chart("Learning rate", each("learning rate", lambda one: one.lr), x_name=x_name, from_zero=True),
        line_chart("Tokens per second", each("tokens per second", lambda one: one.tokens_per_s), unit="count",
                   x_name=x_name, from_zero=True),
        line_chart("Gradient norm, before clipping", each("gradient norm", lambda one: one.grad_norm), x_name=x_name,
                   from_zero=True),
        memory_chart(records, per_step, x_name),
    ]
    return f'<div class="grid">{"".join(charts)}</div>'


def x_axis(records: Sequence[RunRecord]) -> tuple[Callable[[RunRecord], int], str]:
    """(x units per step of a run, name of the unit): steps, or tokens where the runs' steps differ in size."""
    sizes = [record.facts.tokens_per_step if record.facts else 0 for record in records]
    if len(set(sizes)) > 1 and all(sizes):
        return lambda record: record.facts.tokens_per_step if record.facts else 1, "tokens"
    return lambda record: 1, "step"


def loss_series(record: RunRecord, index: int, per_step: int, alone: bool) -> list[Series]:
    """The loss of each step, and the evaluated losses; with several runs the former is faint."""
    name = "" if alone else f"{record.name}, "
    found = [Series(f"{name}training", [(each.step * per_step, each.loss) for each in record.steps], index,
                    "line" if alone else "faint")]
    for split, called, colour in (("train", "training, evaluated", 2), ("val", "validation", 1)):
        if split == "train" and not alone:
            continue
        measured = [(each.step * per_step, loss) for each in record.evaluations if (loss := loss_of(each, split))]
        found.append(Series(f"{name}{called}", [(x, loss.mean) for x, loss in measured], colour if alone else index,
                            "dotted", [loss.stderr for _, loss in measured]))
    return [each for each in found if each.points]


def loss_note(records: Sequence[RunRecord], marks: Sequence[EventMark]) -> str:
    blocks = {loss.block for record in records for each in record.evaluations for loss in each.losses}
    uneven = "Evaluated at different block sizes: these losses do not compare." if len(blocks) > 1 else ""
    dotted = "Dotted lines: see Events, below." if marks else ""
    return f"{uneven} {dotted}".strip()


def memory_chart(records: Sequence[RunRecord], per_step: Callable[[RunRecord], int], x_name: str) -> str:
    alone = len(records) == 1
    series, levels = [], []
    for index, record in enumerate(records):
        name = "" if alone else f"{record.name}, "
        at = per_step(record)
        training = [(each.step * at, each.memory) for each in record.steps if each.memory.peak_reserved]
        evaluating = [(each.step * at, each.memory) for each in record.evaluations if each.memory.peak_reserved]
        series += [Series(f"{name}reserved, training", [(x, one.peak_reserved) for x, one in training], index),
                   Series(f"{name}reserved, evaluating", [(x, one.peak_reserved) for x, one in evaluating],
                          1 if alone else index, "dotted")]
        if alone:
            series.append(Series("allocated, training", [(x, one.peak_allocated) for x, one in training], 2, "dashed"))
        planned = max((each.reserved for each in record.planned.values()), default=0)
        if planned:
            levels.append(Level(f"{name}planned", planned, 5 if alone else index))
        if record.reserve_limit:
            levels.append(Level(f"{name}limit", record.reserve_limit))
    series = [each for each in series if each.points]
    if not series and any(record.steps for record in records):
        return line_chart("Memory", [], empty="This device has no memory counters.")
    return line_chart("Peak memory so far", series, unit="bytes", x_name=x_name, levels=merged(levels),
                      from_zero=True)


def merged(levels: Sequence[Level]) -> list[Level]:
    """Levels of the same value become one, with both names."""
    found: dict[float, Level] = {}
    for level in levels:
        before = found.get(level.value)
        found[level.value] = Level(f"{before.name} and {level.name}", level.value, level.colour) if before else level
    return list(found.values())


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
            parts.append(f"<h2>Planned and measured memory{escaped(head)}</h2>"
                         f'<div class="card">{plan_table(record)}</div>')
    return "".join(parts)


def plan_table(record: RunRecord) -> str:
    bar = owner_bar(record.owners_at_peak, limit=record.reserve_limit) if record.owners_at_peak else ""
    if not record.planned:
        return bar
    rows = []
    for phase, planned in record.planned.items():
        measured = record.measured.get(phase)
        pairs = [(planned.allocated, measured.allocated), (planned.reserved, measured.reserved)] if measured else []
        cells = [show_bytes(planned.allocated), show_bytes(planned.reserved)]
        cells += [show_bytes(was) for _, was in pairs] or ["–", "–"]
        cells.append(f"{pairs[1][1] / pairs[1][0] - 1:+.2%}" if pairs and pairs[1][0] else "–")
        figures = "".join(f'<td class="figure">{each}</td>' for each in cells)
        rows.append(f"<tr><th>{escaped(clipped(PHASES.get(phase, phase)))}</th>{figures}</tr>")
    heads = ("planned, allocated", "reserved", "measured, allocated", "reserved", "reserved, difference")
    return bar + ("<table><thead><tr><th>phase</th>" + "".join(f'<th class="figure">{each}</th>' for each in heads)
                  + f"</tr></thead><tbody>{''.join(rows[:MAX_EVENTS])}</tbody></table>")


# ---- events and samples


def events(records: Sequence[RunRecord]) -> str:
    found = sorted(((event, index) for index, record in enumerate(records) for event in record.events),
                   key=lambda each: each[0].step)
    if not found:
        return ""
    half = MAX_EVENTS // 2
    left_out = len(found) - MAX_EVENTS
    rows = [event_row(event, records, index) for event, index in (found if left_out <= 0 else found[:half])]
    if left_out > 0:
        rows.append(f'<tr><td></td><td colspan="3" class="kind">{left_out:,} more</td></tr>')
        rows += [event_row(event, records, index) for event, index in found[-half:]]
    which = "<th>run</th>" if len(records) > 1 else ""
    return ('<h2>Events</h2><div class="card"><table><thead><tr><th class="figure">step</th>'
            f"{which}<th>what</th><th></th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>")


def event_row(event: RunEvent, records: Sequence[RunRecord], index: int) -> str:
    which = f'<td class="run">{breakable(clipped(records[index].name))}</td>' if len(records) > 1 else ""
    alert = "" if event.kind in {*_UNMARKED, "resumed"} else " alert"
    return (f'<tr><td class="figure">{event.step:,}</td>{which}<td class="kind{alert}">'
            f"{escaped(clipped(event.kind))}</td><td>{escaped(clipped(event.text))}</td></tr>")


def samples(records: Sequence[RunRecord]) -> str:
    shown = [(record, each) for record in records for each in record.samples[-MAX_SAMPLES:]]
    if not shown:
        return ""
    blocks = "".join(
        f'<p class="quiet">{escaped(record.name) + ", " if len(records) > 1 else ""}step {each.step:,}</p>'
        f'<pre class="sample">{escaped(clipped(each.text, MAX_SAMPLE_LENGTH))}</pre>' for record, each in shown)
    return f'<h2>Samples</h2><div class="card">{blocks}</div>'


# ---- config and versions


def config(records: Sequence[RunRecord]) -> str:
    if not any(record.config for record in records):
        return ""
    if len(records) == 1:
        options = records[0].config
        unusual = [key for key in options if key in records[0].unusual]
        return two_parts("Config", "Options at their defaults", option_list(records[0], unusual),
                         option_list(records[0], [key for key in options if key not in records[0].unusual]))
    keys = list(dict.fromkeys(key for record in records for key in record.config))
    differ = [key for key in keys if len({value_of(record, key) for record in records}) > 1]
    return two_parts("Config: differences", "The same in all runs", differences(records, differ),
                     option_list(records[0], [key for key in keys if key not in differ]))


def two_parts(title: str, rest_title: str, first: str, rest: str) -> str:
    more = f"<details><summary>{rest_title}</summary>{rest}</details>" if rest else ""
    return f'<h2>{title}</h2><div class="card">{first or "<p>None.</p>"}{more}</div>'


def option_list(record: RunRecord, keys: Iterable[str]) -> str:
    rows = [f"<div><dt>{escaped(clipped(key))}</dt><dd>{escaped(value_of(record, key))}</dd></div>" for key in keys]
    return f'<dl class="knobs">{"".join(rows[:MAX_OPTIONS])}</dl>' if rows else ""


def differences(records: Sequence[RunRecord], keys: Sequence[str]) -> str:
    rows = "".join(f"<tr><th>{escaped(clipped(key))}</th>"
                   + "".join(f"<td>{breakable(value_of(record, key))}</td>" for record in records) + "</tr>"
                   for key in keys[:MAX_OPTIONS])
    head = f"<thead><tr><th></th>{run_heads(records)}</tr></thead>"
    return f'<table class="whole">{head}<tbody>{rows}</tbody></table>' if rows else ""


def value_of(record: RunRecord, key: str) -> str:
    if key not in record.config:
        return "–"
    value = record.config[key]
    if isinstance(value, float):
        value = float(f"{value:.12g}")  # a tenth of 6e-4 is 6e-05, not 5.9999999999999995e-05
    return clipped(str(value) or "''")


def versions(records: Sequence[RunRecord]) -> str:
    known = [record for record in records if record.facts]
    names = list(dict.fromkeys(name for record in known if record.facts for name in record.facts.versions))
    rows = [(name, [record.facts.versions.get(name, "–") if record.facts else "–" for record in records])
            for name in names[:MAX_OPTIONS]]
    rows += [("device", [f"{record.facts.device_name} ({record.facts.device})" if record.facts else "–"
                         for record in records])] if known else []
    if not rows:
        return ""
    head = f"<thead><tr><th></th>{run_heads(records)}</tr></thead>" if len(records) > 1 else ""
    body = "".join(f"<tr><th>{escaped(clipped(name))}</th>"
                   + "".join(f"<td>{escaped(clipped(each))}</td>" for each in found) + "</tr>" for name, found in rows)
    return f'<h2>Versions</h2><div class="card"><table>{head}<tbody>{body}</tbody></table></div>'


def clipped(text: str, length: int = MAX_VALUE_LENGTH) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"
