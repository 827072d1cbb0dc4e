"""Tapes in one line, for tests of the allocators."""

from __future__ import annotations

from fitgpt.memory.tape import Tape, Writer


def tape(*script: tuple[str, int] | str) -> Tape:
    """("a", 5) allocates, "a" frees, "train:" begins a phase."""
    writer = Writer()
    writer.phase("load")
    for each in script:
        if isinstance(each, tuple):
            writer.alloc(each[0], "other", each[1])
        elif each.endswith(":"):
            writer.phase(each[:-1])
        else:
            writer.free(each)
    return writer.tape()
