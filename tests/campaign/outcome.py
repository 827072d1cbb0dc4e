"""What a campaign is: named cases, a function that runs one, and the outcome of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    kind: str         # what happened: "refused", "resumed", "silent" …; the summary counts by it
    ok: bool = True
    note: str = ""    # of a failure: what is needed to understand it
    count: int = 1    # how many trials the case stands for: kills of one run, inputs of one block


class Campaign(NamedTuple):
    """Each case can be run alone and in any order."""

    cases: Sequence[str]
    run: Callable[[str], Outcome]


def shuffled(cases: Sequence[str]) -> list[str]:
    """The same order every time, and any first part of it has some of everything."""
    order = list(cases)
    random.Random(0).shuffle(order)
    return order


def failed(kind: str, note: str) -> Outcome:
    return Outcome(kind, False, note if len(note) < 3000 else f"{note[:1000]}\n…\n{note[-2000:]}")
