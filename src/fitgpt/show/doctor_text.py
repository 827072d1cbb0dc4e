"""The findings of `fitgpt doctor` as lines that fit any width."""

from __future__ import annotations

from ..hardware.diagnostics import Finding
from .terminal import Line, can_redraw, columns, printable, wrap

VERDICT_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}
NARROW = 60  # columns; with fewer, the text goes below its heading


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
