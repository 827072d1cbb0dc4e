"""What `fitgpt doctor` shows: its findings, as lines that fit any width."""

from __future__ import annotations

import shutil
import textwrap

from ..sights import Finding
from .terminal import can_redraw, has_signs
from .watching import Line, ascii_only, printable

NARROWEST, WIDEST = 40, 100
VERDICT_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def finding_lines(finding: Finding, width: int) -> list[Line]:
    """The verdict, the subject and the words; below them what to type, whole lines as they are."""
    width = min(max(width, NARROWEST), WIDEST)
    head = f"{finding.verdict:<7}{finding.subject:<11}"
    indent = " " * (len(head) if width >= 60 else 2)
    words = [indent + each for each in textwrap.wrap(printable(finding.what), width - len(indent))]
    told = [head + words[0].lstrip(), *words[1:]] if width >= 60 else [head.rstrip(), *words]
    lines = [Line(each, VERDICT_STYLES[finding.verdict] if not place else "") for place, each in enumerate(told)]
    return lines + [Line(f"{indent}→ {printable(each)}") for each in finding.fix.splitlines()]


def say_finding(finding: Finding) -> None:
    """One finding to standard output, its verdict coloured where there is a terminal."""
    lines = finding_lines(finding, shutil.get_terminal_size().columns)
    if not has_signs():
        lines = [Line(ascii_only(line.words.replace("→", "->")), line.style) for line in lines]
    if not can_redraw():
        print("\n".join(line.words for line in lines), flush=True)
        return

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for line in lines:
        text = Text(line.words, no_wrap=True, overflow="ignore")
        if line.style:
            text.stylize(line.style, 0, len(finding.verdict))
        console.print(text, soft_wrap=True)
