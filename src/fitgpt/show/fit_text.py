"""The result of `fitgpt fit` as text, page and JSON: the chosen settings, why, runners-up, speed against memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.units import GiB, MiB, show_bytes, show_count, with_article
from ..planning.speed import MEASURED_ERROR, SpeedEstimate
from ..planning.verdict import Verdict
from . import charts
from .plan_text import signed_bytes
from .terminal import MIN_TEXT_WIDTH, labelled_rows, paragraph, table, wrap

if TYPE_CHECKING:  # a result imports this module to print itself
    from ..planning.fit_goals import FitResult
    from ..planning.fit_search import ScoredConfig

MIN_FLAGS_WIDTH = 36         # columns that flags need beside figures; with fewer they go below
PLOT_ROWS, PLOT_COLUMNS = 9, 64
PLOT_MARGIN = 8              # columns of the figures beside the plot
MAX_MEMORY = 1.15            # of the plot's memory axis, times the limit
MAX_SPEED = 1.2              # times the fastest on the curve; a model of another size may be far above it
GIVEN, CHOSEN, CURVE, LIMIT = "○", "●", "·", "│"
COLOURS = {"given": 1, "chosen": 2}
CURVE_NAME = "fastest run within this memory"
PERMISSIONS = {"free": "same training result", "places": "part of the state in CPU RAM", "lossy": "lossy memory savers",
               "rules": "another training rule"}


def fit_text(fitted: FitResult, run: str, *, width: int = 80, todo: str = "") -> str:
    """`run`: a description of the run as given; `todo`: what to type next."""
    chosen, budget = fitted.chosen, fitted.budget
    where = f" on {with_article(budget.card)}" if budget.card else ""
    parts = [paragraph(f"{run}{where}: {verdict(fitted)}", width)]
    if chosen is not None:
        parts += [paragraph(f"Tight: {each}", width) for each in chosen.tight]
        parts.append(_comparison(fitted, width))
        if fitted.step_up is not None:
            parts.append(paragraph(step_up_text(fitted), width))
        lines = ["Why"]
        for decision in fitted.decisions:
            changes = ", ".join(f"{option} {was} → {now}" for option, (was, now) in decision.changes.items())
            lines += [*wrap(changes, width, "  ", 4), *wrap(f"{decision.why}.", width, " " * 6)]
        if fitted.decisions:
            parts.append("\n".join(lines))
    elif fitted.least is not None:
        parts.append(paragraph(f"The minimum: {_flags(fitted.least)}", width))
        if fitted.suggestions:
            figures = table([(" ".join(each.flags), show_bytes(each.least)) for each in fitted.suggestions])
            lines = ["What would fit, and its minimum memory"]
            for line, suggestion in zip(figures.splitlines(), fitted.suggestions, strict=True):
                lines += wrap(suggestion.text, width, f"  {line}  ")
            parts.append("\n".join(lines))
    if fitted.runners_up:
        parts.append("\n".join(["Runners-up", *_runner_up_lines(fitted.runners_up, width)]))
    if len(fitted.frontier) > 1 and budget.reserve_limit > 0:
        parts.append(_plot(fitted, min(width - PLOT_MARGIN - 2, PLOT_COLUMNS)))
    parts.append(labelled_rows(_note_rows(fitted), width))
    if todo:
        parts.append(todo)
    return "\n\n".join(parts) + "\n"


def verdict(fitted: FitResult) -> str:
    chosen, least, budget = fitted.chosen, fitted.least, fitted.budget
    if chosen is None:
        minimum = ""
        if least is not None:
            permission = PERMISSIONS.get(least.permission, least.permission)
            minimum = f": the minimum memory is {show_bytes(least.needs)} ({permission})"
        if budget.budget <= 0:
            return f"nothing fits{minimum}, and no memory of the GPU is left."
        if budget.reserve_limit <= 0:
            return f"nothing fits{minimum}, and CUDA itself takes {show_bytes(budget.outside)}, which leaves nothing."
        return f"nothing fits{minimum}, and {show_bytes(budget.reserve_limit)} may be reserved."
    if not chosen.flags:
        if fitted.given.headroom < 0:
            return "as given."
        reason = "nothing is faster"
        if chosen.measured:
            reason = f"nothing was measured to be more than {100 * MEASURED_ERROR:.0f} % faster"
        elif fitted.step_up:
            reason = f"nothing is faster by more than the estimate's error ({_error(fitted)})"
        return f"fits as given, and {reason}: leave it as it is."
    if least is chosen:
        return f"the minimum memory is {show_bytes(chosen.needs)}."
    if chosen.permission in ("model", "context"):
        what = {"model": "model", "context": "block"}[chosen.permission]
        wanted = any(note.startswith("The largest") for note in fitted.notes)
        return (f"the largest {what} that trains there." if wanted else
                f"does not fit as given; with a smaller {what} it does.")
    effect = "does not fit as given; with these changes it does"
    if fitted.given.verdict is Verdict.TIGHT and chosen.verdict is Verdict.FITS:
        effect = "tight as given; with these changes it fits"
    elif fitted.given.headroom >= 0:
        before = _measured_as_given(fitted)  # measured where both were timed, else estimated
        gain = 100 * (chosen.measured / before - 1) if before and chosen.measured else _gain(fitted.given, chosen)
        effect = f"fits as given; these changes make it {f'{gain:.1f} % ' if gain > 0 else ''}faster"
    return f"{effect} ({PERMISSIONS[chosen.permission]})."


def step_up_text(fitted: FitResult) -> str:
    """The next step up from the chosen settings, and why it was not taken; empty where there is none."""
    chosen, more = fitted.chosen, fitted.step_up
    if chosen is None or more is None:
        return ""
    faster = f"about {_gain(chosen, more):.0f} % faster ({_speed(chosen.speed)} → {_speed(more.speed)} tokens/s)"
    difference = show_bytes(abs(more.needs - chosen.needs))
    price = f"for {difference} more" if more.needs > chosen.needs else f"with {difference} less"
    return (f"Next step up, not taken: {faster if more.speed else 'faster'}, {price}: {_flags(more)} "
            f"({PERMISSIONS.get(more.permission, more.permission)}). A gain within the estimate's error, "
            f"{_error(fitted)}, changes nothing; to time it on the GPU: fitgpt fit --measure.")


def _error(fitted: FitResult) -> str:
    return f"±{100 * fitted.error:.0f} %"


def _measured_as_given(fitted: FitResult) -> float | None:
    return next((each.measured for each in fitted.runners_up if each.config == fitted.given.config), None)


def _gain(before: ScoredConfig, after: ScoredConfig) -> float:
    """Estimated percent of speed gained; 0 where that is not known."""
    return 100 * (after.speed.likely / before.speed.likely - 1) if before.speed and after.speed else 0.0


def _figure_rows(fitted: FitResult) -> list[tuple[str, str, str]]:
    """(name, as given, as chosen)."""
    given, chosen = fitted.given, fitted.chosen
    rows = [("needs", show_bytes(given.needs), show_bytes(chosen.needs) if chosen else ""),
            ("headroom", signed_bytes(given.headroom), signed_bytes(chosen.headroom) if chosen else ""),
            ("tokens/s", _speed(given.speed), _speed(chosen.speed) if chosen else "")]
    if chosen is not None and chosen.measured is not None:
        before = _measured_as_given(fitted)
        rows.append(("measured", f"{before:,.0f}" if before else "", f"{chosen.measured:,.0f}"))
    return rows


def _comparison(fitted: FitResult, width: int) -> str:
    """The run as given beside the chosen one, in columns, or below each other where there is no room."""
    rows = [(option, str(was), str(now)) for each in fitted.decisions for option, (was, now) in each.changes.items()]
    rows += _figure_rows(fitted)
    first, second = (max(len(row[column]) for row in [("", "given", ""), *rows]) for column in (0, 1))
    if first + second + 4 + MIN_TEXT_WIDTH > width:
        return "\n".join(line for name, was, now in rows for line in [name, *wrap(f"{was} → {now}", width, "  ", 4)])
    lines = [f"{'':{first}}  {'given':>{second}}  chosen"]
    for name, was, now in rows:
        start = f"{name:{first}}  {was:>{second}}  "
        lines += wrap(now.replace(",", ", ") if "*" in now else now, width, start) or [start.rstrip()]
    return "\n".join(lines)


def _runner_up_lines(scored_configs: Sequence[ScoredConfig], width: int) -> list[str]:
    rows = [("", "needs", "tokens/s")]
    rows += [(f"{number}", _needs(each), f"{each.measured:,.0f} measured" if each.measured else _speed(each.speed))
             for number, each in enumerate(scored_configs, 1)]
    head, *figures = table(rows).splitlines()
    lines = [f"  {head}"]
    for line, each in zip(figures, scored_configs, strict=True):
        if len(line) + MIN_FLAGS_WIDTH <= width:
            lines += wrap(_flags(each), width, f"  {line}  ")
        else:
            lines += [f"  {line}", *wrap(_flags(each), width, " " * 6)]
    return lines


def _note_rows(fitted: FitResult) -> list[tuple[str, str]]:
    """(label, text)."""
    speed, rows = (fitted.chosen or fitted.given).speed, []
    if fitted.chosen is not None:
        rows.append(("speed", f"{speed.basis}." if speed else "this GPU's figures are not known, so candidates were "
                     "ranked by the proportions of another GPU."))
    if fitted.budget.margin:
        rows.append(("margin", f"{show_bytes(fitted.budget.margin)} of the GPU are left free, besides the headroom: "
                     "what a process holds outside PyTorch's allocator is estimated here, not measured. "
                     f"--budget={fitted.budget.budget // MiB}MiB uses them too."))
    rows.append(("searched", f"{fitted.considered:,} candidates by closed forms, {fitted.replayed:,} by replay."))
    return rows + [("note", note) for note in fitted.notes]


# ---- speed against memory


def _plot(fitted: FitResult, columns: int) -> str:
    """Speed against memory, in characters."""
    limit = fitted.budget.reserve_limit
    width = MAX_MEMORY * limit
    speeds = [max((speed for needs, speed in fitted.frontier if needs <= width * (column + 1) / columns), default=None)
              for column in range(columns)]
    drawn = [speed for speed in speeds if speed is not None]
    low, top = min(drawn, default=0.0), max(drawn, default=1.0)

    def row(speed: float) -> int:
        share = (top - speed) / (top - low) if top > low else 0.0
        return min(max(round((PLOT_ROWS - 1) * share), 0), PLOT_ROWS - 1)

    grid = [[" "] * columns for _ in range(PLOT_ROWS)]
    for cells in grid:
        cells[int(limit / width * columns)] = LIMIT
    for column, speed in enumerate(speeds):
        if speed is not None:
            grid[row(speed)][column] = CURVE
    for mark, scored in ((GIVEN, fitted.given), (CHOSEN, fitted.chosen)):
        if scored is not None and scored.needs < width:
            column = int(scored.needs / width * columns)
            speed = _likely_speed(scored, speeds[column] or low)
            if speed <= MAX_SPEED * top:
                grid[row(speed)][column] = mark

    figures = {0: show_count(round(top)), PLOT_ROWS - 1: show_count(round(low))}
    lines = [f"{figures.get(number, ''):>{PLOT_MARGIN - 1}} ┤{''.join(cells)}".rstrip()
             for number, cells in enumerate(grid)]
    axis = f"{'':{PLOT_MARGIN}}└{'─' * columns}"
    scale = f"{'':{PLOT_MARGIN + 1}}0".ljust(PLOT_MARGIN + columns - 8) + show_bytes(int(width))
    marks = [key for key in (f"{GIVEN}\xa0given", f"{CHOSEN}\xa0chosen") if any(key[0] in cells for cells in grid)]
    keys = "  ".join([f"{CURVE} {CURVE_NAME}, tokens/s", *marks, f"{LIMIT}\xa0may be reserved"])
    return "\n".join([*lines, axis, scale, *wrap(keys, columns + PLOT_MARGIN + 2)])


def _likely_speed(scored: ScoredConfig, default: float) -> float:
    return scored.measured or (scored.speed.likely if scored.speed else default)


# ---- the page of --html


def fit_page(fitted: FitResult, run: str) -> str:
    """The same as `fit_text`, as a page in one file."""
    title, summary = f"{run} on {fitted.budget.card or 'a GPU'}", verdict(fitted)
    chosen = "".join(f'<tr><th scope="row">{name}</th><td>{before}</td><td>{after}</td></tr>'
                     for name, before, after in _figure_rows(fitted))
    for decision in fitted.decisions:  # a row per option, and one with the reason below them, as wide as the table
        chosen += "".join(f'<tr class="with-next"><th scope="row">{charts.breakable(option)}</th>'
                          f"<td>{charts.breakable(str(was))}</td><td>{charts.breakable(str(now))}</td></tr>"
                          for option, (was, now) in decision.changes.items())
        chosen += f'<tr><td colspan="3" class="reason">{charts.breakable(decision.why)}</td></tr>'
    runners_up = ""
    for number, each in enumerate(fitted.runners_up, 1):
        flags = " ".join(f'<span class="flag">{charts.breakable(flag)}</span>' for flag in each.flags) or "as given"
        runners_up += (f'<tr class="with-next"><th scope="row">{number}</th><td>{_needs(each)}</td>'
                       f'<td>{_speed(each.speed)}</td></tr><tr><td></td><td colspan="2">{flags}</td></tr>')
    notes = "".join(f'<tr><th scope="row">{label}</th><td>{charts.escaped(text)}</td></tr>'
                    for label, text in _note_rows(fitted))
    tables = [("What was chosen", "<tr><th></th><th>given</th><th>chosen</th></tr>" + chosen),
              ("Runners-up", "<tr><th></th><th>needs</th><th>tokens/s</th></tr>" + runners_up if runners_up else ""),
              ("Notes", notes)]
    return charts.html_page(title, "\n".join([
        f"<h1>{charts.breakable(title)}</h1>", f"<p>{charts.escaped(summary[0].upper() + summary[1:])}</p>",
        *([f"<p>{charts.breakable(step_up_text(fitted))}</p>"] if fitted.step_up else []),
        _speed_chart(fitted),
        *(f'<h2>{heading}</h2>\n<div class="card"><table class="whole">{rows}</table></div>'
          for heading, rows in tables if rows)]))


def _speed_chart(fitted: FitResult) -> str:
    """Speed against memory, with the given and the chosen settings."""
    limit = fitted.budget.reserve_limit
    frontier = [(needs, speed) for needs, speed in fitted.frontier if needs <= MAX_MEMORY * limit]
    top = MAX_SPEED * max((speed for _, speed in frontier), default=float("inf"))
    scored_configs = [(name, each) for name, each in (("given", fitted.given), ("chosen", fitted.chosen))
                 if each is not None and _likely_speed(each, 0.0) <= top]
    largest = max([needs for needs, _ in frontier] + [each.needs for _, each in scored_configs])
    size, unit = (GiB, "GiB") if largest >= 2 * GiB else (MiB, "MiB")
    series = [charts.Series(CURVE_NAME, [(needs / size, speed) for needs, speed in frontier], style="dotted")]
    series += [charts.Series(name, [(each.needs / size, _likely_speed(each, 0.0))], COLOURS[name], "dotted")
               for name, each in scored_configs]
    where = "the dotted line" if largest >= limit else "beyond the edge"
    return charts.line_chart(
        f"Tokens per second against memory, {unit}", series, unit="count", x_name=unit, from_zero=True, wide=True,
        marks=[charts.EventMark(limit / size, f"may be reserved: {show_bytes(limit)}")], empty="Nothing fits.",
        note=f"By closed forms and a roofline. {show_bytes(limit)} may be reserved: {where}.")


# ---- JSON


def fit_json(fitted: FitResult, goal: str) -> dict[str, Any]:
    budget = fitted.budget
    return {"schema": 2, "goal": goal, "verdict": fitted.verdict, "fits": fitted.verdict is Verdict.FITS,
            "gpu": budget.card or None, "reserve_limit_bytes": budget.reserve_limit, "outside_bytes": budget.outside,
            "margin_bytes": budget.margin, "asked": _scored_json(fitted.given),
            "chosen": fitted.chosen and _scored_json(fitted.chosen),
            "least": fitted.least and _scored_json(fitted.least),
            "decisions": [{"changes": {option: {"was": was, "now": now} for option, (was, now) in each.changes.items()},
                           "why": each.why} for each in fitted.decisions],
            "runners_up": [_scored_json(each) for each in fitted.runners_up],
            "step_up": fitted.step_up and _scored_json(fitted.step_up), "speed_error": round(fitted.error, 4),
            "frontier": [{"bytes": needs, "tokens_per_s": round(speed, 1)} for needs, speed in fitted.frontier],
            "ways_out": [{"flags": list(each.flags), "least_bytes": each.least, "why": each.text}
                         for each in fitted.suggestions],
            "considered": fitted.considered, "replayed": fitted.replayed, "notes": list(fitted.notes)}


def _scored_json(scored: ScoredConfig) -> dict[str, Any]:
    return {"config": scored.config.to_dict(), "flags": list(scored.flags), "permission": scored.permission,
            "needs_bytes": scored.needs, "headroom_bytes": scored.headroom, "verdict": scored.verdict,
            "fits": scored.fits, "tight": list(scored.tight), "tokens_per_s": speed_json(scored)}


def speed_json(scored: ScoredConfig) -> dict[str, Any] | None:
    speed = scored.speed
    if speed is None and scored.measured is None:
        return None
    return {"low": speed and round(speed.low, 1), "high": speed and round(speed.high, 1),
            "likely": speed and round(speed.likely, 1), "basis": speed and speed.basis, "measured": scored.measured}


# ---- figures as text


def _speed(speed: SpeedEstimate | None) -> str:
    if speed is None:
        return "not known"
    low, high = show_count(round(speed.low)), show_count(round(speed.high))
    return low if low == high else f"{low} to {high}"


def _needs(scored: ScoredConfig) -> str:
    return show_bytes(scored.needs)


def _flags(scored: ScoredConfig) -> str:
    return " ".join(scored.flags) or "as given"
