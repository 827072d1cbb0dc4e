"""What `fitgpt plan` and `fitgpt cards` say, as plain text that is good at 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ..core.units import MiB, show_bytes, show_count, show_seconds, show_steps, with_article
from ..nouns import Basis, CardVerdict, Change, MemoryPlan, Outlook, OwnerTimeline, PricedChange

PHASES = {"load": "load", "first_eval": "first evaluation", "first_train": "first step", "train": "training",
          "step": "optimizer's step", "eval": "evaluation", "save": "saving", "resume": "resuming",
          "sample": "sampling"}
TRAINERS = {"fitgpt": "fitgpt", "nanogpt": "nanoGPT's train.py"}
CARDS_NOTE = """Usable is what CUDA gives of the memory; TFLOP/s are dense, half precision. How
each of the two is known: seen on such a card, printed by the vendor, worked out
by a formula, or recalled and to be checked. --json has every figure."""
LABEL = 9      # columns of the words on the left
SHORTEST = 20  # columns that words beside figures need; with fewer they go below


# ---- the plan


def plan_text(plan: MemoryPlan, outlook: Outlook, basis: Basis, *, model: str = "",
              suggestions: Sequence[Change] = (), neighbours: str = "", notes: Sequence[str] = (), width: int = 80,
              colour: bool = False, priced: bool = False) -> str:
    """`model`: its shape and batch, in words; `priced`: whether the price of every change follows."""
    forecast, budget = plan.forecast, plan.budget
    where = f" on {with_article(budget.card)}" if budget.card else ""
    title = f"{TRAINERS[forecast.trainer]}{where}: {show_count(forecast.params)} parameters"
    parts = [_wrapped(f"{title}, {model}" if model else title, width), phase_table(plan, width),
             owner_table(plan, width), _verdict_paragraph(plan, neighbours, width, colour)]
    if not plan.fits:
        parts.append(suggestion_lines(suggestions, forecast.trainer, width, priced=priced))
    rows = [("run", run_words(outlook)), ("assumes", assumption_words(plan)), ("basis", basis_words(plan, basis)),
            ("card", " ".join(budget.sources)), *(("note", note) for note in notes)]
    parts.append("\n".join(line for label, words in rows for line in _labelled(label, words, width)))
    return "\n\n".join(parts) + "\n"


def phase_table(plan: MemoryPlan, width: int = 80) -> str:
    """What each phase holds; the peak is marked. Reserved is the most since the process began."""
    rows = [("", "allocated", "reserved", "process", "")]
    for phase, words in PHASES.items():
        held = plan.forecast.phases.get(phase)
        if held is not None:
            rows.append((words, show_bytes(held.allocated), show_bytes(held.reserved),
                         show_bytes(held.reserved + plan.budget.outside),
                         "← peak" if phase == plan.forecast.peak_phase else ""))
    return table(rows, left=(0, 4), width=width, spare=(1, 4, 3))


def owner_table(plan: MemoryPlan, width: int) -> str:
    forecast = plan.forecast
    total = sum(share.nbytes for share in forecast.owners_at_peak)
    lines = [f"At the peak, {show_bytes(total)} allocated:"]
    for share in forecast.owners_at_peak:
        start = f"{share.owner:<12}{show_bytes(share.nbytes):>10}{share.nbytes / total:>7.1%}  "
        if len(start) + SHORTEST > width:
            lines += [start.rstrip(), *textwrap.wrap(share.formula, width, initial_indent="  ", subsequent_indent="  ")]
        else:
            lines += textwrap.wrap(share.formula, width, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def _verdict_paragraph(plan: MemoryPlan, neighbours: str, width: int, colour: bool) -> str:
    word = "Fits" if plan.fits else "Does not fit"
    paragraph = _wrapped(f"{word}: {verdict(plan, neighbours)}", width)
    return f"\x1b[1;{32 if plan.fits else 31}m{word}\x1b[0m{paragraph[len(word):]}" if colour else paragraph


def verdict(plan: MemoryPlan, neighbours: str = "") -> str:
    """needs against what may be reserved, and how much the neighbours may hold; where no card is known, what is left of
    the budget."""
    forecast, budget = plan.forecast, plan.budget
    may = f"may reserve {show_bytes(budget.reserve_limit) if budget.reserve_limit > 0 else 'nothing'}"
    takes_all = bool(budget.card) and budget.budget == budget.usable - budget.others
    if takes_all:
        may += f" ({show_bytes(budget.usable)} usable"
        may += f", {show_bytes(budget.others)} of others" if budget.others else ""
    else:
        may += f" (a budget of {show_bytes(budget.budget)}"
    may += f", {show_bytes(budget.outside)} outside the allocator)"
    off = show_bytes(abs(plan.headroom))
    left = f"headroom {off}" if budget.card else f"{off} of the budget are left"
    words = [f"needs {show_bytes(forecast.needs)}, {may}: {left if plan.fits else f'{off} too much'}."]
    room = budget.usable - budget.outside - forecast.needs
    if takes_all:
        if plan.fits:
            words.append(f"It fits while everything else on the card stays under {show_bytes(room)}.")
        elif room > 0:
            words.append(f"It would fit if everything else on the card stayed under {show_bytes(room)}.")
    if neighbours:
        words.append(neighbours)
    low, high = forecast.reserved_range
    if show_bytes(low) != show_bytes(high):
        words.append(f"Reserved may end anywhere between {show_bytes(low)} and {show_bytes(high)}: it depends on where "
                     "the driver puts a segment.")
    return " ".join(words)


def suggestion_lines(suggestions: Sequence[Change], trainer: str, width: int, *, priced: bool = False) -> str:
    if not suggestions:
        but = " and ".join(flag for flag, said in (("--trainer", trainer != "fitgpt"), ("--options", priced)) if said)
        options = "" if priced else " What each would save: --options."
        return textwrap.fill(f"No single change makes it fit.{options} Several together: fitgpt fit, with the same "
                             f"words{f' but {but}' if but else ''}.", width)
    lines = ["Any one of these makes it fit:"]
    for each in suggestions:
        lines += textwrap.wrap(" ".join(each.flags), width, initial_indent="  ", subsequent_indent="    ",
                               break_long_words=False, break_on_hyphens=False)
        lines += textwrap.wrap(f"{each.kind}; saves {each.what}; cost: {each.slower}", width, initial_indent="      ",
                               subsequent_indent="      ")
    return "\n".join(lines)


def _few_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def run_words(outlook: Outlook) -> str:
    if not outlook.steps:
        return "evaluates once, and trains nothing"
    parts = [f"{outlook.tokens_per_step:,} tokens a step × {show_steps(outlook.steps)} = {show_count(outlook.tokens)} "
             f"tokens, {_few_digits(outlook.tokens / outlook.params)} a parameter"]
    if outlook.epochs is not None:
        parts.append(f"{_few_digits(outlook.epochs)} epochs of the data")
    parts.append(f"a checkpoint takes {show_bytes(outlook.checkpoint_bytes)} on disk")
    if outlook.host_bytes:
        parts.append(f"{show_bytes(outlook.host_bytes)} of the host's memory")
    if outlook.hours is not None:
        low, high = (show_seconds(3600 * hours) for hours in outlook.hours)
        parts.append(low if low == high else f"{low} to {high}")
    return ", ".join(parts)


def assumption_words(plan: MemoryPlan) -> str:
    told = plan.forecast.assumes
    return f"torch {told['torch']}, {told['attention']} attention, {told['compile']}, allocator: {told['allocator']}"


def basis_words(plan: MemoryPlan, basis: Basis) -> str:
    trainer = TRAINERS[plan.forecast.trainer]
    if not basis.in_all or basis.worst_percent is None:
        return f"no recorded runs of {trainer}: this forecast has not been compared with a measurement"
    here = f", {basis.on_card or 'none'} on this card" if plan.budget.card else ""
    off = abs(basis.worst_percent)
    worst = "no figure was 0.01 % off" if off < 0.01 else (
        f"the worst figure was {off:.2f} % {'above' if basis.worst_percent > 0 else 'below'} what was measured")
    return f"{basis.in_all} recorded run{'s' if basis.in_all > 1 else ''} of {trainer}{here}; {worst}"


# ---- tables


def option_table(priced: Sequence[PricedChange], needs_now: int, may_reserve: int, width: int = 80) -> str:
    """Every single change: what it saves in training and in evaluation, what the run then needs, what it costs."""
    priced = sorted(priced, key=lambda one: one.needs)
    has_speeds = any(each.speed is not None for each in priced)
    rows = [("", "training", "eval", "needs", "speed" if has_speeds else "", "", "")]
    rows += [(each.change.flags[0], _less(each.saved_in_training), _less(each.saved_in_evaluation),
              show_bytes(each.needs), "" if each.speed is None else f"{each.speed:.2f}", each.change.kind,
              "✓" if each.fits else "") for each in priced]
    told_of = table(rows, left=(0, 5, 6), width=width, spare=(2, 1, 4, 5))
    lines = [_wrapped(f"Single changes, from {show_bytes(needs_now)} needed now, where {show_bytes(may_reserve)} may "
                      "be reserved:", width), told_of, ""]
    are_shown = "speed" in told_of.splitlines()[0]  # it may be too narrow for them
    speeds = "; speed: times what is to be expected now, by a roofline (docs/fit.md)" if are_shown else ""
    lines.append(_wrapped(f"✓: fits{speeds}.", width))
    if any(not each.change.comparable for each in priced):
        lines.append(_wrapped("other: a loss at another block size does not compare with this run's.", width))
    told: dict[str, list[Change]] = {}
    for each in priced:
        told.setdefault(f"saves {each.change.what}; cost: {each.change.slower}.", []).append(each.change)
    for words, changes in told.items():
        first = changes[0].flags if len(changes) == 1 else [_without_value(flag) for flag in changes[0].flags]
        lines += textwrap.wrap(f"{' '.join(first)}: {words}", width, subsequent_indent="  ", break_long_words=False,
                               break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def all_cards_table(verdicts: Sequence[CardVerdict], speeds: Mapping[str, tuple[float, float]],
                    width: int = 80) -> str:
    """A line a card; `speeds` of those that have an estimate."""
    rows = [("card", "usable", "needs", "headroom", "      tok/s" if speeds else "")]
    for each in verdicts:
        verdict = f"fits  {_speed(speeds.get(each.name))}".rstrip() if each.fits else "does not fit"
        figures = ("", "", each.problem) if each.problem else (show_bytes(each.needs), signed(each.headroom), verdict)
        rows.append((each.name, show_bytes(each.usable) if each.usable is not None else "not known", *figures))
    told = table(rows, left=(0, 4), width=width, spare=(1, 2, 3)) + "\n"
    return told if "headroom" in told or not speeds else all_cards_table(verdicts, {}, width)  # which says more


def card_table(rows: Iterable[tuple[str, ...]], width: int = 80) -> str:
    head = ("card", "memory", "usable", "bf16", "TFLOP/s", "known")
    return f"{table([head, *rows], left=(0, 5), width=width, spare=(5, 3, 4, 1))}\n\n{_wrapped(CARDS_NOTE, width)}\n"


def table(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,), *, width: int = 0,
          spare: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell, the `left` ones flush left, the others flush right.

    Where that is wider than `width`, `spare` columns are left out, in that order, until it is not. If it is so without
    all of them, the first column stands on lines of its own, and the others below it.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def as_many_as_fit(kept: list[int]) -> tuple[list[int], bool]:
        for column in (-1, *spare):
            kept = [each for each in kept if each != column]
            if not width or sum(widths[each] + 2 for each in kept) - 2 <= width:
                return kept, True
        return kept, False

    def line(row: tuple[str, ...], kept: Sequence[int]) -> str:
        return "  ".join(row[column].ljust(widths[column]) if column in left else row[column].rjust(widths[column])
                         for column in kept).rstrip()

    kept, fits = as_many_as_fit(list(range(len(widths))))
    if fits:
        return "\n".join(line(row, kept) for row in rows)
    widths[0] = 0
    below = as_many_as_fit(list(range(len(widths))))[0][1:]
    return "\n".join(f"{row[0]}\n  {line(row, below)}".strip("\n") for row in rows)


def _without_value(flag: str) -> str:
    return f"{flag.partition('=')[0]}=…"


def _less(nbytes: int) -> str:
    size = abs(nbytes)
    shown = f"{size / MiB:.0f} MiB" if 10 * MiB <= size < 1000 * MiB else show_bytes(size)
    return "0" if size < MiB else f"{'−' if nbytes > 0 else '+'}{shown}"


def signed(nbytes: int) -> str:
    return f"{'−' if nbytes < 0 else ''}{show_bytes(abs(nbytes))}"


def _speed(range_: tuple[float, float] | None) -> str:
    return "" if range_ is None else f"{_few_digits(range_[0] / 1000)}–{_few_digits(range_[1] / 1000)}k"


def _labelled(label: str, words: str, width: int) -> list[str]:
    return textwrap.wrap(words, width, initial_indent=label.ljust(LABEL), subsequent_indent=" " * LABEL,
                         break_long_words=False)


def _wrapped(words: str, width: int) -> str:
    return "\n".join(textwrap.wrap(words, width))


# ---- a page


def timeline_page(plan: MemoryPlan, drawn: OwnerTimeline) -> str:
    """One step's memory by owner, zoomable, with the peak and what may be reserved, in a file of its own."""
    from .charts import page, stacked, text

    forecast, budget = plan.forecast, plan.budget
    title = f"{TRAINERS[forecast.trainer]}, {show_count(forecast.params)} parameters: one step"
    chart = stacked(drawn, title="Allocated, by owner", limit=budget.reserve_limit, limit_name="may be reserved",
                    note="A few micro-batches, one after another, then the optimizer's step; more repeat the last.")
    said = text(f"{'Fits' if plan.fits else 'Does not fit'}: {verdict(plan)}")
    owners = "".join(f'<tr><th scope="row">{text(share.owner)}</th><td class="figure">{show_bytes(share.nbytes)}</td>'
                     f"<td>{text(share.formula)}</td></tr>" for share in forecast.owners_at_peak)
    return page(title, f"<h1>{text(title)}</h1>\n<p>{said}</p>\n{chart}\n<h2>At the peak</h2>\n"
                f'<div class="card"><table class="whole">{owners}</table></div>')
