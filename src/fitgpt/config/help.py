"""Options class → the text of `--help`, and the tables in the docs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from .fields import Options, OptionSpec, option_specs, shown


def help_text(cls: type[Options], usage: str, summary: str, examples: Sequence[str] = ()) -> str:
    """The help of a command: usage, summary, examples and its options by group, as wide as the terminal."""
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
            sentence = textwrap.wrap(_sentence(one), width - column, break_on_hyphens=False) or [""]
            if len(left) + 2 <= column:
                lines.append(left.ljust(column) + sentence.pop(0))
            else:
                lines.append(left)
            lines += [indent + line for line in sentence]
    if any(one.kind in ("bool", "auto") for one in option_specs(cls).values()):
        lines += ["", *textwrap.wrap("An option that takes True or False also takes --option and --no-option. Dashes "
                                     "and underscores are the same; the last of two assignments wins.", width)]
    return "\n".join(lines) + "\n"


def markdown_table(cls: type[Options]) -> str:
    """The options for the docs: one table per group."""
    parts = []
    for group, members in _groups(cls).items():
        rows = [f"| `{_name(one)}` | `{shown(one.default)}` | {_sentence(one)} |" for one in members]
        parts.append("\n".join([f"**{group}**", "", "| option | default | what it is |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _groups(cls: type[Options]) -> dict[str, list[OptionSpec]]:
    groups: dict[str, list[OptionSpec]] = {}
    for one in option_specs(cls).values():
        groups.setdefault(one.group, []).append(one)
    return groups


def _name(one: OptionSpec) -> str:
    name = one.name.upper() if one.positional and one.kind == "texts" else f"--{one.name}"
    return f"-{one.short}, {name}" if one.short else name


def _as_typed(one: OptionSpec) -> str:
    if one.required or one.kind == "texts":
        return one.name.upper() if one.positional else f"{_name(one)}={one.name.upper()}"
    return f"{_name(one)}={shown(one.default)}"


def _sentence(one: OptionSpec) -> str:
    choices = f" ({', '.join(one.choices)})" if one.choices else ""
    switches = "".join(f"; --{name} is short for --{one.name}={value}" for name, value in one.switches.items())
    return f"{one.help}{choices}{switches}".replace("|", "/")
