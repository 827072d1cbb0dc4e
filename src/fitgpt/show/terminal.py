"""The terminal's width and abilities, and the layout of plain text: paragraphs, labelled rows, tables, sparklines."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

LABEL_WIDTH = 10      # columns of the labels at the left
MIN_TEXT_WIDTH = 20   # columns that text needs beside a label or figures
MIN_COLUMNS, MAX_COLUMNS = 40, 100


class Line(NamedTuple):
    text: str
    style: str = ""  # one of rich's


def columns() -> int:
    """The width for lines of text: the terminal's, within limits that read well."""
    return min(max(shutil.get_terminal_size().columns, MIN_COLUMNS), MAX_COLUMNS)


def known_width() -> int | None:
    """The width to which a log is wrapped: the terminal's, or $COLUMNS; None for a file or a pipe without it."""
    return columns() if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else None


def can_redraw() -> bool:
    """Whether standard output is a terminal that can move its cursor and show colours."""
    return sys.stdout.isatty() and not is_dumb()


def is_dumb() -> bool:
    return os.environ.get("TERM") in ("dumb", "unknown")


def has_unicode() -> bool:
    """Whether standard output can show more than ASCII."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def printable(text: str) -> str:
    """Text from outside, such as program names, with control characters replaced by question marks."""
    return "".join(char if char.isprintable() else "?" for char in text)


def wrap(text: str, width: int, start: str = "", indent: int | None = None) -> list[str]:
    """Text as lines of at most `width` columns. The first begins with `start`; the others are indented by `indent`
    columns, or as far as `start` reaches.

    Words are never broken, so that flags and paths can be copied; nor are lines at a no-break space, or between a
    number and its percent sign.
    """
    indent = len(start) if indent is None else indent
    width = max(width, len(start) + MIN_TEXT_WIDTH)
    lines = textwrap.wrap(text.replace(" %", "\xa0%"), width, initial_indent=start, subsequent_indent=" " * indent,
                          break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def command_lines(words: Iterable[str], width: int, indent: int = 2) -> list[str]:
    """A shell command, its words quoted, as lines of at most `width` columns that can be copied: all but the last end
    with a backslash."""
    lines = [" " * indent]
    for word in map(shlex.quote, words):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) + 2 > width:
            lines[-1] += " \\"
            lines.append(" " * (indent + 2) + word)
        else:
            lines[-1] += f" {word}" if lines[-1].strip() else word
    return lines


def paragraph(text: str, width: int) -> str:
    return "\n".join(wrap(text, width))


def labelled(label: str, text: str, width: int) -> list[str]:
    """A label, and the text beside it."""
    return wrap(text, width, label.ljust(LABEL_WIDTH))


def labelled_rows(rows: Iterable[tuple[str, str]], width: int) -> str:
    return "\n".join(line for label, text in rows for line in labelled(label, text, width))


def table(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,), *, width: int = 0,
          optional: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell, the `left` ones flush left, the others flush right.

    Where that is wider than `width`, the `optional` columns are left out, in that order, until it fits. If it does not
    fit without all of them, the first column stands on lines of its own, and the others below it.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def fitting_columns() -> tuple[list[int], bool]:
        kept = list(range(len(widths)))
        for dropped in (None, *optional):
            kept = [column for column in kept if column != dropped]
            if not width or sum(widths[column] + 2 for column in kept) - 2 <= width:
                return kept, True
        return kept, False

    def line(row: tuple[str, ...], kept: Sequence[int]) -> str:
        return "  ".join(row[column].ljust(widths[column]) if column in left else row[column].rjust(widths[column])
                         for column in kept).rstrip()

    kept, fits = fitting_columns()
    if fits:
        return "\n".join(line(row, kept) for row in rows)
    widths[0] = 0
    below = fitting_columns()[0][1:]
    return "\n".join(f"{row[0]}\n  {line(row, below)}".strip("\n") for row in rows)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in at most `width` characters, each the mean of an equal share of the values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    cells = min(width, len(finite))
    cuts = [round(cell * len(finite) / cells) for cell in range(cells + 1)]
    means = [sum(finite[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span) if span else 0] for mean in means)


def bar(share: float, width: int, *, unicode: bool = True) -> str:
    """A bar of `width` characters, of which a `share` is filled; both parts differ without colours, too."""
    done, left = "█░" if unicode else "#."
    filled = int(min(max(share, 0.0), 1.0) * width)  # rounded down: full only at the end
    return done * filled + left * (width - filled)


def fit_parts(parts: Sequence[tuple[int, str]], width: int) -> list[str]:
    """The texts of (rank, text) pairs in their order, those that do not fit replaced by "". Lower ranks are placed
    first; two blanks separate the texts."""
    kept: set[int] = set()
    left = width
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        needed = len(parts[index][1]) + (2 if kept else 0)
        if needed <= left:
            kept.add(index)
            left -= needed
    return [text if index in kept else "" for index, (_, text) in enumerate(parts)]
