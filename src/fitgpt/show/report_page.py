"""RunRecords as a page in one file: summary, curves, memory against the plan, events, samples, config."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from urllib.parse import quote

from ..core.units import show_bytes, show_count
from ..runs.metrics import PHASES
from ..runs.record import RunEvent, RunRecord
from .charts import (
    MAX_POINTS,
    SERIES_COLOURS,
    AltAxis,
    EventMark,
    Level,
    Series,
    breakable,
    downsample,
    escaped,
    html_page,
    line_chart,
    owner_bar,
    stacked_chart,
)
from .report_summary import (
    elapsed,
    loss_of,
    planned_peak,
    readings,
    reproduce,
    steps_done,
    to_csv,
    validation_losses,
    verdict,
)
from .terminal import command_lines

MAX_RUNS = SERIES_COLOURS
MAX_EVENTS = 200
MAX_SAMPLES = 12
MAX_OPTIONS = 300
MAX_SAMPLE_LENGTH = 4000  # characters shown; a run folder may hold anything
MAX_VALUE_LENGTH = 300
UNMARKED = {"note"}       # kinds of events without a line in the curves
MIN_SMOOTHED = 20         # points: fewer are clear as they are
SMOOTHED_SHARE = 60       # a point of a smoothed curve is that of the 2/60 of the curve around it
MAX_KNOTS = 60            # of the time axis
COMMAND_WIDTH = 100       # columns


def report_page(records: Sequence[RunRecord], made_by: str) -> str:
    title = " and ".join(record.name for record in records)
    parts = [header(records, title), summary(records), curves(records), memory(records), events(records),
             samples(records), commands(records), config(records), versions(records),
             f"<footer>Made by {escaped(made_by)}. Point at a curve for its values; drag to zoom, or click and turn "
             "the wheel; arrow keys, + and − work too, and 0 shows everything again.</footer>"]
    return html_page(f"{title} · fitgpt", "\n".join(part for part in parts if part))


# ---- at the top


def header(records: Sequence[RunRecord], title: str) -> str:
    """The title, a verdict and a line of facts per run, and what could not be read."""
    lines, unreadable = "", ""
    for record in records:
        name, facts = f"{record.name}: " if len(records) > 1 else "", record.facts
        parts = ["The run has not written its header yet."] if facts is None else [
            f"{show_count(facts.params)} parameters" if facts.params else "",
            clipped(facts.devices if facts.ranks else facts.device_name),
            clipped(facts.dtype), "compiled" if facts.compiled else "not compiled",
            f"{show_count(facts.train_tokens)} tokens of data" if facts.train_tokens else ""]
        if judged := verdict(record):
            lines += f'<p class="run-verdict">{escaped(clipped(name + judged, MAX_SAMPLE_LENGTH))}</p>'
        lines += f"<p>{escaped(name + ' · '.join(part for part in parts if part))}</p>"
        unreadable += "".join(f"<p>{escaped(clipped(name + each))}</p>" for each in record.unreadable)
    callout = f'\n<div class="callout">{unreadable}</div>' if unreadable else ""
    return f"<header><h1>{escaped(clipped(title))}</h1>{lines}</header>{callout}"


def summary(records: Sequence[RunRecord]) -> str:
    """The key figures of each run: tiles for one run, a table for several."""
    if len(records) == 1:
        tiles = "".join(f"<div><dt>{name}</dt><dd>{escaped(figure)}</dd><dd>{escaped(more)}</dd></div>"
                        for name, (figure, more) in readings(records[0]).items())
        return f'<dl class="tiles">{tiles}</dl>'
    found = [readings(record) for record in records]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [(name, [f"{escaped(figure)}<br><small class='quiet'>{escaped(more)}</small>"
                    for figure, more in (each.get(name, ("–", "")) for each in found)]) for name in names]
    return f'<div class="card">{table_of_runs(records, rows)}</div>'


def table_of_runs(records: Sequence[RunRecord], rows: Iterable[tuple[str, Iterable[str]]], kind: str = "") -> str:
    """A row per (name, a cell per run in HTML)."""
    heads = "".join(f'<th scope="col" class="s{index}"><i></i>{escaped(clipped(record.name))}</th>'
                    for index, record in enumerate(records))
    head = f"<thead><tr><td></td>{heads}</tr></thead>" if len(records) > 1 else ""
    body = "".join(f'<tr><th scope="row">{escaped(clipped(name))}</th>'
                   f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in rows)
    return f"<table{kind}>{head}<tbody>{body}</tbody></table>"


# ---- curves


def curves(records: Sequence[RunRecord]) -> str:
    """Loss, learning rate, speed, gradient norm and memory, over steps, tokens or time; over tokens where the runs'
    steps differ in size."""
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

    axes = alt_axes(records) if not by_tokens else []
    losses = [one for index, record in enumerate(records) for one in loss_series(record, index, units[index], alone)]
    blocks = {loss.block for record in records for each in record.evaluations for loss in each.losses}
    uneven = "Evaluated at different block sizes: these losses do not compare." if len(blocks) > 1 else ""
    dotted = "Dotted lines: see Events, below." if marks else ""
    start = max((after_warm_up(record) * unit for record, unit in zip(records, units, strict=True)), default=0)
    since = f"{start:,} tokens" if by_tokens else f"step {start:,}"
    cut = f"The axis is scaled for the losses after warm-up, from {since} on." if start else ""
    charts = [
        line_chart("Loss", losses, x_name=x_name, marks=marks, wide=True, y_name="nats per token", axes=axes,
                   y_from=start, note=" ".join(filter(None, (uneven, cut, dotted)))),
        "" if uneven else difference_chart(records, units, x_name, axes),
        line_chart("Learning rate", curve_per_run("learning rate", lambda each: each.lr), x_name=x_name,
                   from_zero=True, y_name="learning rate", axes=axes),
        line_chart("Speed", curve_per_run("tokens/s", lambda each: each.tokens_per_s),
                   unit="count", x_name=x_name, from_zero=True, y_name="tokens/s", axes=axes),
        line_chart("Gradient norm, before clipping", curve_per_run("gradient norm", lambda each: each.grad_norm),
                   x_name=x_name, from_zero=True, y_name="L2 norm", axes=axes),
        memory_chart(records, units, x_name, axes),
    ]
    return f'{axis_choice(records, x_name, axes)}<div class="grid">{"".join(charts)}</div>'


def axis_choice(records: Sequence[RunRecord], x_name: str, axes: Sequence[AltAxis]) -> str:
    """Radio buttons for the axis of all curves (style sheet only, so that they work without scripts), and the figures
    to download."""
    kinds = [("step", f"{x_name}s" if x_name == "step" else x_name), *((axis.kind, axis.kind) for axis in axes)]
    buttons = "".join(f'<label><input type="radio" name="x" id="x-{kind}"{" checked" if not index else ""}>{name}'
                      "</label>" for index, (kind, name) in enumerate(kinds))
    if not any(record.steps or record.evaluations for record in records):
        return ""
    data = f"data:text/csv;charset=utf-8,{quote(to_csv(records), safe=',:')}"
    link = f'<a download="figures.csv" href="{escaped(data)}">Download the figures (CSV)</a>'
    if not axes:
        return f'<p class="axis-choice">{link}</p>'
    return f'<fieldset class="axis-choice"><legend>x axis:</legend>{buttons}{link}</fieldset>'


def alt_axes(records: Sequence[RunRecord]) -> list[AltAxis]:
    """Tokens, if the steps of all runs have the same size; and the time in steps, of a single run."""
    last = max(steps_done(record) for record in records)
    size = records[0].facts.tokens_per_step if records[0].facts else 0
    axes = [AltAxis("tokens", "tokens", [(0, 0), (last, last * size)])] if size and last else []
    if len(records) == 1 and (times := elapsed(records[0].steps)) and times[-1][1] > 0:
        size_of = {"hours": 3600, "minutes": 60, "seconds": 1}
        unit = next((name for name, seconds in size_of.items() if times[-1][1] >= 2 * seconds), "seconds")
        stride = -(-len(times) // MAX_KNOTS)
        knots = [(step, seconds / size_of[unit]) for step, seconds in (*times[:-1:stride], times[-1])]
        rising = knots[:1]
        for step, value in knots[1:]:
            if step > rising[-1][0] and value > rising[-1][1]:
                rising.append((step, value))
        if len(rising) > 1:
            axes.append(AltAxis("time", f"{unit} of training steps", rising))
    return axes


def after_warm_up(record: RunRecord) -> int:
    """The step from which on losses decide the range of the axis; 0: all do.

    The first losses are near log(vocabulary), so high that the rest of the run would be a flat line below them. A
    warm-up of more than half the run is no guide: then it is a twentieth of the run.
    """
    if len(record.steps) < MIN_SMOOTHED:
        return 0
    last, warm_up = record.steps[-1].step, record.config.get("warmup_iters")
    return warm_up if isinstance(warm_up, int) and 0 < warm_up <= last / 2 else last // 20


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A running mean of running medians, which a single spike does not move; empty for few points."""
    if len(points) < MIN_SMOOTHED:
        return []
    few = [point for point in downsample(points, points[0][0], points[-1][0], MAX_POINTS).points
           if math.isfinite(point.y)]
    values = [point.y for point in few]
    for average in (statistics.median, statistics.fmean):
        reach = [min(max(len(values) // SMOOTHED_SHARE, 2), place, len(values) - 1 - place)
                 for place in range(len(values))]  # shorter at both ends, which stay where they are
        values = [average(values[place - side:place + side + 1]) for place, side in enumerate(reach)]
    return [(point.x, value) for point, value in zip(few, values, strict=True)]


def loss_series(record: RunRecord, index: int, unit: int, alone: bool) -> list[Series]:
    """A smoothed curve of the training loss, for a single run over the pale one of each report; the evaluated losses
    over them. Where there are few reports they are not smoothed."""
    name, reported = "" if alone else f"{record.name}, ", [(each.step * unit, each.loss) for each in record.steps]
    clear, style = smoothed(reported), "dashed" if index % 2 else "line"
    found = [Series(f"{name}training", clear or reported, index, style)]
    if clear and alone:
        found = [Series("training, each report", reported, index, "faint"), Series("training, smoothed", clear, index)]
    for split, called, colour in (("train", "training, evaluated", 2), ("val", "validation", 1)):
        if split == "train" and not alone:
            continue
        measured = [(each.step * unit, loss) for each in record.evaluations if (loss := loss_of(each, split))]
        found.append(Series(f"{name}{called}", [(x, loss.mean) for x, loss in measured], colour if alone else index,
                            "dotted", [loss.stderr for _, loss in measured]))
    return [each for each in found if each.points]


def difference_chart(records: Sequence[RunRecord], units: Sequence[int], x_name: str, axes: Sequence[AltAxis]) -> str:
    """Validation losses of the other runs minus those of the first, where both were evaluated."""
    curves = [[(step * unit, loss.mean) for step, loss in validation_losses(record)]
              for record, unit in zip(records, units, strict=True)]
    series = [Series(f"{record.name} − {records[0].name}",
                     [(x, y - base) for x, y in curve if (base := value_at(curves[0], x)) is not None], index, "dotted")
              for index, (record, curve) in enumerate(zip(records, curves, strict=True)) if index]
    series = [each for each in series if each.points]
    if not series:
        return ""
    title = "Difference in validation loss" + (f": {series[0].name}" if len(series) == 1 else "")
    return line_chart(clipped(title), series, x_name=x_name, y_name="nats per token", axes=axes,
                      levels=[Level(f"as {records[0].name}", 0.0, 0)], note="Below the line is better.", wide=True)


def value_at(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """The curve's value there, linear between its points; None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            return y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    return next((y for at, y in curve if at == x), None)


def memory_chart(records: Sequence[RunRecord], units: Sequence[int], x_name: str, axes: Sequence[AltAxis]) -> str:
    """Empty where no device counted memory."""
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
    if not series:
        return ""
    return line_chart("Peak memory so far", series, unit="bytes", x_name=x_name, levels=list(levels.values()),
                      from_zero=True, axes=axes, y_name="reserved")


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
        rows.append(f'<tr><th scope="row">{escaped(clipped(PHASES.get(phase, phase)))}</th>{figures}</tr>')
    heads = ("planned, allocated", "reserved", "measured, allocated", "reserved", "reserved, difference")
    columns = "".join(f'<th scope="col" class="figure">{each}</th>' for each in heads)
    return (f'<table><thead><tr><th scope="col">phase</th>{columns}</tr></thead>'
            f"<tbody>{''.join(rows[:MAX_EVENTS])}</tbody></table>")


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
    which = '<th scope="col">run</th>' if len(records) > 1 else ""
    return ('<h2>Events</h2><div class="card"><table><thead><tr><th scope="col" class="figure">step</th>'
            f'{which}<th scope="col">kind</th><th scope="col">what happened</th></tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>")


def samples(records: Sequence[RunRecord]) -> str:
    blocks = "".join(
        f'<p class="quiet">{escaped(record.name) + ", " if len(records) > 1 else ""}step {each.step:,}</p>'
        f'<pre class="sample" tabindex="0">{escaped(clipped(each.text, MAX_SAMPLE_LENGTH))}</pre>'
        for record in records for each in record.samples[-MAX_SAMPLES:])
    return f'<h2>Samples</h2><div class="card">{blocks}</div>' if blocks else ""


# ---- the command, config and versions


def commands(records: Sequence[RunRecord]) -> str:
    """A command per run that trains it again, from its data and with its seed."""
    blocks = ""
    for record in records:
        if words := reproduce(record):
            typed = clipped("\n".join(command_lines(words, COMMAND_WIDTH, 0)), MAX_SAMPLE_LENGTH)
            blocks += f'<p class="quiet">{escaped(record.name)}</p>' if len(records) > 1 else ""
            blocks += f'<pre class="command">{escaped(typed)}</pre>'
    return f'<h2>To train it again</h2><div class="card">{blocks}</div>' if blocks else ""


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
        rows.append(("device", [each.devices if each else "–" for each in facts]))
    if not rows:
        return ""
    cells = [(name, [escaped(clipped(text)) for text in texts]) for name, texts in rows]
    return f'<h2>Versions</h2><div class="card">{table_of_runs(records, cells)}</div>'


def clipped(text: str, length: int = MAX_VALUE_LENGTH) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"
