"""What is known of the terminal that words go to: how wide it is, which signs it has, whether it can be drawn on."""

from __future__ import annotations

import os
import shutil
import sys


def columns() -> int:
    """As many as a line of text should have there."""
    return min(max(shutil.get_terminal_size().columns, 40), 100)


def can_redraw() -> bool:
    """Whether what was written can be moved over, hidden and coloured."""
    return sys.stdout.isatty() and not is_dumb()


def is_dumb() -> bool:
    return os.environ.get("TERM") in ("dumb", "unknown")


def has_signs() -> bool:
    """More than those of ASCII."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
