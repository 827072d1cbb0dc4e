"""A diagnosis as text: what happened, why, where the memory is, what to do, in as many columns as there are."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..core.units import MiB
from ..sights import Diagnosis, MemoryShare, Remedy

LABEL = 8
_SHARES = {"message": "card", "reading": "card", "plan": "peak", "run": "peak"}


def diagnosis_text(told: Diagnosis, width: int = 80) -> str:
    lines = [*wrapped(told.title, width)]
    if told.what:
        lines += ["", *labelled("what", told.what, width)]
    for number, cause in enumerate(told.causes):
        lines += [""] if number == 0 else []
        lines += labelled("why" if number == 0 else "", f"{cause.code}  {cause.what}", width)
    if told.shares:
        lines += ["", f"{_SHARES[told.subject]:<{LABEL}}{told.shares_of}, in MiB", *share_lines(told, width)]
    if told.remedies:
        heading = "change" if told.subject in ("plan", "run") else "fix"
        lines += ["", *_remedies(heading, told.remedies, width)]
    for number, sentence in enumerate(told.notes):
        lines += ["", *labelled("note", sentence, width)] if number == 0 else labelled("", sentence, width)
    if told.needed:
        lines += ["", f"{'more':<{LABEL}}would be known with"]
        for each in told.needed:
            lines += wrapped(each, width, f"{' ' * LABEL}- ", " " * (LABEL + 2))
    return "\n".join(lines)


def share_lines(told: Diagnosis, width: int) -> Iterator[str]:
    shown = [share for share in told.shares if share.nbytes >= MiB / 2] or told.shares
    digits = max(len(f"{share.nbytes / MiB:,.0f}") for share in shown)
    for share in shown:
        figure = f"{' ' * LABEL}{share.nbytes / MiB:>{digits},.0f}  "
        yield from wrapped(_share(share), width, figure, " " * len(figure))


def _share(share: MemoryShare) -> str:
    return f"{share.what}: {share.note}" if share.note else share.what


def _remedies(heading: str, remedies: tuple[Remedy, ...], width: int) -> Iterator[str]:
    """What to type stands on a line of its own, unbroken, so that it can be copied."""
    for number, remedy in enumerate(remedies):
        label = heading if number == 0 else ""
        yield f"{label:<{LABEL}}{remedy.todo}"
        fits = {True: ": fits", False: ": not enough alone", None: ""}[remedy.fits]
        costs = f". Costs: {remedy.costs}" if remedy.costs else ""
        yield from wrapped(f"{remedy.effect}{fits}{costs}", width, " " * (LABEL + 2), " " * (LABEL + 2))


def labelled(label: str, words: str, width: int) -> list[str]:
    return wrapped(words, width, f"{label:<{LABEL}}", " " * LABEL)


def wrapped(words: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(words, max(width, LABEL + 24), initial_indent=first, subsequent_indent=rest,
                         break_long_words=False, break_on_hyphens=False)
