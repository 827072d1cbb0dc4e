"""What `fitgpt fit` says: the chosen plan beside the one asked for, why, the runners-up, and speed against memory."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ..core.units import GiB, MiB, show_bytes, show_count, with_article
from ..nouns import Decision, Fitted, SpeedEstimate, Standing, WayOut
from .planning import SHORTEST, signed, table

ROWS, MARGIN = 9, 8          # of the picture, and the columns of its figures
PICTURE = 64                 # columns of it, at most
OFF_THE_SCALE = 1.2
LONG_FLAG = 36               # columns that flags beside figures need; with fewer they go below
BEYOND = 1.15                # how far it goes beyond what may be reserved
CHOSEN, ASKED, LINE, LIMIT = "●", "○", "·", "│"
COLOURS = {"asked": 1, "chosen": 2}
PERMISSIONS = {"free": "nothing that is trained changes", "places": "part of it in the host's memory",
               "lossy": "lossy savers", "rules": "trained by another rule"}
ALIKE = 1  # percent of speed that an estimate cannot tell


def fit_text(fitted: Fitted, run: str, *, width: int = 80, notes: Sequence[str] = (), todo: str = "") -> str:
    """`run`: what was asked for, in words; `todo`: what to type next."""
    chosen, budget = fitted.chosen, fitted.budget
    where = f" on {with_article(budget.card)}" if budget.card else ""
    parts = [_wrapped(f"{run}{where}: {verdict(fitted)}", width)]
    if chosen is not None:
        parts.append(beside_each_other(fitted, width))
        if fitted.decisions:
            parts.append("Why\n" + "\n".join(_decision_lines(fitted.decisions, width)))
    elif fitted.least is not None:
        parts.append(_wrapped(f"The least: {_flags(fitted.least) or 'as asked'}", width))
        if fitted.ways_out:
            parts.append("\n".join(["What would fit, and the least that it needs then",
                                    *_way_out_lines(fitted.ways_out, width)]))
    if fitted.runners_up:
        parts.append("\n".join(["Runners-up", *_runner_lines(fitted.runners_up, width),
                                *_wrapped(_why_not_the_first(fitted), width).splitlines()]))
    if len(fitted.frontier) > 1:
        parts.append(picture(fitted, min(width - MARGIN - 2, PICTURE)))
    told = _last_lines(fitted, notes)
    parts.append("\n".join(line for label, words in told for line in _labelled(label, words, width)))
    if todo:
        parts.append(todo)
    return "\n\n".join(parts) + "\n"


def verdict(fitted: Fitted) -> str:
    chosen, limit = fitted.chosen, show_bytes(fitted.budget.reserve_limit)
    if chosen is None:
        least = fitted.least
        took = f" ({PERMISSIONS.get(least.permission, least.permission)})" if least else ""
        needs = f": the least memory it can live in is {show_bytes(least.needs)}{took}" if least else ""
        if fitted.budget.budget <= 0:
            return f"nothing fits{needs}, and nothing of the card is left."
        if fitted.budget.reserve_limit <= 0:
            held = show_bytes(fitted.budget.outside)
            return f"nothing fits{needs}, and what CUDA itself holds, {held}, leaves nothing."
        return f"nothing fits{needs}, and {limit} may be reserved."
    if not chosen.flags:
        enough = "enough" if any(_gain(chosen, each) > ALIKE for each in fitted.runners_up) else f"{ALIKE} %"
        return (f"fits as asked, and nothing found is {enough} faster: leave it as it is." if fitted.asked.fits else
                "as asked.")
    if fitted.least is chosen:
        return f"the least memory it can live in is {show_bytes(chosen.needs)}."
    if chosen.permission in ("model", "context"):
        what = {"model": "model", "context": "block"}[chosen.permission]
        wanted = any(note.startswith("The largest") for note in fitted.notes)
        return (f"the largest {what} that trains there." if wanted else
                f"does not fit as asked; with a smaller {what} it does.")
    was = f"fits as asked; these changes make it {_faster(fitted)}faster" if fitted.asked.fits else (
        "does not fit as asked; with these changes it does")
    return f"{was} ({PERMISSIONS[chosen.permission]})."


def _faster(fitted: Fitted) -> str:
    """'2.9 % ', by the clock where both were timed, else by estimate."""
    chosen, timed = fitted.chosen, _asked_as_timed(fitted)
    if chosen is None:
        return ""
    gain = 100 * (chosen.measured / timed - 1) if timed and chosen.measured else _gain(fitted.asked, chosen)
    return f"{gain:.1f} % " if gain > 0 else ""


def _asked_as_timed(fitted: Fitted) -> float | None:
    return next((each.measured for each in fitted.runners_up if each.config == fitted.asked.config), None)


def _gain(before: Standing, now: Standing) -> float:
    """Percent of speed, by estimate; 0 where that is not known."""
    return 100 * (now.speed.likely / before.speed.likely - 1) if before.speed and now.speed else 0.0


def beside_each_other(fitted: Fitted, width: int) -> str:
    """What was asked for and what was chosen, in columns."""
    asked, chosen = fitted.asked, fitted.chosen
    assert chosen is not None  # only called where something was
    rows = [(knob, str(was), str(now)) for each in fitted.decisions for knob, (was, now) in each.knobs.items()]
    rows += [("needs", show_bytes(asked.needs), show_bytes(chosen.needs)),
             ("headroom", signed(asked.headroom), signed(chosen.headroom)),
             ("tokens/s", _speed(asked.speed), _speed(chosen.speed))]
    if chosen.measured is not None:
        before = _asked_as_timed(fitted)
        rows.append(("measured", f"{before:,.0f}" if before else "", f"{chosen.measured:,.0f}"))
    first, second = (max(len(row[column]) for row in [("", "asked", ""), *rows]) for column in (0, 1))
    if first + second + 4 + SHORTEST > width:
        return "\n".join(line for name, was, now in rows for line in [
            name, *textwrap.wrap(f"{was} → {now}", width, initial_indent="  ", subsequent_indent="    ")])
    lines = [f"{'':{first}}  {'asked':>{second}}  chosen"]
    for name, was, now in rows:
        start = f"{name:{first}}  {was:>{second}}  "
        lines += textwrap.wrap(now.replace(",", ", ") if "*" in now else now, width, initial_indent=start,
                               subsequent_indent=" " * len(start)) or [start.rstrip()]
    return "\n".join(lines)


def _decision_lines(decisions: Sequence[Decision], width: int) -> list[str]:
    lines = []
    for each in decisions:
        what = ", ".join(f"{knob} {was} → {now}" for knob, (was, now) in each.knobs.items())
        lines += textwrap.wrap(what, width, initial_indent="  ", subsequent_indent="    ")
        lines += _wrap(f"{each.why}.", width, initial_indent="      ", subsequent_indent="      ")
    return lines


def _runner_lines(standings: Sequence[Standing], width: int) -> list[str]:
    rows = [("", "needs", "tokens/s")]
    rows += [(f"{number}", _needs(each),
              f"{each.measured:,.0f} measured" if each.measured else _speed(each.speed))
             for number, each in enumerate(standings, 1)]
    head, *lines = table(rows, left=(0,)).splitlines()
    found = [f"  {head}"]
    for line, each in zip(lines, standings, strict=True):
        beside = len(line) + LONG_FLAG <= width
        found += [] if beside else [f"  {line}"]
        found += textwrap.wrap(_flags(each) or "as asked", width, break_long_words=False, break_on_hyphens=False,
                               initial_indent=f"  {line}  " if beside else " " * 6,
                               subsequent_indent=" " * (len(line) + 4 if beside else 6))
    return found


def _why_not_the_first(fitted: Fitted) -> str:
    """Said where one of them is the faster, if only by an estimate."""
    chosen = fitted.chosen
    if chosen is None or chosen.measured or not any(0 < _gain(chosen, each) <= ALIKE for each in fitted.runners_up):
        return ""
    return (f"An estimate cannot tell what lies within {ALIKE} %: of such plans one with few changes and much headroom "
            "is taken.")


def _way_out_lines(ways_out: Sequence[WayOut], width: int) -> list[str]:
    """The flag, the least that the run can live in with it, and what it means."""
    rows = [(" ".join(way.flags), show_bytes(way.least)) for way in ways_out]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    found = []
    for (flag, least), way in zip(rows, ways_out, strict=True):
        start = f"  {flag:{first}}  {least:>{second}}  "
        found += textwrap.wrap(way.words, max(width, len(start) + 20), initial_indent=start,
                               subsequent_indent=" " * len(start))
    return found


def _last_lines(fitted: Fitted, notes: Sequence[str]) -> list[tuple[str, str]]:
    speed, rows = (fitted.chosen or fitted.asked).speed, []
    if fitted.chosen is not None:
        rows.append(("speed", speed.basis + "." if speed else "the card's figures are not known, so candidates were "
                     "ranked by the proportions of another."))
    if fitted.budget.margin:
        rows.append(("margin", f"{show_bytes(fitted.budget.margin)} of the card are left free, besides the headroom: "
                     "what a process holds outside PyTorch's allocator is known by a rule here, not to the MiB. "
                     f"--budget={fitted.budget.budget // MiB}MiB takes them too."))
    rows += [("looked", f"{fitted.considered:,} candidates by closed forms, {fitted.replayed:,} by replay.")]
    return rows + [("note", note) for note in (*fitted.notes, *notes)]


# ---- speed against memory


def picture(fitted: Fitted, columns: int) -> str:
    """The fastest that there is in so much memory, in characters."""
    limit = fitted.budget.reserve_limit
    width = BEYOND * limit  # of memory
    points = [(needs, speed) for needs, speed in fitted.frontier if needs <= width]
    speeds = [_fastest_within(points, width * (column + 1) / columns) for column in range(columns)]
    drawn = [speed for speed in speeds if speed is not None]
    low, top = min(drawn, default=0.0), max(drawn, default=1.0)
    grid = [[" "] * columns for _ in range(ROWS)]
    for row in grid:
        row[int(limit / width * columns)] = LIMIT
    for column, speed in enumerate(speeds):
        if speed is not None:
            grid[_row(speed, low, top)][column] = LINE
    for mark, standing in ((ASKED, fitted.asked), (CHOSEN, fitted.chosen)):
        if standing is not None and standing.needs < width:
            column = int(standing.needs / width * columns)
            speed = _middle(standing, speeds[column] or low)
            if speed <= OFF_THE_SCALE * top:  # a model of another size has another scale
                grid[_row(speed, low, top)][column] = mark
    figures = {0: show_count(round(top)), ROWS - 1: show_count(round(low))}
    lines = [f"{figures.get(row, ''):>{MARGIN - 1}} ┤{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    axis = f"{'':{MARGIN}}└{'─' * columns}"
    scale = f"{'':{MARGIN + 1}}0".ljust(MARGIN + columns - 8) + show_bytes(int(width))
    marks = [key for key in (f"{ASKED} asked", f"{CHOSEN} chosen") if any(key[0] in row for row in grid)]
    keys = "  ".join([f"{LINE} the fastest in so much memory, tokens/s", *marks, f"{LIMIT} may be reserved"])
    return "\n".join([*lines, axis, scale, _wrapped(keys, max(columns + MARGIN + 2, 40))])


def _row(speed: float, low: float, top: float) -> int:
    share = (top - speed) / (top - low) if top > low else 0.0
    return min(max(round((ROWS - 1) * share), 0), ROWS - 1)


def _fastest_within(points: Sequence[tuple[int, float]], nbytes: float) -> float | None:
    return max((speed for needs, speed in points if needs <= nbytes), default=None)


def _middle(standing: Standing, otherwise: float) -> float:
    if standing.measured:
        return standing.measured
    return standing.speed.likely if standing.speed else otherwise


def page(fitted: Fitted, run: str, notes: Sequence[str] = ()) -> str:
    """The same in a file of its own."""
    from . import charts

    chosen, limit = fitted.chosen, fitted.budget.reserve_limit
    title = f"{run} on {fitted.budget.card or 'a card'}"
    frontier = [(needs, speed) for needs, speed in fitted.frontier if needs <= BEYOND * limit]
    top = OFF_THE_SCALE * max((speed for _, speed in frontier), default=float("inf"))
    standings = [(name, each) for name, each in (("asked", fitted.asked), ("chosen", chosen))
                 if each is not None and _middle(each, 0.0) <= top]
    most = max([needs for needs, _ in frontier] + [each.needs for _, each in standings])
    size, unit = (GiB, "GiB") if most >= 2 * GiB else (MiB, "MiB")
    series = [charts.Series("the fastest in so much memory", [(needs / size, speed) for needs, speed in frontier],
                            style="dotted"),
              *(charts.Series(name, [(each.needs / size, _middle(each, 0.0))], colour=COLOURS[name], style="dotted")
                for name, each in standings)]
    where = "the line" if most >= limit else "beyond the edge"
    chart = charts.line_chart(f"Tokens a second against memory, {unit}", series, unit="count", x_name=unit,
                              marks=[charts.Mark(limit / size, f"may be reserved: {show_bytes(limit)}")],
                              from_zero=True, wide=True, empty="Nothing fits.",
                              note=f"By closed forms and a roofline. {show_bytes(limit)} may be reserved: {where}.")
    rows = "".join(_decision_rows(each) for each in fitted.decisions)
    figures = "".join(f'<tr><th scope="row">{name}</th><td>{before}</td><td>{after}</td></tr>'
                      for name, before, after in _figures(fitted))
    head = "<tr><th></th><th>asked</th><th>chosen</th></tr>"
    others = "".join(f'<tr class="with-next"><th scope="row">{number}</th><td>{_needs(each)}</td>'
                     f'<td>{_speed(each.speed)}</td></tr><tr><td></td><td colspan="2">{_flags_in_html(each)}</td></tr>'
                     for number, each in enumerate(fitted.runners_up, 1))
    beside = (f'\n<h2>Runners-up</h2>\n<div class="card"><table class="whole"><tr><th></th><th>needs</th>'
              f"<th>tokens/s</th></tr>{others}</table></div>" if others else "")
    last = "".join(f'<tr><th scope="row">{label}</th><td>{charts.text(words)}</td></tr>'
                   for label, words in _last_lines(fitted, notes))
    said = verdict(fitted)
    return charts.page(title, f"<h1>{charts.breakable(title)}</h1>\n<p>{charts.text(said[0].upper() + said[1:])}</p>"
                       f'\n{chart}\n<h2>What was chosen</h2>\n<div class="card"><table class="whole">'
                       f'{head}{figures}{rows}</table></div>{beside}'
                       f'\n<h2>Notes</h2>\n<div class="card"><table class="whole">{last}</table></div>')


def _decision_rows(each: Decision) -> str:
    """A row for each knob, and one with the reason below them, as wide as the table."""
    from . import charts

    rows = "".join(f'<tr class="with-next"><th scope="row">{charts.breakable(knob)}</th>'
                   f"<td>{charts.breakable(str(was))}</td><td>{charts.breakable(str(now))}</td></tr>"
                   for knob, (was, now) in each.knobs.items())
    return f'{rows}<tr><td colspan="3" class="kept">{charts.breakable(each.why)}</td></tr>'


def _flags_in_html(standing: Standing) -> str:
    from . import charts

    return " ".join(f'<span class="flag">{charts.breakable(flag)}</span>' for flag in standing.flags) or "as asked"


def _figures(fitted: Fitted) -> list[tuple[str, str, str]]:
    asked, chosen = fitted.asked, fitted.chosen
    return [("needs", show_bytes(asked.needs), show_bytes(chosen.needs) if chosen else ""),
            ("headroom", signed(asked.headroom), signed(chosen.headroom) if chosen else ""),
            ("tokens/s", _speed(asked.speed), _speed(chosen.speed) if chosen else "")]


# ---- as JSON


def document(fitted: Fitted, goal: str) -> dict[str, Any]:
    budget = fitted.budget
    return {"schema": 1, "goal": goal, "fits": fitted.chosen is not None, "card": budget.card or None,
            "reserve_limit_bytes": budget.reserve_limit, "outside_bytes": budget.outside,
            "margin_bytes": budget.margin, "asked": _standing(fitted.asked),
            "chosen": fitted.chosen and _standing(fitted.chosen), "least": fitted.least and _standing(fitted.least),
            "decisions": [{"changes": {knob: {"was": was, "now": now} for knob, (was, now) in each.knobs.items()},
                           "why": each.why} for each in fitted.decisions],
            "runners_up": [_standing(each) for each in fitted.runners_up],
            "frontier": [{"bytes": needs, "tokens_per_s": round(speed, 1)} for needs, speed in fitted.frontier],
            "ways_out": [{"flags": list(each.flags), "least_bytes": each.least, "why": each.words}
                         for each in fitted.ways_out],
            "considered": fitted.considered, "replayed": fitted.replayed, "notes": list(fitted.notes)}


def _standing(standing: Standing) -> dict[str, Any]:
    return {"config": standing.config.to_dict(), "flags": list(standing.flags), "permission": standing.permission,
            "needs_bytes": standing.needs, "needs_exact": standing.exact, "headroom_bytes": standing.headroom,
            "fits": standing.fits, "tokens_per_s": speed_document(standing)}


def speed_document(standing: Standing) -> dict[str, Any] | None:
    speed = standing.speed
    if speed is None and standing.measured is None:
        return None
    return {"low": speed and round(speed.low, 1), "high": speed and round(speed.high, 1),
            "likely": speed and round(speed.likely, 1), "basis": speed and speed.basis, "measured": standing.measured}


# ---- words


def _speed(speed: SpeedEstimate | None) -> str:
    if speed is None:
        return "not known"
    low, high = show_count(round(speed.low)), show_count(round(speed.high))
    return low if low == high else f"{low} to {high}"


def _needs(standing: Standing) -> str:
    return f"{'' if standing.exact else '≤ '}{show_bytes(standing.needs)}"


def _flags(standing: Standing) -> str:
    return " ".join(standing.flags)


def _labelled(label: str, words: str, width: int) -> list[str]:
    return _wrap(words, width, initial_indent=label.ljust(8), subsequent_indent=" " * 8)


def _wrapped(words: str, width: int) -> str:
    return "\n".join(_wrap(words, width, break_on_hyphens=False))


def _wrap(words: str, width: int, **told: Any) -> list[str]:
    """A figure stays with its percent sign."""
    lines = textwrap.wrap(words.replace(" %", "\xa0%"), width, break_long_words=False, **told)
    return [line.replace("\xa0", " ") for line in lines]
