"""Charts for the report, the planner and the web page: curves and stacked bytes, as SVG that reads without a script.

Everything is placed in percent of the chart's own size, so a chart fills whatever room it has with its text at full
size. static/charts.js adds values under the pointer, zoom and keys to what is drawn here; it draws nothing itself
except the axes of a zoomed view.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..core.units import GiB, KiB, MiB, TiB, show_bytes
from ..memory.timeline import OwnerTimeline

STATIC = Path(__file__).parent / "static"
TYPICAL_SHARE = 0.98   # of the values; what lies far above them, and above the first, is marked at the edge
MAX_POINTS = 1000      # of a curve: about one per pixel of a wide chart
MAX_POINTS_PER_CHART = 4000
MAX_MARKS = 40
MAX_TICKS = 5          # of an axis, about
NEAR_PEAK = 0.97       # of a stacked chart's peak: what counts as part of it
NEEDLE_SHARE = 0.01    # of the events: a shorter peak gets a band
NEEDLE_PIXELS = 10
FAR_LIMIT = 5          # times the largest value: a higher limit is in the legend only, for it would flatten everything
MAX_DOTS = 60          # with more of them, a line without dots is clearer
SERIES_COLOURS = 6     # s0 … s5 in static/charts.css
WIDE, TALL = 100_000, 10_000  # units of a drawing, stretched over whatever room a chart has
HUGE = 1e300           # beyond it arithmetic on a range overflows; counts as infinite

# One colour per owner, for light and dark pages. Found by maximising the smallest distance between any two of them,
# seen with normal, red-blind, green-blind and blue-blind eyes, most of all between neighbours in a stack.
OWNER_COLOURS = {
    "weights": "#5775c6", "gradients": "#ab6100", "optimizer": "#b29ff3", "casts": "#0c617c", "activations": "#67be9c",
    "attention": "#45129b", "logits": "#a32b3b", "workspace": "#bb9625", "data": "#f5bfe8", "other": "#828484",
}

Position = tuple[int, int]  # (x, y) in units of a drawing


@dataclass(frozen=True)
class Series:
    """One curve. Values may be NaN or infinite: the curve has a gap there, and the edge a mark."""

    name: str
    points: Sequence[tuple[float, float]]  # (x, y), x rising
    colour: int = 0                        # which of the palette's
    style: str = "line"                    # line, dashed, faint, dotted (a line with a dot at each point)
    errors: Sequence[float] = ()           # of each point, if known: drawn as a whisker


@dataclass(frozen=True)
class Level:
    """A horizontal line: a planned value, a limit."""

    name: str
    value: float
    colour: int | None = None  # None: a limit


@dataclass(frozen=True)
class AltAxis:
    """Other names for the values of x: tokens or hours instead of steps. The page chooses by a radio button with the id
    `x-KIND`."""

    kind: str                              # "tokens", "time"
    name: str                              # at the axis: "tokens", "minutes"
    knots: Sequence[tuple[float, float]]   # (x, value on this axis), both rising; linear in between

    def x_of(self, value: float) -> float:
        before, after = next((pair for pair in pairwise(self.knots) if value <= pair[1][1]), self.knots[-2:])
        return before[0] + (value - before[1]) / (after[1] - before[1]) * (after[0] - before[0])


@dataclass(frozen=True)
class EventMark:
    """A vertical line: something that happened at x."""

    x: float
    text: str


# ---- line charts


def line_chart(title: str, series: Sequence[Series], *, unit: str = "number", x_name: str = "step",
               levels: Sequence[Level] = (), marks: Sequence[EventMark] = (), from_zero: bool = False, note: str = "",
               empty: str = "Nothing recorded yet.", wide: bool = False, y_name: str = "",
               axes: Sequence[AltAxis] = (), y_from: float = -math.inf) -> str:
    """Curves over one x, as an HTML figure.

    `unit`: number, count or bytes; `note`: a sentence below the chart; `empty`: a sentence in place of an empty chart.
    `y_from`: the x from which on values decide the range of y; higher ones before it are cut off.
    """
    xs = [x for one in series for x, _ in one.points]
    if not xs:
        return _figure(title, "", f'<p class="nothing">{escaped(empty)}</p>', "", wide)
    x0, x1, marks = min(xs), max(xs), marks[-MAX_MARKS:]
    max_points = min(MAX_POINTS, MAX_POINTS_PER_CHART // len(series))
    curves = [downsample(one.points, x0, x1, max_points) for one in series]
    late = [curve._replace(points=[point for point in curve.points if point.x >= y_from]) for curve in curves]
    highest = max((point.high for curve in late for point in curve.points if math.isfinite(point.high)), default=0.0)
    drawn = [level for level in levels if level.colour is not None or level.value <= FAR_LIMIT * highest]
    scale = Scale(*_padded(x0, x1, 0.01), *_y_range(late, drawn, from_zero))
    outside, outside_note = _outside(late, scale, unit)
    parts = [_curve(one, _cut_start(curve, scale.y1, y_from), scale) for one, curve in zip(series, curves, strict=True)]
    if outside:
        parts.append(f'<path class="outside" d="{dot_path(outside)}"/>')
        note = f"{note} {outside_note}".strip()
    data = {"kind": "line", "unit": unit, "xName": x_name, "scale": list(scale), "fromZero": from_zero,
            "axes": [{"kind": axis.kind, "name": axis.name, "knots": axis.knots} for axis in axes],
            "marks": [[mark.x, mark.text] for mark in marks],
            "series": [_series_data(one, curve) for one, curve in zip(series, curves, strict=True)]}
    over = "".join(f'<line class="mark" data-x="{mark.x:g}" x1="{scale.x_percent(mark.x)}" '
                   f'x2="{scale.x_percent(mark.x)}" y1="0" y2="100%"><title>{escaped(mark.text)}</title></line>'
                   for mark in marks if scale.x0 <= mark.x <= scale.x1)
    over += "".join(_level(level, scale, unit, at_left=bool(index % 2)) for index, level in enumerate(drawn))
    names = f'<text class="name main" x="50%" y="100%" dy="36" text-anchor="middle">{escaped(x_name)}</text>'
    names += f'<text class="name" x="0" y="0" dx="-52" dy="-12">{escaped(y_name)}</text>' if y_name else ""
    drawing = _svg(_description(title, series, unit), "".join(parts), scale, unit, x_ticks=True,
                   over=names + "".join(_alt_axis(axis, scale) for axis in axes) + over)
    legend = "".join(_key(f"s{one.colour} {one.style}", one.name, "") for one in series) if len(series) > 1 else ""
    legend += "".join(_key(f"{_colour(level)} level", level.name, format_value(unit, level.value)) for level in levels)
    return _figure(title, legend, drawing, note, wide, data)


def _cut_start(curve: Downsampled, highest: float, y_from: float) -> Downsampled:
    """The curve without its points before `y_from` that are too high to be shown: it comes in at the upper edge."""
    shown = next((index for index, point in enumerate(curve.points) if point.x >= y_from or point.y <= highest), 0)
    before, after = curve.points[max(shown - 1, 0)], curve.points[shown]
    if not (shown and after.y < highest < before.y):
        return curve._replace(points=curve.points[shown:])
    x = after.x + (highest - after.y) / (before.y - after.y) * (before.x - after.x)
    return curve._replace(points=[Point(x, highest, highest, highest), *curve.points[shown:]])


def _alt_axis(axis: AltAxis, scale: Scale) -> str:
    kind = f"alt x-{escaped(axis.kind)}"
    ticks = "".join(_x_tick(scale.x_percent(axis.x_of(value)), label)
                    for value, label in tick_labels("count", axis.knots[0][1], axis.knots[-1][1]))
    return (f'<g class="axis {kind}">{ticks}</g><text class="name {kind}" x="50%" y="100%" dy="36" '
            f'text-anchor="middle">{escaped(axis.name)}</text>')


def _x_tick(x: str, label: str) -> str:
    return f'<text x="{x}" y="100%" dy="18" text-anchor="middle">{escaped(label)}</text>'


def _curve(series: Series, curve: Downsampled, scale: Scale) -> str:
    positions = [scale.position(point.x, point.y) for point in curve.points]
    parts = []
    if curve.is_averaged:
        edges = [(scale.position(point.x, point.high), scale.position(point.x, point.low)) for point in curve.points]
        parts.append(f'<path class="band s{series.colour}" d="{area_path(edges)}"/>')
    elif series.errors:
        whiskers = [(scale.position(x, y + error), scale.position(x, y - error))
                    for (x, y), error in zip(series.points, series.errors, strict=False)
                    if math.isfinite(error) and y < scale.y1]
        parts.append(f'<path class="whisker s{series.colour}" d="{"".join(map(line_path, whiskers))}"/>')
    parts.append(f'<path class="curve s{series.colour} {series.style}" d="{line_path(positions)}"/>')
    if series.style == "dotted" and len(positions) <= MAX_DOTS:
        drawn = [position for position in positions if position and position[1] > 0]  # at the edge: cut off
        parts.append(f'<path class="dots s{series.colour}" d="{dot_path(drawn)}"/>')
    return "".join(parts)


def _y_range(curves: Sequence[Downsampled], levels: Sequence[Level], from_zero: bool) -> tuple[float, float]:
    """The range of all values, except spikes so high that nothing else could be seen beside them."""
    points = [point for curve in curves for point in curve.points if math.isfinite(point.y)]
    if not points:
        return 0.0, 1.0
    lows, highs = sorted(point.low for point in points), sorted(point.high for point in points)
    typical = round(TYPICAL_SHARE * (len(points) - 1))
    firsts = [next((point.y for point in curve.points if math.isfinite(point.y)), highs[typical]) for curve in curves]
    low, high = min(lows[-1 - typical], *firsts), max(highs[typical], *firsts)
    far = 2 * (high - low)
    low, high = lows[0] if lows[0] >= low - far else low, highs[-1] if highs[-1] <= high + far else high
    low, high = min([low, *(level.value for level in levels)]), max([high, *(level.value for level in levels)])
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
        return low * 1.1, high * 1.1 or float(low == 0)
    return _padded(low, high, 0.06)


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    padding = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - padding, high + padding


def _outside(curves: Sequence[Downsampled], scale: Scale, unit: str) -> tuple[list[Position], str]:
    """Where values lie that the curves cannot show, and a note on them: NaN, infinity, and spikes beyond the range."""
    finite = [point for curve in curves for point in curve.points if math.isfinite(point.y)]
    above = [(point.x, point.high > scale.y1) for point in finite
             if not scale.y0 <= point.low <= point.high <= scale.y1]
    above += [(x, value != -math.inf) for curve in curves for x, value in curve.nonfinite]
    count = sum(curve.nonfinite_count for curve in curves)
    highest = max((point.high for point in finite), default=0.0)
    notes = [f"{count:,} value{'s are' if count > 1 else ' is'} not finite"] if count else []
    notes += [f"spikes reach {format_value(unit, highest)}"] if highest > scale.y1 else []
    note = f"{'; '.join(notes) or 'some values lie outside'}: marked at the edge.".capitalize()
    return [(scale.x_position(x), 0 if at_top else TALL) for x, at_top in above], note


def _description(title: str, series: Sequence[Series], unit: str) -> str:
    """The chart as text, for screen readers."""
    parts = []
    for one in series:
        finite = [y for _, y in one.points if math.isfinite(y)]
        if finite:
            first, last, low, high = (format_value(unit, y) for y in (finite[0], finite[-1], min(finite), max(finite)))
            parts.append(f"{one.name}: first {first}, last {last}, lowest {low}, highest {high}")
    return f"{title}. " + ". ".join(parts)


def _series_data(series: Series, curve: Downsampled) -> dict[str, Any]:
    """What static/charts.js shows under the pointer: six digits are enough for a chart, and short in JSON."""
    def rounded(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        short = float(f"{value:.6g}") if abs(value) < 1e6 else round(value)
        return int(short) if short == int(short) else short

    nonfinite = dict(curve.nonfinite)
    data: dict[str, Any] = {
        "name": series.name, "class": f"s{series.colour}", "x": [rounded(point.x) for point in curve.points],
        "y": [rounded(point.y) if math.isfinite(point.y) else format_value("number", nonfinite.get(point.x, math.nan))
              for point in curve.points]}
    if curve.is_averaged:
        data["low"] = [rounded(point.low) for point in curve.points]
        data["high"] = [rounded(point.high) for point in curve.points]
    return data


def _level(level: Level, scale: Scale, unit: str, *, at_left: bool = False) -> str:
    y = scale.y_percent(level.value)
    x, anchor = ("4", "start") if at_left else ("100%", "end")
    return (f'<g class="level {_colour(level)}" data-y="{level.value!r}"><line x1="0" x2="100%" y1="{y}" y2="{y}"/>'
            f'<text x="{x}" y="{y}" dy="-5" text-anchor="{anchor}">{escaped(level.name)} '
            f'{escaped(format_value(unit, level.value))}</text></g>')


def _colour(level: Level) -> str:
    return "limit" if level.colour is None else f"s{level.colour}"


# ---- bytes by owner


def stacked_chart(timeline: OwnerTimeline, *, title: str = "One step, by owner", limit: int | None = None,
                  limit_name: str = "limit", note: str = "") -> str:
    """Each owner's bytes on top of each other, event by event, with the peak and, if given, a limit, as an HTML
    figure."""
    totals = [sum(point) for point in timeline.points]
    if not totals or max(totals) <= 0:
        return _figure(title, "", '<p class="nothing">Nothing is allocated.</p>', note, True)
    total = totals[timeline.peak]
    drawn_limit = limit if limit is not None and limit <= FAR_LIMIT * total else None
    scale = Scale(0, max(len(totals) - 1, 1), 0, max(*totals, drawn_limit or 0) * 1.12)
    layers, series, keys, shares, sums = [], [], [], [], [0] * len(totals)
    for owner, name in enumerate(timeline.owners):
        values = [point[owner] for point in timeline.points]
        if not any(values):
            continue
        colour, at_peak = _owner_class(name), values[timeline.peak]
        sums = [below + value for below, value in zip(sums, values, strict=True)]
        steps = step_path(position for x, y in enumerate(sums) if (position := scale.position(x, y)))
        layers.append(f'<path class="layer {colour}" d="{steps}V{TALL}H0Z"/>')
        # [point, bytes, point, bytes …]: shorter than a value per point, because most events change one owner only.
        changes = [each for at, (before, after) in enumerate(pairwise([0, *values])) if before != after
                   for each in (at, after)]
        series.append({"name": name, "class": colour, "changes": changes})
        keys.append(_key(colour, name, show_bytes(at_peak)))
        if at_peak:
            shares.append(f"{name} {show_bytes(at_peak)}")
    over = _phases(timeline, scale) + _peak(timeline, total, scale)
    if drawn_limit is not None:
        over += _level(Level(limit_name, drawn_limit), scale, "bytes", at_left=timeline.peak > len(totals) / 2)
    # Painted from the highest sum down, each down to zero: neighbours then share an edge without a seam.
    drawing = _svg(f"{title}: at most {show_bytes(total)}, of which {', '.join(shares)}", "".join(reversed(layers)),
                   scale, "bytes", x_ticks=False, over=over)
    data = {"kind": "stacked", "unit": "bytes", "xName": "event", "scale": list(scale), "fromZero": True,
            "marks": timeline.marks, "count": len(totals), "series": series}
    legend = "".join(keys) + _key("total", "at the peak", show_bytes(total))
    if limit is not None and drawn_limit is None:
        legend += _key("limit level", limit_name, show_bytes(limit))
    return _figure(title, legend, drawing, note, True, data)


def _phases(timeline: OwnerTimeline, scale: Scale) -> str:
    """A line where each phase begins, with its name where there is room for it."""
    parts = []
    for (x, name), (end, _) in pairwise([*timeline.marks, (int(scale.x1), "")]):
        fits = scale.x_position(end) - scale.x_position(x) >= 0.014 * WIDE * len(name)  # in a chart some 500 px wide
        label = f'<text x="{scale.x_percent(x)}" y="0" dx="3" dy="-6">{escaped(name)}</text>' if fits else ""
        parts.append(f'<g class="phase" data-x="{x}" data-name="{escaped(name)}"><line x1="{scale.x_percent(x)}" '
                     f'x2="{scale.x_percent(x)}" y1="-4" y2="100%"/>{label}</g>')
    return "".join(parts)


def _peak(timeline: OwnerTimeline, total: int, scale: Scale) -> str:
    x, y = scale.x_percent(timeline.peak), scale.y_percent(total)
    share = scale.x_position(timeline.peak) / WIDE
    # A peak that lasts a moment is a line of less than a pixel: a band shows where it is.
    count, is_high = len(timeline.points), [sum(point) >= NEAR_PEAK * total for point in timeline.points]
    end = next((at for at in range(timeline.peak, count) if not is_high[at]), count)
    high = end - next((at for at in range(timeline.peak, -1, -1) if not is_high[at]), -1) - 1
    band = (f'<rect class="needle" x="{x}" y="0" width="{NEEDLE_PIXELS}" height="100%" '
            f'transform="translate({-NEEDLE_PIXELS / 2:g})"><title>the peak lasts {high:,} of {count:,} events'
            "</title></rect>" if high < NEEDLE_SHARE * count else "")
    anchor = "start" if share < 0.25 else "end" if share > 0.75 else "middle"
    phase = next((name for start, name in reversed(timeline.marks) if start <= timeline.peak), "")
    where = f" in {phase}" if phase else ""
    return (f'<g class="peak" data-x="{timeline.peak}" data-y="{total}">{band}<circle cx="{x}" cy="{y}" r="4"/>'
            f'<text x="{x}" y="{y}" dy="-10" text-anchor="{anchor}">peak {show_bytes(total)}{escaped(where)}</text>'
            "</g>")


def owner_bar(owners: Mapping[str, int], *, limit: int | None = None) -> str:
    """One bar of bytes by owner, with a line at the limit if there is one."""
    total = sum(owners.values())
    drawn_limit = limit if limit is not None and limit <= FAR_LIMIT * total else None
    width = max(total, drawn_limit or 0) or 1
    parts, x = [], 0
    for name, nbytes in owners.items():
        parts.append(f'<rect class="{_owner_class(name)}" x="{x / width:.3%}" width="{nbytes / width:.3%}" '
                     f'height="100%"><title>{escaped(name)} {show_bytes(nbytes)}</title></rect>')
        x += nbytes
    if drawn_limit is not None:
        end = f"{drawn_limit / width:.3%}"
        parts.append(f'<line x1="{end}" x2="{end}" y1="-5" y2="100%"/>')
    description = ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in owners.items())
    keys = "".join(_key(_owner_class(name), name, show_bytes(nbytes)) for name, nbytes in owners.items())
    keys += _key("level", "limit", show_bytes(limit)) if limit is not None else ""
    return (f'<div class="bar"><svg role="img" aria-label="{escaped(description)}">{"".join(parts)}</svg>'
            f'<ul class="legend">{keys}</ul></div>')


def _owner_class(name: str) -> str:
    return f"o-{name}" if name in OWNER_COLOURS else "o-other"


# ---- the frame around a drawing


def _svg(description: str, inner: str, scale: Scale, unit: str, *, x_ticks: bool, over: str) -> str:
    """Axes, the stretched drawing `inner`, and the parts `over` it that are not stretched."""
    y_labels = "".join(f'<line x1="0" x2="100%" y1="{scale.y_percent(at)}" y2="{scale.y_percent(at)}"/>'
                       f'<text x="-8" y="{scale.y_percent(at)}" dy="4" text-anchor="end">{escaped(label)}</text>'
                       for at, label in tick_labels(unit, scale.y0, scale.y1))
    x_labels = "".join(_x_tick(scale.x_percent(at), label)
                       for at, label in tick_labels("count", scale.x0, scale.x1)) if x_ticks else (
        '<text x="50%" y="100%" dy="18" text-anchor="middle">allocations and frees, in order</text>')
    return (f'<div class="frame"><svg class="plot" role="img" aria-label="{escaped(description)}">'
            f'<g class="axis y">{y_labels}</g><g class="axis x">{x_labels}</g>'
            f'<svg class="inner" viewBox="0 0 {WIDE} {TALL}" preserveAspectRatio="none" width="100%" height="100%">'
            f'{inner}</svg>{over}</svg></div>')


def _figure(title: str, legend: str, drawing: str, note: str, wide: bool, data: dict[str, Any] | None = None) -> str:
    kind = " wide" if wide else ""
    attribute = f' data-chart="{data["kind"]}"' if data else ""
    keys = f'<ul class="legend">{legend}</ul>' if legend else ""
    below = f'<p class="note">{escaped(note)}</p>' if note else ""
    values = f'<script type="application/json">{script_json(data)}</script>' if data else ""
    return (f'<figure class="chart{kind}"{attribute}><figcaption>{escaped(title)}</figcaption>{keys}{drawing}{below}'
            f"{values}</figure>")


def _key(kind: str, name: str, value: str) -> str:
    figure = f" <b>{escaped(value)}</b>" if value else ""
    return f'<li class="{kind}"><i></i><span>{escaped(name)}</span>{figure}</li>'


# ---- scales


class Scale(NamedTuple):
    """The values at the edges of a chart."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x_position(self, x: float) -> int:
        return round((x - self.x0) / (self.x1 - self.x0) * WIDE)

    def position(self, x: float, y: float) -> Position | None:
        """Clamped to the chart; None where y is not finite."""
        if not math.isfinite(y):
            return None
        share = (self.y1 - y) / (self.y1 - self.y0)
        return self.x_position(x), round(min(max(share, 0.0), 1.0) * TALL)

    def x_percent(self, x: float) -> str:
        return f"{(x - self.x0) / (self.x1 - self.x0):.3%}"

    def y_percent(self, y: float) -> str:
        return f"{(self.y1 - y) / (self.y1 - self.y0):.3%}"


def tick_labels(unit: str, low: float, high: float) -> list[tuple[float, str]]:
    """(value, short label) of round values inside the range, with the same unit and number of digits for all."""
    base = next((size for size in (TiB, GiB, MiB, KiB) if high - low >= size), 1) if unit == "bytes" else 1
    rough = (high - low) / base / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999) * base
    values = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]

    largest = max(abs(low), abs(high))
    sizes: tuple[tuple[int, str], ...] = ((1, ""),)
    if unit == "bytes":
        sizes = ((TiB, " TiB"), (GiB, " GiB"), (MiB, " MiB"), (KiB, " KiB"), (1, " B"))
    elif unit == "count" and largest >= 10_000:
        sizes = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (1000, "k"))
    size, name = next((each for each in sizes if largest >= each[0]), sizes[-1])
    # As many digits after the point as a step needs; it is 0 where the range is below the precision of a float.
    step = values[1] - values[0] if len(values) > 1 else high - low
    digits = max(0, math.ceil(-math.log10(step / size) - 1e-9)) if step > 0 else 0

    def label(value: float) -> str:
        if value == 0:
            return "0"
        if name or 0.01 <= largest < 1e6:
            return f"{value / size:,.{min(digits, 9)}f}{name}"
        return f"{float(f'{value:.3g}'):g}" if 1e-4 <= abs(value) < 1e6 and largest >= 0.01 else _scientific(value)

    return [(value, label(value)) for value in values]


def format_value(unit: str, value: float) -> str:
    """One value, with all the digits that mean something."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite" if value > 0 else "−infinite"
    if unit == "bytes":
        return show_bytes(round(value))
    if unit == "count":
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    digits = 4 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f}" if 0.01 <= abs(value) < 1e5 else "0" if value == 0 else _scientific(value)


def _scientific(value: float) -> str:
    """6e-4, 1.25e8."""
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


# ---- long curves


class Point(NamedTuple):
    """A value, or the mean of an interval with its minimum and maximum; NaN where there is none."""

    x: float
    y: float
    low: float
    high: float


class Downsampled(NamedTuple):
    """A curve with few enough points to draw."""

    points: list[Point]
    is_averaged: bool
    nonfinite: list[tuple[float, float]]  # (x, NaN or an infinity), at most one per interval
    nonfinite_count: int


def downsample(points: Sequence[tuple[float, float]], x0: float, x1: float, max_points: int) -> Downsampled:
    """A curve between x0 and x1 with at most `max_points` points: means over equal intervals, with their ranges."""
    is_averaged = len(points) > max_points
    width = (x1 - x0) / max_points or 1.0
    intervals: dict[int, list[tuple[float, float]]] = {}
    for index, (x, y) in enumerate(points):
        interval = min(int((x - x0) / width), max_points - 1) if is_averaged else index
        intervals.setdefault(interval, []).append((x, y))
    means, nonfinite, count = [], [], 0
    for _, inside in sorted(intervals.items()):
        finite = [y for _, y in inside if -HUGE < y < HUGE]
        x = inside[len(inside) // 2][0]
        means.append(Point(x, math.fsum(finite) / len(finite), min(finite), max(finite)) if finite else
                     Point(x, math.nan, math.nan, math.nan))
        others = [(x, y) for x, y in inside if not -HUGE < y < HUGE]
        nonfinite += others[-1:]
        count += len(others)
    return Downsampled(means, is_averaged, nonfinite, count)


# ---- SVG paths


def line_path(positions: Iterable[Position | None]) -> str:
    """A line through the positions, broken at None; a position by itself is a dot."""
    parts: list[str] = []
    before: Position | None = None
    for position in positions:
        if position and before:
            parts.append(f"l{position[0] - before[0]},{position[1] - before[1]}")
        elif position:
            parts.append(f"M{position[0]},{position[1]}h0")
        before = position
    return "".join(parts)


def dot_path(positions: Iterable[Position]) -> str:
    return "".join(f"M{x},{y}h0" for x, y in positions)


def area_path(edges: Iterable[tuple[Position | None, Position | None]]) -> str:
    """The area between two lines, given as (upper, lower) pairs; broken at None."""
    parts: list[str] = []
    upper: list[Position] = []
    lower: list[Position] = []
    for top, bottom in [*edges, (None, None)]:
        if top and bottom:
            upper.append(top)
            lower.append(bottom)
        elif upper:
            parts.append("M" + "L".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)]) + "Z")
            upper, lower = [], []
    return "".join(parts)


def step_path(positions: Iterable[Position]) -> str:
    """A staircase: each height holds until the next position. Equal heights are written once."""
    parts: list[str] = []
    height, x = -1, 0
    for x, y in positions:
        if y != height:
            parts.append(f"H{x}V{y}" if parts else f"M{x},{y}")
            height = y
    return "".join(parts) + f"H{x}"


# ---- HTML


def escaped(value: object) -> str:
    """Anything as HTML text or an attribute's value, whatever characters it holds."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair has no UTF-8
    return escape("".join(char if char in "\n\t" or ord(char) >= 32 else "\N{REPLACEMENT CHARACTER}" for char in text))


def breakable(text: str) -> str:
    """Escaped text that a browser may wrap after the characters that join words, and not elsewhere."""
    return re.sub(r"([/_=]|,(?!\d{3})|(?<=\w)-)(?=\S)", r"\1<wbr>", escaped(text))


def script_json(data: Any) -> str:
    """JSON for a <script> element: nothing inside can close the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def style() -> str:
    owners = "".join(f".o-{name}{{color:{colour}}}" for name, colour in OWNER_COLOURS.items())
    return (STATIC / "charts.css").read_text(encoding="utf-8") + owners


def script() -> str:
    return (STATIC / "charts.js").read_text(encoding="utf-8")


def html_page(title: str, body: str) -> str:
    """A page in one file: it loads nothing, and its content security policy allows no script but ours."""
    css, js = style(), script()
    css_hash, js_hash = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in (css, js))
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{css_hash}'; script-src 'sha256-{js_hash}'"
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n<meta name="generator" content="fitgpt">\n'
            f'<link rel="icon" href="data:,">\n<title>{escaped(title)}</title>\n<style>{css}</style>\n</head>\n'
            f"<body>\n<main>\n{body}\n</main>\n<script>{js}</script>\n</body>\n</html>\n")
