"""Charts say what they are given: every spike, every gap, no broken number, and nothing that could run."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from fitgpt.core.units import GiB, MiB
from fitgpt.memory.tape import OWNERS
from fitgpt.nouns import OwnerTimeline
from fitgpt.show.charts import (
    OWNER_COLOURS,
    Level,
    Mark,
    Series,
    breakable,
    embedded,
    line_chart,
    owner_bar,
    page,
    stacked,
    text,
)
from fitgpt.show.scales import TALL, WIDE, Scale, corners, line, shown, thinned, tick_labels, ticks

VOID = {"meta", "link", "br", "wbr", "line", "path", "rect", "circle"}
STEP = OwnerTimeline(owners=("weights", "activations", "logits", "surprise"),
                     points=((GiB, 0, 0, 0), (GiB, 2 * GiB, 0, 0), (GiB, 2 * GiB, 3 * GiB, MiB), (GiB, 0, 0, 0)),
                     marks=((0, "forward"), (2, "backward")), peak=2)


class Outline(HTMLParser):
    """Tags and their attributes in order; fails where one is left open or closed twice."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def named(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags
                if name == tag and (not kind or kind in (attributes.get("class") or "").split())]


def data_of(chart: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', chart)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def places(path: str) -> list[tuple[int, int]]:
    """Where a path of M, l, h0, H and V leads, step by step."""
    x = y = 0
    found = []
    for letter, first, second in re.findall(r"([MlHVh])(-?\d+)(?:,(-?\d+))?", path):
        a, b = int(first), int(second or 0)
        x, y = {"M": (a, b), "l": (x + a, y + b), "H": (a, y), "V": (x, a), "h": (x + a, y)}[letter]
        found.append((x, y))
    return found


# ---- curves


def test_a_curve_goes_through_its_points() -> None:
    chart = Outline(line_chart("Loss", [Series("training", [(0, 4.0), (50, 2.0), (100, 3.0)])]))
    (curve,) = chart.named("path", "curve")
    (_, top), *_, (_, bottom), (_, middle) = places(curve["d"] or "")
    assert top < middle < bottom
    assert middle - top == pytest.approx(bottom - middle, abs=2)


def test_a_value_that_is_not_finite_is_a_gap_in_the_curve_a_mark_at_the_edge_and_a_word() -> None:
    points = [(0, 3.0), (1, 2.9), (2, math.nan), (3, 2.8), (4, math.inf), (5, 2.7), (6, -math.inf)]
    html = line_chart("Loss", [Series("training", points)])
    chart = Outline(html)
    (curve,) = chart.named("path", "curve")
    assert (curve["d"] or "").count("M") == 3
    (marks,) = chart.named("path", "strange")
    assert [y for _, y in places(marks["d"] or "")[::2]] == [0, 0, TALL]
    assert "3 values are not finite: marked at the edge." in html
    assert data_of(html)["series"][0]["y"][2:5:2] == ["NaN", "infinite"]


def test_a_far_spike_is_marked_and_does_not_flatten_the_rest() -> None:
    points = [(x, 3.0 + 0.1 * (x % 2)) for x in range(200)]
    points[100] = (100, 5000.0)
    html = line_chart("Loss", [Series("training", points)])
    assert data_of(html)["scale"][3] < 4
    assert "Spikes reach 5000.0: marked at the edge." in html
    assert 5000 in data_of(html)["series"][0]["y"]


def test_the_first_value_is_always_in_view() -> None:
    """A loss begins at 11 and stays near 3: that is no spike."""
    points = [(x, 3.0 + 8 * math.exp(-x)) for x in range(1000)]
    assert data_of(line_chart("Loss", [Series("training", points)]))["scale"][3] > 11


@pytest.mark.parametrize("points", [
    [(0, 1.0)], [(5, 0.0), (6, 0.0)], [(0, math.nan)], [(0, 1e308), (1, -1e308)], [(0, 1e-300), (1, 2e-300)],
    [(0, 5.0), (0, 6.0)], [(2**53, 1.0), (2**53 + 2, 2.0)], [(0, -1.0), (1, -2.0)],
], ids=str)
@pytest.mark.parametrize("unit", ["number", "count", "bytes"])
@pytest.mark.parametrize("from_zero", [True, False])
def test_odd_values_are_drawn_inside_the_chart(points: list[tuple[float, float]], unit: str, from_zero: bool) -> None:
    html = line_chart("Odd", [Series("a", points)], unit=unit, from_zero=from_zero)
    chart = Outline(html)
    for curve in chart.named("path"):
        assert all(0 <= x <= WIDE and 0 <= y <= TALL for x, y in places(curve["d"] or ""))
    assert all(map(math.isfinite, data_of(html)["scale"]))
    assert "nan%" not in html
    assert "inf%" not in html


def test_no_points_at_all_is_said() -> None:
    assert "Nothing recorded yet." in line_chart("Loss", [])
    assert "a CPU has none" in line_chart("Memory", [], empty="a CPU has none")


def test_levels_are_in_view_and_named() -> None:
    html = line_chart("Memory", [Series("reserved", [(0, 4 * GiB), (9, 5 * GiB)])], unit="bytes", from_zero=True,
                      levels=[Level("limit", 11 * GiB), Level("planned", 6 * GiB, 1)])
    assert data_of(html)["scale"][3] > 11 * GiB
    assert "limit 11.00 GiB" in html
    assert "planned 6.00 GiB" in html


def test_what_happened_is_a_line_at_its_step() -> None:
    html = line_chart("Loss", [Series("a", [(0, 1.0), (100, 2.0)])], marks=[Mark(50, "resumed"), Mark(900, "later")])
    (mark,) = Outline(html).named("line", "mark")
    assert mark["x1"] == "50.000%"
    assert "resumed" in html


def test_whiskers_show_the_error_of_each_point() -> None:
    html = line_chart("Loss", [Series("val", [(0, 3.0), (1, 2.0)], 1, "dotted", [0.5, math.nan])])
    (whisker,) = Outline(html).named("path", "whisker")
    assert len(re.findall("M", whisker["d"] or "")) == 1


# ---- long curves


def test_a_long_curve_keeps_every_extreme() -> None:
    dice = random.Random(0)
    points = [(x, dice.gauss(3, 0.1)) for x in range(100_000)]
    points[77_777] = (77_777, 99.0)
    points[33_333] = (33_333, -99.0)
    points[5] = (5, math.nan)
    thin = thinned(points, 0, 99_999, 500)
    assert thin.is_thinned
    assert len(thin.points) <= 500
    assert max(point.high for point in thin.points) == 99.0
    assert min(point.low for point in thin.points) == -99.0
    assert thin.strange_count == len(thin.strange) == 1
    means = [point.y for point in thin.points]
    assert sum(means) / len(means) == pytest.approx(sum(y for _, y in points if y == y) / 99_999, abs=1e-3)


def test_a_short_curve_is_left_as_it_is() -> None:
    thin = thinned([(0, 1.0), (3, 2.0)], 0, 3, 500)
    assert [(point.x, point.y) for point in thin.points] == [(0, 1.0), (3, 2.0)]
    assert not thin.is_thinned


def test_a_thinned_curve_shows_the_range_it_stands_for() -> None:
    points = [(x, float(x % 7)) for x in range(50_000)]
    html = line_chart("Loss", [Series("a", points)])
    (band,) = Outline(html).named("path", "band")
    assert (band["d"] or "").endswith("Z")
    data = data_of(html)["series"][0]
    assert set(data["low"]) == {0}
    assert set(data["high"]) == {6}
    assert len(html) < 120_000


# ---- figures


@pytest.mark.parametrize(("unit", "low", "high"), [
    ("number", 2.9, 11.3), ("number", 0, 6e-4), ("number", -1, 1), ("count", 0, 231_000), ("count", 0, 9),
    ("bytes", 0, 11.46 * GiB), ("bytes", 0, 700), ("bytes", 0, 300 * MiB), ("number", 3.00001, 3.00002)])
def test_ticks_are_round_inside_the_range_and_told_apart(unit: str, low: float, high: float) -> None:
    found = tick_labels(unit, low, high, 5)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 <= at <= high * (1 + 1e-9) for at, _ in found)
    assert len({label for _, label in found}) == len(found)
    steps = {round((b - a) / (high - low), 6) for a, b in itertools.pairwise(ticks(unit, low, high, 5))}
    assert len(steps) == 1


def test_bytes_have_binary_ticks() -> None:
    assert [label for _, label in tick_labels("bytes", 0, 11 * GiB, 5)] == [
        "0", "5 GiB", "10 GiB"]
    assert [at for at in ticks("bytes", 0, 3 * GiB, 5)][1] == GiB


@pytest.mark.parametrize(("unit", "value", "said"), [
    ("number", 2.34567, "2.3457"), ("number", 6e-4, "6e-4"), ("number", 61.0, "61.00"), ("number", 1.25e8, "1.25e8"),
    ("number", math.nan, "NaN"), ("count", 98304.4, "98,304"), ("bytes", 3 * GiB, "3.00 GiB"), ("number", 0, "0")])
def test_a_figure_in_words(unit: str, value: float, said: str) -> None:
    assert shown(unit, value) == said


def test_steps_are_written_once_a_height() -> None:
    scale = Scale(0, 4, 0, 10)
    assert corners([scale.place(x, y) for x, y in enumerate((5, 5, 5, 10, 10))]) == (
        f"M0,{TALL // 2}H{WIDE * 3 // 4}V0H{WIDE}")
    assert line([(0, 0), None, (5, 5), (7, 6)]) == "M0,0h0M5,5h0l2,1"


# ---- bytes by owner


def test_a_stack_names_owners_with_their_bytes_at_the_peak() -> None:
    html = stacked(STEP, limit=11 * GiB)
    keys = re.findall(r'<li class="([^"]+)"><i></i><span>([^<]+)</span> <b>([^<]+)</b>', html)
    assert keys == [("o-other", "surprise", "1.0 MiB"), ("o-logits", "logits", "3.00 GiB"),
                    ("o-activations", "activations", "2.00 GiB"), ("o-weights", "weights", "1.00 GiB"),
                    ("total", "at the peak", "6.00 GiB")]
    assert "peak 6.00 GiB in backward" in html
    assert "limit 11.00 GiB" in html


def test_a_stack_is_as_high_as_its_bytes() -> None:
    html = stacked(STEP, limit=12 * GiB)
    layers = Outline(html).named("path", "layer")
    top = data_of(html)["scale"][3]
    assert top > 12 * GiB
    heights = [min(y for _, y in places((layer["d"] or "").split("V10000H0Z")[0])) for layer in layers]
    bytes_drawn = [(1 - height / TALL) * top / GiB for height in heights]
    assert bytes_drawn == pytest.approx([6 + MiB / GiB, 6, 3, 1], abs=0.01)  # painted from the highest sum down


def test_a_stacks_figures_are_those_of_its_points() -> None:
    """As static/charts.js spells them out: each value holds until the next."""
    data = data_of(stacked(STEP))
    assert [one["name"] for one in data["series"]] == list(STEP.owners)
    for place, one in enumerate(data["series"]):
        values, changes = [0] * data["count"], one["changes"]
        for at, value in zip(changes[::2], changes[1::2], strict=True):
            values[at:] = [value] * (data["count"] - at)
        assert values == [point[place] for point in STEP.points]


def test_owners_that_never_hold_anything_are_left_out() -> None:
    html = stacked(OwnerTimeline(("weights", "casts"), ((5, 0), (6, 0)), (), 1))
    assert "casts" not in html


@pytest.mark.parametrize("points", [(), ((0,),), ((7,),)])
def test_a_tape_of_nothing_or_of_one_event_is_drawn(points: tuple[tuple[int, ...], ...]) -> None:
    Outline(stacked(OwnerTimeline(("weights",), points, (), 0), limit=GiB))


def test_a_bar_has_a_part_for_each_owner_against_the_limit() -> None:
    html = owner_bar({"weights": GiB, "logits": 3 * GiB}, limit=8 * GiB)
    assert [part["width"] for part in Outline(html).named("rect")] == ["12.500%", "37.500%"]
    assert "limit</span> <b>8.00 GiB" in html
    Outline(owner_bar({}))


# ---- colours


def linear(colour: str) -> list[float]:
    values = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


# Machado, Oliveira & Fernandes (2009), at full severity; linear RGB.
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "red-blind": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "green-blind": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "blue-blind": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen(colour: str, eye: str) -> tuple[float, float, float]:
    """In Oklab, where distances are those that people see."""
    red, green, blue = (min(max(sum(a * b for a, b in zip(row, linear(colour), strict=True)), 0), 1)
                        for row in EYES[eye])
    long, mid, short = ((a * red + b * green + c * blue) ** (1 / 3) for a, b, c in (
        (0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
        (0.0883024619, 0.2817188376, 0.6299787005)))
    return (0.2104542553 * long + 0.7936177850 * mid - 0.0040720468 * short,
            1.9779984951 * long - 2.4285922050 * mid + 0.4505937099 * short,
            0.0259040371 * long + 0.7827717662 * mid - 0.8086757660 * short)


def test_every_owner_has_a_colour_of_its_own() -> None:
    assert tuple(OWNER_COLOURS) == OWNERS
    assert len(set(OWNER_COLOURS.values())) == len(OWNERS)


@pytest.mark.parametrize("eye", EYES)
def test_owners_are_told_apart_by_colour_blind_people_too(eye: str) -> None:
    """0.02 in Oklab is about the smallest difference people see side by side; these are far from it."""
    distances = {(a, b): math.dist(seen(OWNER_COLOURS[a], eye), seen(OWNER_COLOURS[b], eye))
                 for a, b in itertools.combinations(OWNERS, 2)}
    assert {pair: distance for pair, distance in distances.items() if distance < 0.09} == {}
    neighbours = [distances[pair] for pair in itertools.pairwise(OWNERS)]
    assert min(neighbours) > 0.12


@pytest.mark.parametrize("ground", ["#ffffff", "#191c21"])
def test_owners_stand_out_from_a_light_and_a_dark_page(ground: str) -> None:
    for name, colour in OWNER_COLOURS.items():
        assert math.dist(seen(colour, "normal"), seen(ground, "normal")) > 0.12, name


# ---- nothing that could run

HOSTILE = ('<script>alert(1)</script>', '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)", "</script><b>",
           "<!--", "]]>", "&lt;b&gt;", "\x00\x1b[31m", "\ud800", "\u202e", "a\nb")


@pytest.mark.parametrize("words", HOSTILE, ids=ascii)
def test_hostile_words_stay_words(words: str) -> None:
    charts = [
        line_chart(words, [Series(words, [(0, 1.0), (1, 2.0)]), Series("b", [(0, 1.0)])], x_name=words,
                   levels=[Level(words, 1.0)], marks=[Mark(0.5, words)], note=words),
        line_chart(words, [], empty=words),
        stacked(OwnerTimeline((words, "weights"), ((1, 2), (3, 4)), ((0, words),), 1), title=words, limit=5,
                limit_name=words, note=words),
        owner_bar({words: 5}),
    ]
    html = page(words, "".join(charts))
    html.encode("utf-8")
    outline = Outline(html)
    assert {tag for tag, _ in outline.tags} <= {
        "html", "head", "meta", "link", "title", "style", "body", "main", "figure", "figcaption", "ul", "li", "i",
        "span", "b", "div", "svg", "g", "line", "text", "path", "circle", "rect", "p", "script"}
    assert [attributes for _, attributes in outline.tags if any(name.startswith("on") for name in attributes)] == []
    assert len(outline.named("script")) == 3  # the figures of two charts, and ours
    assert "\x00" not in html
    for chart in charts[:1]:
        data_of(chart)


def test_embedded_figures_cannot_end_their_script() -> None:
    assert "<" not in embedded({"name": "</script><!--<script>"})
    assert json.loads(embedded({"name": "</script>"})) == {"name": "</script>"}


def test_text_is_escaped_once() -> None:
    assert text('<a href="x">&') == "&lt;a href=&quot;x&quot;&gt;&amp;"


def test_a_page_asks_nothing_of_the_world_and_runs_no_script_but_ours() -> None:
    html = page("Title", "<p>body</p>")
    outside = re.findall(r"https?://[^\s\"'<)]+", html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}  # a name, not an address to load
    (policy,) = [tag["content"] for tag in Outline(html).named("meta") if "http-equiv" in tag]
    assert re.fullmatch(r"default-src 'none'; img-src data:; style-src 'sha256-[\w+/=]+'; "
                        r"script-src 'sha256-[\w+/=]+'", policy or "")


def test_long_flags_break_where_words_join_and_never_after_their_dashes() -> None:
    assert breakable("--recompute=1*no_wide,2*all x-y a_b") == (
        "--recompute=<wbr>1*no_<wbr>wide,<wbr>2*all x-<wbr>y a_<wbr>b")
    assert breakable("<a=b>") == "&lt;a=<wbr>b&gt;"
    assert breakable("517,248 of 1,234,567") == "517,248 of 1,234,567"
