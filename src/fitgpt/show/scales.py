"""From values to places on a chart: scales, ticks, words for figures, and long curves made short without their spikes.

A drawing is WIDE × TALL units, stretched over whatever room a chart has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..core.units import GiB, KiB, MiB, TiB, show_bytes

WIDE, TALL = 100_000, 10_000
HUGE = 1e300           # beyond it arithmetic on a range overflows; counts as infinite

Place = tuple[int, int]


class Scale(NamedTuple):
    """The values at the edges of a chart."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x_place(self, x: float) -> int:
        return round((x - self.x0) / (self.x1 - self.x0) * WIDE)

    def place(self, x: float, y: float) -> Place | None:
        """Held inside the chart; None where there is no value."""
        if not math.isfinite(y):
            return None
        share = (self.y1 - y) / (self.y1 - self.y0)
        return self.x_place(x), round(min(max(share, 0.0), 1.0) * TALL)

    def x_percent(self, x: float) -> str:
        return f"{(x - self.x0) / (self.x1 - self.x0):.3%}"

    def y_percent(self, y: float) -> str:
        return f"{(self.y1 - y) / (self.y1 - self.y0):.3%}"

    def ends(self) -> list[float]:
        return list(self)


# ---- long curves


class Point(NamedTuple):
    """A value, or the mean of a stretch of values with its lowest and highest; NaN where there is none."""

    x: float
    y: float
    low: float
    high: float


class Thin(NamedTuple):
    points: list[Point]
    is_thinned: bool
    strange: list[tuple[float, float]]  # (x, NaN or an infinity), at most one a stretch
    strange_count: int


def thinned(points: Sequence[tuple[float, float]], x0: float, x1: float, most: int) -> Thin:
    """At most so many points between x0 and x1: means over equal stretches, with the range each mean stands for."""
    strange = [(x, y) for x, y in points if not -HUGE < y < HUGE]
    if len(points) <= most:
        return Thin([_point(x, [y]) for x, y in points], False, strange, len(strange))
    stretches: dict[int, list[tuple[float, float]]] = {}
    width = (x1 - x0) / most or 1.0
    for x, y in points:
        stretches.setdefault(min(int((x - x0) / width), most - 1), []).append((x, y))
    drawn = [_point(stretch[len(stretch) // 2][0], [y for _, y in stretch]) for _, stretch in sorted(stretches.items())]
    marks = {min(int((x - x0) / width), most - 1): (x, y) for x, y in strange}
    return Thin(drawn, True, list(marks.values()), len(strange))


def _point(x: float, values: Sequence[float]) -> Point:
    finite = [y for y in values if -HUGE < y < HUGE]
    if not finite:
        return Point(x, math.nan, math.nan, math.nan)
    return Point(x, math.fsum(finite) / len(finite), min(finite), max(finite))


# ---- paths


def line(places: Iterable[Place | None]) -> str:
    """A line from place to place, broken where there is none; a place by itself is a dot."""
    parts: list[str] = []
    before: Place | None = None
    for place in places:
        if place and before:
            parts.append(f"l{place[0] - before[0]},{place[1] - before[1]}")
        elif place:
            parts.append(f"M{place[0]},{place[1]}h0")
        before = place
    return "".join(parts)


def dots(places: Iterable[Place]) -> str:
    return "".join(f"M{x},{y}h0" for x, y in places)


def area(edges: Iterable[tuple[Place | None, Place | None]]) -> str:
    """What lies between two lines, stretch by stretch."""
    parts: list[str] = []
    upper: list[Place] = []
    lower: list[Place] = []
    for top, bottom in [*edges, (None, None)]:
        if top and bottom:
            upper.append(top)
            lower.append(bottom)
        elif upper:
            parts.append("M" + "L".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)]) + "Z")
            upper, lower = [], []
    return "".join(parts)


def corners(places: Iterable[Place | None]) -> str:
    """Steps: each height holds until the next place. Heights that stay are not written again."""
    parts: list[str] = []
    height, at = -1, 0
    for place in places:
        if place is None:
            continue
        at = place[0]
        if place[1] != height:
            parts.append(f"H{at}V{place[1]}" if parts else f"M{at},{place[1]}")
            height = place[1]
    return "".join(parts) + f"H{at}"


# ---- figures in words


def ticks(unit: str, low: float, high: float, most: int) -> list[float]:
    """Round values inside the range, at most about so many."""
    base = next((size for size in (TiB, GiB, MiB, KiB) if high - low >= size), 1) if unit == "bytes" else 1
    rough = (high - low) / base / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999) * base
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_labels(unit: str, low: float, high: float, most: int) -> list[tuple[float, str]]:
    found = ticks(unit, low, high, most)
    step = found[1] - found[0] if len(found) > 1 else high - low
    return [(at, tick_label(unit, at, step, max(abs(low), abs(high)))) for at in found]


def tick_label(unit: str, value: float, step: float, largest: float) -> str:
    """Short, and all of an axis alike."""
    if unit == "bytes":
        size, name = next(((size, name) for size, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))
                           if largest >= size), (1, "B"))
        return "0" if value == 0 else f"{_plain(value / size, step / size)} {name}"
    if value == 0:
        return "0"
    if unit == "count" and largest >= 10_000:
        thousands, letter = next((each for each in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if largest >= each[0]),
                                 (1e3, "k"))
        return f"{_plain(value / thousands, step / thousands)}{letter}"
    if largest >= 1e6 or largest < 0.01:
        return f"{float(f'{value:.3g}'):g}" if 1e-4 <= abs(value) < 1e6 and largest >= 0.01 else _power(value)
    return _plain(value, step)


def shown(unit: str, value: float) -> str:
    """One figure, with all the digits that mean something."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite" if value > 0 else "−infinite"
    if unit == "bytes":
        return show_bytes(round(value))
    if unit == "count":
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    digits = 4 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f}" if 0.01 <= abs(value) < 1e5 else "0" if value == 0 else _power(value)


def _plain(value: float, step: float) -> str:
    digits = max(0, math.ceil(-math.log10(step) - 1e-9)) if step > 0 else 0
    return f"{value:,.{min(digits, 9)}f}"


def _power(value: float) -> str:
    """6e-4, 1.25e8."""
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
