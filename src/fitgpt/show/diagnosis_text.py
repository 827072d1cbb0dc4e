"""A Diagnosis as text, for `fitgpt explain`: what happened, why, where the memory is, what to do. And a Finding of
`fitgpt doctor` as lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.units import MiB
from ..hardware.diagnostics import Finding
from .terminal import LABEL_WIDTH, Line, can_redraw, columns, labelled, printable, wrap

if TYPE_CHECKING:  # a diagnosis imports this module to print itself
    from ..diagnosis.diagnose import Diagnosis

SHARES_LABEL = {"message": "GPU", "reading": "GPU", "plan": "peak", "run": "peak", "snapshot": "peak"}
FITS = {True: ": fits", False: ": not enough alone", None: ""}
VERDICT_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}
NARROW = 60  # columns; with fewer, a finding's text goes below its heading


def diagnosis_text(diagnosis: Diagnosis, width: int = 80) -> str:
    lines = wrap(diagnosis.title, width)
    if diagnosis.what:
        lines += ["", *labelled("what", diagnosis.what, width)]
    lines += _labelled_once("why", [f"{cause.code}  {cause.what}" for cause in diagnosis.causes], width)
    if diagnosis.shares:
        label = SHARES_LABEL[diagnosis.subject].ljust(LABEL_WIDTH)
        lines += ["", f"{label}{diagnosis.shares_of}, in MiB"]
        # Shares of at least half a MiB, or all of them if there is none.
        shares = [share for share in diagnosis.shares if share.nbytes >= MiB / 2] or diagnosis.shares
        digits = max(len(f"{share.nbytes / MiB:,.0f}") for share in shares)
        for share in shares:
            text = f"{share.what}: {share.note}" if share.note else share.what
            lines += wrap(text, width, f"{' ' * LABEL_WIDTH}{share.nbytes / MiB:>{digits},.0f}  ")
    if diagnosis.remedies:
        lines.append("")
    # Each command on a line of its own, unbroken, so that it can be copied; its effect below.
    label = "fix" if diagnosis.subject == "message" else "change"
    for index, remedy in enumerate(diagnosis.remedies):
        lines.append(f"{'' if index else label:<{LABEL_WIDTH}}{remedy.todo}")
        costs = f". Costs: {remedy.costs}" if remedy.costs else ""
        lines += wrap(f"{remedy.effect}{FITS[remedy.fits]}{costs}", width, " " * (LABEL_WIDTH + 2))
    lines += _labelled_once("note", diagnosis.notes, width)
    if diagnosis.needed:
        lines += ["", f"{'more':<{LABEL_WIDTH}}would be known with"]
        for each in diagnosis.needed:
            lines += wrap(each, width, f"{' ' * LABEL_WIDTH}- ")
    return "\n".join(lines)


def _labelled_once(label: str, texts: list[str] | tuple[str, ...], width: int) -> list[str]:
    """An empty line, then the texts with the label beside the first; nothing if there are no texts."""
    lines = [""] if texts else []
    for index, text in enumerate(texts):
        lines += labelled("" if index else label, text, width)
    return lines


def finding_lines(finding: Finding, width: int) -> list[Line]:
    """The verdict, the subject and the text; below them the commands to type, one per line, unbroken."""
    heading = f"{finding.verdict:<7}{finding.subject:<11}"
    text = printable(finding.what)
    if width >= NARROW:
        indent = len(heading)
        lines = wrap(text, width, heading)
    else:
        indent = 2
        lines = [heading.rstrip(), *wrap(text, width, " " * indent)]
    lines += [f"{' ' * indent}→ {printable(command)}" for command in finding.fix.splitlines()]
    return [Line(lines[0], VERDICT_STYLES[finding.verdict]), *map(Line, lines[1:])]


def print_finding(finding: Finding) -> None:
    """One finding to standard output, its verdict coloured on a terminal."""
    lines = finding_lines(finding, columns())
    if not can_redraw():
        print("\n".join(line.text for line in lines), flush=True)
        return

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for line in lines:
        text = Text(line.text, no_wrap=True, overflow="ignore")
        if line.style:
            text.stylize(line.style, 0, len(finding.verdict))
        console.print(text, soft_wrap=True)
