"""What a verb takes, for people to read: `--help`, and the tables in the docs, from the knobs' own declarations."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from .fields import Knob, Options, knobs_of, shown


def help_text(cls: type[Options], usage: str, summary: str, examples: Sequence[str] = ()) -> str:
    """Everything a verb takes, group by group, as wide as the terminal."""
    width = min(max(shutil.get_terminal_size().columns, 40), 100)
    column = 28 if width >= 70 else 6
    indent = " " * column
    lines = [f"usage: {usage}", "", *textwrap.wrap(summary, width)]
    if examples:
        lines += ["", "examples", *(f"  {each}" for each in examples)]
    for group, members in _groups(cls).items():
        lines += ["", group]
        for one in members:
            left = f"  {_as_typed(one)}"
            told = textwrap.wrap(_sentence(one), width - column) or [""]
            if len(left) + 2 <= column:
                lines.append(left.ljust(column) + told.pop(0))
            else:
                lines.append(left)
            lines += [indent + line for line in told]
    if any(one.kind in ("bool", "auto") for one in knobs_of(cls).values()):
        lines += ["", *textwrap.wrap("What takes True or False also takes --knob and --no-knob. Dashes and "
                                     "underscores are the same; the last of two assignments wins.", width)]
    return "\n".join(lines) + "\n"


def markdown_table(cls: type[Options]) -> str:
    """The same for the docs: one table a group."""
    parts = []
    for group, members in _groups(cls).items():
        rows = [f"| `{_name(one)}` | `{shown(one.default)}` | {_sentence(one)} |" for one in members]
        parts.append("\n".join([f"**{group}**", "", "| knob | default | what it is |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _groups(cls: type[Options]) -> dict[str, list[Knob]]:
    groups: dict[str, list[Knob]] = {}
    for one in knobs_of(cls).values():
        groups.setdefault(one.group, []).append(one)
    return groups


def _name(one: Knob) -> str:
    name = one.name.upper() if one.positional and one.kind == "texts" else f"--{one.name}"
    return f"-{one.short}, {name}" if one.short else name


def _as_typed(one: Knob) -> str:
    if one.required or one.kind == "texts":
        return one.name.upper() if one.positional else f"{_name(one)}={one.name.upper()}"
    return f"{_name(one)}={shown(one.default)}"


def _sentence(one: Knob) -> str:
    choices = f" ({', '.join(one.choices)})" if one.choices else ""
    switches = "".join(f"; --{name} is short for --{one.name}={value}" for name, value in one.switches.items())
    return f"{one.help}{choices}{switches}".replace("|", "/")
