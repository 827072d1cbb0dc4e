"""Charts for the report, the planner and the page: curves and stacked bytes, as SVG that reads without a script.

Everything is placed in percent of the chart's own size, so a chart fills whatever room it has with its text at full
size. static/charts.js adds values under the pointer, zoom and keys to what is drawn here; it draws nothing of its own
but the axes of a zoomed view.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.units import show_bytes
from ..nouns import OwnerTimeline
from .scales import TALL, WIDE, Scale, Thin, area, corners, dots, line, shown, thinned, tick_labels

STATIC = Path(__file__).parent / "static"
USUAL = 0.98           # of the values; what lies far above them, and above the first, is marked at the edge
MOST_POINTS = 1000     # of a curve: about one a pixel of a wide chart
POINTS_A_CHART = 4000  # of all its curves
MOST_MARKS = 40
MOST_DOTS = 60         # beyond it a line says more
SERIES_COLOURS = 6     # s0 … s5 in static/charts.css

# One colour an owner, on light and dark alike. Found by maximising the smallest distance between any two of them, seen
# with normal, red-blind, green-blind and blue-blind eyes, most of all between neighbours in a stack.
OWNER_COLOURS = {
    "weights": "#5775c6", "gradients": "#ab6100", "optimizer": "#b29ff3", "casts": "#0c617c", "activations": "#67be9c",
    "logits": "#a32b3b", "workspace": "#bb9625", "data": "#f5bfe8", "other": "#828484",
}


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
    """A value that holds all along: a plan, a limit."""

    name: str
    value: float
    colour: int | None = None  # None: a limit


@dataclass(frozen=True)
class Mark:
    """Something that happened at x."""

    x: float
    text: str


def text(value: object) -> str:
    """Anything as HTML text or an attribute's value, whatever characters it holds."""
    words = str(value).encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair has no UTF-8
    return escape("".join(char if char in "\n\t" or ord(char) >= 32 else "\N{REPLACEMENT CHARACTER}" for char in words))


# ---- curves


def line_chart(title: str, series: Sequence[Series], *, unit: str = "number", x_name: str = "step",
               levels: Sequence[Level] = (), marks: Sequence[Mark] = (), from_zero: bool = False, note: str = "",
               empty: str = "Nothing recorded yet.", wide: bool = False) -> str:
    """Curves over one x. `unit`: number, count or bytes; `note`: a sentence for below; `empty`: one instead."""
    xs = [x for one in series for x, _ in one.points]
    if not xs:
        return _figure(title, "", f'<p class="nothing">{text(empty)}</p>', "", wide)
    x0, x1 = min(xs), max(xs)
    curves = [thinned(one.points, x0, x1, min(MOST_POINTS, POINTS_A_CHART // len(series))) for one in series]
    scale = Scale(*_widened(x0, x1, 0.01), *_y_range(curves, levels, from_zero))
    strange = [place for curve in curves for place in _edge_marks(curve, scale)]
    parts = [_curve(one, curve, scale) for one, curve in zip(series, curves, strict=True)]
    if strange:
        parts.append(f'<path class="strange" d="{dots(strange)}"/>')
        note = f"{note} {_said_of_strange(curves, scale, unit)}".strip()
    data = {"kind": "line", "unit": unit, "xName": x_name, "scale": scale.ends(), "fromZero": from_zero,
            "marks": [[mark.x, mark.text] for mark in marks[-MOST_MARKS:]],
            "series": [_series_data(one, curve) for one, curve in zip(series, curves, strict=True)]}
    drawing = _svg(_said(title, series, unit), "".join(parts), scale, unit, x_ticks=True,
                   over=_mark_lines(marks, scale) + "".join(
                       _level(each, scale, unit, at_left=bool(place % 2)) for place, each in enumerate(levels)))
    legend = "".join(_key(f"s{one.colour} {one.style}", one.name, "") for one in series) if len(series) > 1 else ""
    legend += "".join(_key(f"{_colour(each)} level", each.name, shown(unit, each.value)) for each in levels)
    return _figure(title, legend, drawing, note, wide, data)


def _curve(one: Series, curve: Thin, scale: Scale) -> str:
    kind = f"s{one.colour} {one.style}"
    places = [scale.place(point.x, point.y) for point in curve.points]
    parts = []
    if curve.is_thinned:
        edges = [(scale.place(point.x, point.high), scale.place(point.x, point.low)) for point in curve.points]
        parts.append(f'<path class="band s{one.colour}" d="{area(edges)}"/>')
    elif one.errors:
        ends = [(scale.place(x, y + error), scale.place(x, y - error))
                for (x, y), error in zip(one.points, one.errors, strict=False) if math.isfinite(error)]
        parts.append(f'<path class="whisker s{one.colour}" d="{"".join(line(each) for each in ends)}"/>')
    parts.append(f'<path class="curve {kind}" d="{line(places)}"/>')
    if one.style == "dotted" and len(places) <= MOST_DOTS:
        parts.append(f'<path class="dots s{one.colour}" d="{dots([each for each in places if each])}"/>')
    return "".join(parts)


def _y_range(curves: Sequence[Thin], levels: Sequence[Level], from_zero: bool) -> tuple[float, float]:
    """All values, but for spikes so high that nothing else could be seen beside them."""
    points = [point for curve in curves for point in curve.points if math.isfinite(point.y)]
    if not points:
        return 0.0, 1.0
    lows, highs = sorted(point.low for point in points), sorted(point.high for point in points)
    usual = round(USUAL * (len(points) - 1))
    firsts = [next((point.y for point in curve.points if math.isfinite(point.y)), highs[usual]) for curve in curves]
    low, high = min(lows[-1 - usual], *firsts), max(highs[usual], *firsts)
    far = 2 * (high - low)
    low, high = lows[0] if lows[0] >= low - far else low, highs[-1] if highs[-1] <= high + far else high
    low, high = min([low, *(level.value for level in levels)]), max([high, *(level.value for level in levels)])
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
        return low * 1.1, high * 1.1 or float(low == 0)
    return _widened(low, high, 0.06)


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    room = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _edge_marks(curve: Thin, scale: Scale) -> list[tuple[int, int]]:
    """Where something lies that the curve cannot show: NaN and infinity, and spikes beyond the range, at the top."""
    beyond = [(point.x, point.high > scale.y1) for point in curve.points
              if math.isfinite(point.y) and not scale.y0 <= point.low <= point.high <= scale.y1]
    strange = [(x, value != -math.inf) for x, value in curve.strange]
    return [(scale.x_place(x), 0 if at_top else TALL) for x, at_top in beyond + strange]


def _said_of_strange(curves: Sequence[Thin], scale: Scale, unit: str) -> str:
    count = sum(curve.strange_count for curve in curves)
    highest = max((point.high for curve in curves for point in curve.points if math.isfinite(point.y)), default=0.0)
    told = [f"{count:,} value{'s are' if count > 1 else ' is'} not finite"] if count else []
    told += [f"spikes reach {shown(unit, highest)}"] if highest > scale.y1 else []
    return f"{'; '.join(told) or 'some values lie outside'}: marked at the edge.".capitalize()


def _said(title: str, series: Sequence[Series], unit: str) -> str:
    """The chart in words, for those who cannot see it."""
    told = []
    for one in series:
        finite = [y for _, y in one.points if math.isfinite(y)]
        if finite:
            told.append(f"{one.name}: {shown(unit, finite[0])} at first, {shown(unit, finite[-1])} at last, "
                        f"lowest {shown(unit, min(finite))}, highest {shown(unit, max(finite))}")
    return f"{title}. " + ". ".join(told)


def _series_data(one: Series, curve: Thin) -> dict[str, Any]:
    strange = dict(curve.strange)
    data: dict[str, Any] = {
        "name": one.name, "class": f"s{one.colour}", "x": [_short(point.x) for point in curve.points],
        "y": [_short(point.y) if math.isfinite(point.y) else shown("number", strange.get(point.x, math.nan))
              for point in curve.points]}
    if curve.is_thinned:
        data["low"] = [_short(point.low) if math.isfinite(point.low) else None for point in curve.points]
        data["high"] = [_short(point.high) if math.isfinite(point.high) else None for point in curve.points]
    return data


def _short(value: float) -> float | int:
    rounded = float(f"{value:.6g}") if abs(value) < 1e6 else round(value)
    return int(rounded) if rounded == int(rounded) else rounded


def _mark_lines(marks: Sequence[Mark], scale: Scale) -> str:
    return "".join(f'<line class="mark" data-x="{mark.x:g}" x1="{scale.x_percent(mark.x)}" '
                   f'x2="{scale.x_percent(mark.x)}" y1="0" y2="100%"><title>{text(mark.text)}</title></line>'
                   for mark in marks[-MOST_MARKS:] if scale.x0 <= mark.x <= scale.x1)


def _level(level: Level, scale: Scale, unit: str, *, at_left: bool = False) -> str:
    y = scale.y_percent(level.value)
    x, anchor = ("4", "start") if at_left else ("100%", "end")
    return (f'<g class="level {_colour(level)}" data-y="{level.value!r}"><line x1="0" x2="100%" y1="{y}" y2="{y}"/>'
            f'<text x="{x}" y="{y}" dy="-5" text-anchor="{anchor}">{text(level.name)} '
            f'{text(shown(unit, level.value))}</text></g>')


def _colour(level: Level) -> str:
    return "limit" if level.colour is None else f"s{level.colour}"


# ---- bytes by owner


def stacked(timeline: OwnerTimeline, *, title: str = "One step, by owner", limit: int | None = None,
            limit_name: str = "limit", note: str = "") -> str:
    """Bytes of each owner on top of each other, event by event, with the peak and, if given, a limit."""
    totals = [sum(point) for point in timeline.points]
    if not totals or max(totals) <= 0:
        return _figure(title, "", '<p class="nothing">The tape is empty.</p>', note, True)
    present = [place for place in range(len(timeline.owners)) if any(point[place] for point in timeline.points)]
    scale = Scale(0, max(len(totals) - 1, 1), 0, max(*totals, limit or 0) * 1.12)
    layers, names, sums = [], [timeline.owners[place] for place in present], [0] * len(totals)
    for place, name in zip(present, names, strict=True):
        sums = [below + point[place] for below, point in zip(sums, timeline.points, strict=True)]
        steps = corners([scale.place(x, y) for x, y in enumerate(sums)])
        layers.append(f'<path class="layer {_owner_class(name)}" d="{steps}V{TALL}H0Z"/>')
    at_peak, total = timeline.points[timeline.peak], totals[timeline.peak]
    over = _phases(timeline, scale) + _peak(timeline, total, scale)
    if limit is not None:
        over += _level(Level(limit_name, limit), scale, "bytes", at_left=timeline.peak > len(totals) / 2)
    said = f"{title}: at most {show_bytes(total)}, of which " + ", ".join(
        f"{timeline.owners[place]} {show_bytes(at_peak[place])}" for place in present if at_peak[place])
    data = {"kind": "stacked", "unit": "bytes", "xName": "event", "scale": scale.ends(), "fromZero": True,
            "marks": timeline.marks, "count": len(totals),
            "series": [{"name": name, "class": _owner_class(name), "changes": _changes(timeline, place)}
                       for place, name in zip(present, names, strict=True)]}
    legend = "".join(_key(_owner_class(timeline.owners[place]), timeline.owners[place], show_bytes(at_peak[place]))
                     for place in reversed(present))
    legend += _key("total", "at the peak", show_bytes(total))
    # Painted from the highest sum down, each down to the ground: neighbours then share an edge without a seam.
    drawing = _svg(said, "".join(reversed(layers)), scale, "bytes", x_ticks=False, over=over)
    return _figure(title, legend, drawing, note, True, data)


def _changes(timeline: OwnerTimeline, place: int) -> list[int]:
    """[point, bytes, point, bytes …]: most events move one owner only."""
    held = [0, *(point[place] for point in timeline.points)]
    return [each for at, (before, after) in enumerate(pairwise(held)) if before != after for each in (at, after)]


def _phases(timeline: OwnerTimeline, scale: Scale) -> str:
    """Where each phase begins, with its name if it is long enough to hold it."""
    parts = []
    for (x, name), (end, _) in pairwise([*timeline.marks, (int(scale.x1), "")]):
        fits = scale.x_place(end) - scale.x_place(x) >= 0.014 * WIDE * len(name)  # in a chart some 500 px wide
        label = f'<text x="{scale.x_percent(x)}" y="0" dx="3" dy="-6">{text(name)}</text>' if fits else ""
        parts.append(f'<g class="phase" data-x="{x}" data-name="{text(name)}"><line x1="{scale.x_percent(x)}" '
                     f'x2="{scale.x_percent(x)}" y1="-4" y2="100%"/>{label}</g>')
    return "".join(parts)


def _peak(timeline: OwnerTimeline, total: int, scale: Scale) -> str:
    x, y = scale.x_percent(timeline.peak), scale.y_percent(total)
    share = scale.x_place(timeline.peak) / WIDE
    anchor = "start" if share < 0.25 else "end" if share > 0.75 else "middle"
    phase = next((name for start, name in reversed(timeline.marks) if start <= timeline.peak), "")
    where = f" in {phase}" if phase else ""
    return (f'<g class="peak" data-x="{timeline.peak}" data-y="{total}"><circle cx="{x}" cy="{y}" r="4"/>'
            f'<text x="{x}" y="{y}" dy="-10" text-anchor="{anchor}">peak {show_bytes(total)}{text(where)}</text>'
            "</g>")


def owner_bar(owners: Mapping[str, int], *, limit: int | None = None) -> str:
    """One bar of bytes by owner, against a limit if there is one."""
    total = sum(owners.values())
    room = max(total, limit or 0) or 1
    parts, at = [], 0
    for name, nbytes in owners.items():
        parts.append(f'<rect class="{_owner_class(name)}" x="{at / room:.3%}" width="{nbytes / room:.3%}" '
                     'height="100%">'
                     f'<title>{text(name)} {show_bytes(nbytes)}</title></rect>')
        at += nbytes
    if limit is not None:
        end = f"{limit / room:.3%}"
        parts.append(f'<line x1="{end}" x2="{end}" y1="-5" y2="100%"/>')
    said = ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in owners.items())
    keys = "".join(_key(_owner_class(name), name, show_bytes(nbytes)) for name, nbytes in owners.items())
    keys += _key("level", "limit", show_bytes(limit)) if limit is not None else ""
    return (f'<div class="bar"><svg role="img" aria-label="{text(said)}">{"".join(parts)}</svg>'
            f'<ul class="legend">{keys}</ul></div>')


def _owner_class(name: str) -> str:
    return f"o-{name}" if name in OWNER_COLOURS else "o-other"


# ---- the frame around a drawing


def _svg(said: str, inner: str, scale: Scale, unit: str, *, x_ticks: bool, over: str) -> str:
    """Axes, the stretched drawing, and what lies over it at its own size."""
    y_labels = "".join(f'<line x1="0" x2="100%" y1="{scale.y_percent(at)}" y2="{scale.y_percent(at)}"/>'
                       f'<text x="-8" y="{scale.y_percent(at)}" dy="4" text-anchor="end">{text(label)}</text>'
                       for at, label in tick_labels(unit, scale.y0, scale.y1, 5))
    x_labels = "".join(f'<text x="{scale.x_percent(at)}" y="100%" dy="18" text-anchor="middle">{text(label)}</text>'
                       for at, label in tick_labels("count", scale.x0, scale.x1, 5)) if x_ticks else (
        '<text x="50%" y="100%" dy="18" text-anchor="middle">allocations and frees, in their order</text>')
    return (f'<div class="frame"><svg class="plot" role="img" aria-label="{text(said)}">'
            f'<g class="axis y">{y_labels}</g><g class="axis x">{x_labels}</g>'
            f'<svg class="inner" viewBox="0 0 {WIDE} {TALL}" preserveAspectRatio="none" width="100%" height="100%">'
            f'{inner}</svg>{over}</svg></div>')


def _figure(title: str, legend: str, drawing: str, note: str, wide: bool, data: dict[str, Any] | None = None) -> str:
    kind = " wide" if wide else ""
    live = f' data-chart="{data["kind"]}"' if data else ""
    keys = f'<ul class="legend">{legend}</ul>' if legend else ""
    below = f'<p class="note">{text(note)}</p>' if note else ""
    figures = f'<script type="application/json">{embedded(data)}</script>' if data else ""
    return (f'<figure class="chart{kind}"{live}><figcaption>{text(title)}</figcaption>{keys}{drawing}{below}'
            f"{figures}</figure>")


def _key(kind: str, name: str, value: str) -> str:
    figure = f" <b>{text(value)}</b>" if value else ""
    return f'<li class="{kind}"><i></i><span>{text(name)}</span>{figure}</li>'


def embedded(data: Any) -> str:
    """JSON that nothing inside can end early."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ---- a page of its own


def style() -> str:
    owners = "".join(f".o-{name}{{color:{colour}}}" for name, colour in OWNER_COLOURS.items())
    return (STATIC / "charts.css").read_text(encoding="utf-8") + owners


def script() -> str:
    return (STATIC / "charts.js").read_text(encoding="utf-8")


def breakable(words: str) -> str:
    """Text that may go on in the next line after what joins words in it, and so is not broken elsewhere."""
    return re.sub(r"([/_=]|,(?!\d{3})|(?<=\w)-)(?=\S)", r"\1<wbr>", text(words))


def page(title: str, body: str) -> str:
    """A whole page in one file: nothing is loaded, and no script runs but ours, whatever the body holds."""
    css, js = style(), script()
    policy = f"default-src 'none'; img-src data:; style-src {_hash(css)}; script-src {_hash(js)}"
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n<meta name="generator" content="fitgpt">\n'
            f'<link rel="icon" href="data:,">\n<title>{text(title)}</title>\n<style>{css}</style>\n</head>\n'
            f"<body>\n<main>\n{body}\n</main>\n<script>{js}</script>\n</body>\n</html>\n")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
