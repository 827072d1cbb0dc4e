"""Charts: curves, long curves, ticks, stacked bytes, colours, and text that cannot become a script."""

from __future__ import annotations

import itertools
import json
import math
import random
import re

import pytest

from fitgpt.core.units import GiB, MiB
from fitgpt.memory.tape import OWNERS
from fitgpt.memory.timeline import OwnerTimeline
from fitgpt.show.charts import (
    OWNER_COLOURS,
    TALL,
    WIDE,
    AltAxis,
    EventMark,
    Level,
    Scale,
    Series,
    breakable,
    downsample,
    escaped,
    format_value,
    html_page,
    line_chart,
    line_path,
    owner_bar,
    script_json,
    stacked_chart,
    step_path,
    tick_labels,
)
from tests.html_outline import HOSTILE_TEXTS, Outline, chart_data

STEP = OwnerTimeline(owners=("weights", "activations", "logits", "surprise"),
                     points=((GiB, 0, 0, 0), (GiB, 2 * GiB, 0, 0), (GiB, 2 * GiB, 3 * GiB, MiB), (GiB, 0, 0, 0)),
                     marks=((0, "forward"), (2, "backward")), peak=2)


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
    (curve,) = chart.elements("path", "curve")
    (_, top), *_, (_, bottom), (_, middle) = places(curve["d"] or "")
    assert top < middle < bottom
    assert middle - top == pytest.approx(bottom - middle, abs=2)


def test_nonfinite_values_are_gaps_with_marks_at_the_edge_and_a_note() -> None:
    points = [(0, 3.0), (1, 2.9), (2, math.nan), (3, 2.8), (4, math.inf), (5, 2.7), (6, -math.inf)]
    html = line_chart("Loss", [Series("training", points)])
    chart = Outline(html)
    (curve,) = chart.elements("path", "curve")
    assert (curve["d"] or "").count("M") == 3
    (marks,) = chart.elements("path", "outside")
    assert [y for _, y in places(marks["d"] or "")[::2]] == [0, 0, TALL]
    assert "3 values are not finite: marked at the edge." in html
    assert chart_data(html)["series"][0]["y"][2:5:2] == ["NaN", "infinite"]


def test_a_far_spike_is_marked_and_does_not_flatten_the_rest() -> None:
    points = [(x, 3.0 + 0.1 * (x % 2)) for x in range(200)]
    points[100] = (100, 5000.0)
    html = line_chart("Loss", [Series("training", points)])
    assert chart_data(html)["scale"][3] < 4
    assert "Spikes reach 5000.0: marked at the edge." in html
    assert 5000 in chart_data(html)["series"][0]["y"]


def test_the_first_value_is_always_in_view() -> None:
    """A loss begins at 11 and stays near 3: that is no spike."""
    points = [(x, 3.0 + 8 * math.exp(-x)) for x in range(1000)]
    assert chart_data(line_chart("Loss", [Series("training", points)]))["scale"][3] > 11


@pytest.mark.parametrize("points", [
    [(0, 1.0)], [(5, 0.0), (6, 0.0)], [(0, math.nan)], [(0, 1e308), (1, -1e308)], [(0, 1e-300), (1, 2e-300)],
    [(0, 5.0), (0, 6.0)], [(2**53, 1.0), (2**53 + 2, 2.0)], [(0, -1.0), (1, -2.0)],
], ids=str)
@pytest.mark.parametrize("unit", ["number", "count", "bytes"])
@pytest.mark.parametrize("from_zero", [True, False])
def test_extreme_values_are_drawn_inside_the_chart(points: list[tuple[float, float]], unit: str,
                                                   from_zero: bool) -> None:
    html = line_chart("Odd", [Series("a", points)], unit=unit, from_zero=from_zero)
    chart = Outline(html)
    for curve in chart.elements("path"):
        assert all(0 <= x <= WIDE and 0 <= y <= TALL for x, y in places(curve["d"] or ""))
    assert all(map(math.isfinite, chart_data(html)["scale"]))
    assert "nan%" not in html
    assert "inf%" not in html


def test_a_chart_without_points_shows_a_sentence_instead() -> None:
    assert "Nothing recorded yet." in line_chart("Loss", [])
    assert "a CPU has none" in line_chart("Memory", [], empty="a CPU has none")


def test_levels_are_in_view_and_named() -> None:
    html = line_chart("Memory", [Series("reserved", [(0, 4 * GiB), (9, 5 * GiB)])], unit="bytes", from_zero=True,
                      levels=[Level("limit", 11 * GiB), Level("planned", 6 * GiB, 1)])
    assert chart_data(html)["scale"][3] > 11 * GiB
    assert "limit 11.00 GiB" in html
    assert "planned 6.00 GiB" in html


def test_events_are_vertical_lines_at_their_step() -> None:
    html = line_chart("Loss", [Series("a", [(0, 1.0), (100, 2.0)])],
                      marks=[EventMark(50, "resumed"), EventMark(900, "later")])
    (mark,) = Outline(html).elements("line", "mark")
    assert mark["x1"] == "50.000%"
    assert "resumed" in html


def test_whiskers_show_the_error_of_each_point() -> None:
    html = line_chart("Loss", [Series("val", [(0, 3.0), (1, 2.0)], 1, "dotted", [0.5, math.nan])])
    (whisker,) = Outline(html).elements("path", "whisker")
    assert len(re.findall("M", whisker["d"] or "")) == 1


# ---- long curves


def test_a_long_curve_keeps_every_extreme() -> None:
    rng = random.Random(0)
    points = [(x, rng.gauss(3, 0.1)) for x in range(100_000)]
    points[77_777] = (77_777, 99.0)
    points[33_333] = (33_333, -99.0)
    points[5] = (5, math.nan)
    downsampled = downsample(points, 0, 99_999, 500)
    assert downsampled.is_averaged
    assert len(downsampled.points) <= 500
    assert max(point.high for point in downsampled.points) == 99.0
    assert min(point.low for point in downsampled.points) == -99.0
    assert downsampled.nonfinite_count == len(downsampled.nonfinite) == 1
    means = [point.y for point in downsampled.points]
    assert sum(means) / len(means) == pytest.approx(sum(y for _, y in points if y == y) / 99_999, abs=1e-3)


def test_a_short_curve_is_not_downsampled() -> None:
    downsampled = downsample([(0, 1.0), (3, 2.0)], 0, 3, 500)
    assert [(point.x, point.y) for point in downsampled.points] == [(0, 1.0), (3, 2.0)]
    assert not downsampled.is_averaged


def test_a_downsampled_curve_has_a_band_from_minimum_to_maximum() -> None:
    points = [(x, float(x % 7)) for x in range(50_000)]
    html = line_chart("Loss", [Series("a", points)])
    (band,) = Outline(html).elements("path", "band")
    assert (band["d"] or "").endswith("Z")
    data = chart_data(html)["series"][0]
    assert set(data["low"]) == {0}
    assert set(data["high"]) == {6}
    assert len(html) < 120_000


def test_values_before_y_from_do_not_set_the_range_and_come_in_at_the_upper_edge() -> None:
    points = [(0, 11.0), (10, 5.0), *((x, 3.0) for x in range(20, 100, 10))]
    html = line_chart("Loss", [Series("training", points)], y_from=10)
    assert 5 < chart_data(html)["scale"][3] < 5.5
    assert chart_data(html)["series"][0]["y"][0] == 11  # the readout has it nevertheless
    drawn = places(Outline(html).elements("path", "curve")[0]["d"] or "")
    assert drawn[0][1] == 0
    assert drawn[0][0] > WIDE // 20  # where the line crosses the edge, not at step 0
    assert "marked at the edge" not in html


def test_another_axis_has_its_ticks_at_the_values_of_x() -> None:
    axis = AltAxis("time", "hours", [(0, 0.0), (50, 1.0), (100, 4.0)])
    html = line_chart("Loss", [Series("training", [(0, 4.0), (100, 3.0)])], x_name="step", y_name="nats", axes=[axis])
    assert axis.x_of(2.5) == 75
    ticks = html.partition('<g class="axis alt x-time">')[2].partition("</g>")[0]
    assert re.findall(r">(\d)<", ticks) == ["0", "1", "2", "3", "4"]
    assert re.findall(r'class="name[^>]*>([^<]+)', html) == ["step", "nats", "hours"]


# ---- figures


@pytest.mark.parametrize(("unit", "low", "high"), [
    ("number", 2.9, 11.3), ("number", 0, 6e-4), ("number", -1, 1), ("count", 0, 231_000), ("count", 0, 9),
    ("bytes", 0, 11.46 * GiB), ("bytes", 0, 700), ("bytes", 0, 300 * MiB), ("number", 3.00001, 3.00002)])
def test_ticks_are_evenly_spaced_inside_the_range_with_distinct_labels(unit: str, low: float, high: float) -> None:
    found = tick_labels(unit, low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 <= at <= high * (1 + 1e-9) for at, _ in found)
    assert len({label for _, label in found}) == len(found)
    steps = {round((b - a) / (high - low), 6) for a, b in itertools.pairwise(at for at, _ in found)}
    assert len(steps) == 1


def test_bytes_have_binary_ticks() -> None:
    assert [label for _, label in tick_labels("bytes", 0, 11 * GiB)] == [
        "0", "5 GiB", "10 GiB"]
    assert tick_labels("bytes", 0, 3 * GiB)[1][0] == GiB


@pytest.mark.parametrize(("unit", "value", "expected"), [
    ("number", 2.34567, "2.3457"), ("number", 6e-4, "6e-4"), ("number", 61.0, "61.00"), ("number", 1.25e8, "1.25e8"),
    ("number", math.nan, "NaN"), ("count", 98304.4, "98,304"), ("bytes", 3 * GiB, "3.00 GiB"), ("number", 0, "0")])
def test_format_value(unit: str, value: float, expected: str) -> None:
    assert format_value(unit, value) == expected


def test_step_path_writes_each_height_once() -> None:
    scale = Scale(0, 4, 0, 10)
    assert step_path([scale.position(x, y) for x, y in enumerate((5, 5, 5, 10, 10))]) == (
        f"M0,{TALL // 2}H{WIDE * 3 // 4}V0H{WIDE}")
    assert line_path([(0, 0), None, (5, 5), (7, 6)]) == "M0,0h0M5,5h0l2,1"


# ---- bytes by owner


def test_a_stacked_chart_lists_owners_with_their_bytes_at_the_peak() -> None:
    html = stacked_chart(STEP, limit=11 * GiB)
    keys = re.findall(r'<li class="([^"]+)"><i></i><span>([^<]+)</span> <b>([^<]+)</b>', html)
    assert keys == [("o-weights", "weights", "1.00 GiB"), ("o-activations", "activations", "2.00 GiB"),
                    ("o-logits", "logits", "3.00 GiB"), ("o-other", "surprise", "1.0 MiB"),
                    ("total", "at the peak", "6.00 GiB")]
    assert "peak 6.00 GiB in backward" in html
    assert "limit 11.00 GiB" in html


def test_a_peak_of_a_moment_is_marked_by_a_band() -> None:
    needle = OwnerTimeline(("weights",), tuple((9 if place % 50 == 0 else 5,) for place in range(1000)), (), 700)
    assert 'class="needle"' in stacked_chart(needle)
    assert 'class="needle"' not in stacked_chart(STEP)


def test_stacked_layers_are_as_high_as_their_bytes() -> None:
    html = stacked_chart(STEP, limit=12 * GiB)
    layers = Outline(html).elements("path", "layer")
    top = chart_data(html)["scale"][3]
    assert top > 12 * GiB
    heights = [min(y for _, y in places((layer["d"] or "").split("V10000H0Z")[0])) for layer in layers]
    bytes_drawn = [(1 - height / TALL) * top / GiB for height in heights]
    assert bytes_drawn == pytest.approx([6 + MiB / GiB, 6, 3, 1], abs=0.01)  # painted from the highest sum down


def test_stacked_chart_data_has_the_value_of_every_point() -> None:
    """Decoded as static/charts.js does: each value holds until the next change."""
    data = chart_data(stacked_chart(STEP))
    assert [one["name"] for one in data["series"]] == list(STEP.owners)
    for place, one in enumerate(data["series"]):
        values, changes = [0] * data["count"], one["changes"]
        for at, value in zip(changes[::2], changes[1::2], strict=True):
            values[at:] = [value] * (data["count"] - at)
        assert values == [point[place] for point in STEP.points]


def test_a_limit_far_above_everything_is_in_the_legend_only() -> None:
    """A line at 141 GB would flatten a run of 5 GiB."""
    line = line_chart("Memory", [Series("reserved", [(0, 5 * GiB), (1, 5 * GiB)])], unit="bytes", from_zero=True,
                      levels=[Level("limit", 139 * GiB)])
    for html in (line, stacked_chart(STEP, limit=139 * GiB)):
        assert chart_data(html)["scale"][3] < 7 * GiB
        assert 'class="level limit"' not in html
        assert "limit</span> <b>139.00 GiB" in html
    bar = owner_bar({"weights": GiB}, limit=139 * GiB)
    assert [part["width"] for part in Outline(bar).elements("rect")] == ["100.000%"]
    assert "limit</span> <b>139.00 GiB" in bar


def test_owners_without_bytes_are_left_out() -> None:
    html = stacked_chart(OwnerTimeline(("weights", "casts"), ((5, 0), (6, 0)), (), 1))
    assert "casts" not in html


@pytest.mark.parametrize("points", [(), ((0,),), ((7,),)])
def test_an_empty_timeline_and_one_with_a_single_event_are_drawn(points: tuple[tuple[int, ...], ...]) -> None:
    Outline(stacked_chart(OwnerTimeline(("weights",), points, (), 0), limit=GiB))


def test_an_owner_bar_has_one_part_per_owner_relative_to_the_limit() -> None:
    html = owner_bar({"weights": GiB, "logits": 3 * GiB}, limit=8 * GiB)
    assert [part["width"] for part in Outline(html).elements("rect")] == ["12.500%", "37.500%"]
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
def test_owner_colours_are_distinct_for_colour_blind_people_too(eye: str) -> None:
    """0.02 in Oklab is about the smallest difference people see side by side; these are far from it."""
    distances = {(a, b): math.dist(seen(OWNER_COLOURS[a], eye), seen(OWNER_COLOURS[b], eye))
                 for a, b in itertools.combinations(OWNERS, 2)}
    assert {pair: distance for pair, distance in distances.items() if distance < 0.09} == {}
    neighbours = [distances[pair] for pair in itertools.pairwise(OWNERS)]
    assert min(neighbours) > 0.12


@pytest.mark.parametrize("ground", ["#ffffff", "#191c21"])
def test_owner_colours_stand_out_from_light_and_dark_pages(ground: str) -> None:
    for name, colour in OWNER_COLOURS.items():
        assert math.dist(seen(colour, "normal"), seen(ground, "normal")) > 0.12, name


# ---- hostile text


@pytest.mark.parametrize("hostile", HOSTILE_TEXTS, ids=ascii)
def test_hostile_text_stays_text(hostile: str) -> None:
    charts = [
        line_chart(hostile, [Series(hostile, [(0, 1.0), (1, 2.0)]), Series("b", [(0, 1.0)])], x_name=hostile,
                   levels=[Level(hostile, 1.0)], marks=[EventMark(0.5, hostile)], note=hostile),
        line_chart(hostile, [], empty=hostile),
        stacked_chart(OwnerTimeline((hostile, "weights"), ((1, 2), (3, 4)), ((0, hostile),), 1), title=hostile, limit=5,
                      limit_name=hostile, note=hostile),
        owner_bar({hostile: 5}),
    ]
    html = html_page(hostile, "".join(charts))
    html.encode("utf-8")
    outline = Outline(html)
    assert {tag for tag, _ in outline.tags} <= {
        "html", "head", "meta", "link", "title", "style", "body", "main", "figure", "figcaption", "ul", "li", "i",
        "span", "b", "div", "svg", "g", "line", "text", "path", "circle", "rect", "p", "script"}
    assert [attributes for _, attributes in outline.tags if any(name.startswith("on") for name in attributes)] == []
    assert len(outline.elements("script")) == 3  # the figures of two charts, and ours
    assert "\x00" not in html
    for chart in charts[:1]:
        chart_data(chart)


def test_script_json_cannot_close_its_script_element() -> None:
    assert "<" not in script_json({"name": "</script><!--<script>"})
    assert json.loads(script_json({"name": "</script>"})) == {"name": "</script>"}


def test_text_is_escaped_once() -> None:
    assert escaped('<a href="x">&') == "&lt;a href=&quot;x&quot;&gt;&amp;"


def test_a_page_loads_nothing_and_allows_only_our_script() -> None:
    html = html_page("Title", "<p>body</p>")
    outside = re.findall(r"https?://[^\s\"'<)]+", html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}  # a name, not an address to load
    (policy,) = [tag["content"] for tag in Outline(html).elements("meta") if "http-equiv" in tag]
    assert re.fullmatch(r"default-src 'none'; img-src data:; style-src 'sha256-[\w+/=]+'; "
                        r"script-src 'sha256-[\w+/=]+'", policy or "")


def test_long_flags_may_wrap_where_words_join_but_not_after_leading_dashes() -> None:
    assert breakable("--saved_activations=1*no_mlp_up,2*all x-y a_b") == (
        "--saved_<wbr>activations=<wbr>1*no_<wbr>mlp_<wbr>up,<wbr>2*all x-<wbr>y a_<wbr>b")
    assert breakable("<a=b>") == "&lt;a=<wbr>b&gt;"
    assert breakable("517,248 of 1,234,567") == "517,248 of 1,234,567"
