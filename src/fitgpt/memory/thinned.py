"""What does one training step hold, event by event and by owner, in as few points as a picture can show?"""

from __future__ import annotations

from ..nouns import OwnerTimeline
from .allocator import Timeline
from .tape import OWNERS

MOST_POINTS = 800  # about a pixel each
NOTHING = ("", 0, 0)

Stretch = tuple[int, int, tuple[tuple[str, int], ...]]  # its first event, the one after its last, where phases begin


def one_step(timeline: Timeline, most: int = MOST_POINTS) -> OwnerTimeline:
    """The training step that reaches highest, the optimizer's part included; where none trains, the highest phase.

    Where work is recorded, that is the first one: later ones allocate nothing.
    """
    spans = [span for span in timeline.tape.spans() if span[1] < len(timeline.changes)]
    steps = _steps(spans) or [(start, end, ((phase, start),)) for phase, start, end in spans if end > start]
    start, end, phases = max(reversed(steps), key=lambda each: max(timeline.allocated[each[0]:each[1]], default=0))
    return thinned(timeline, start, end, phases, most)


def _steps(spans: list[tuple[str, int, int]]) -> list[Stretch]:
    """Micro-batches and the optimizer's part after them; a first step may be written in one piece."""
    steps: list[Stretch] = []
    for (before, _, _), (phase, start, middle), (after, _, end) in zip([NOTHING, *spans], spans, [*spans[1:], NOTHING],
                                                                      strict=False):
        if (phase, after) in (("first_train", "first_train"), ("train", "step")):
            steps.append((start, end, (("training", start), ("step", middle))))
        elif phase == "first_train" and before != "first_train":
            steps.append((start, middle, (("training", start),)))
    return steps


def thinned(timeline: Timeline, start: int, end: int, phases: tuple[tuple[str, int], ...],
            most: int = MOST_POINTS) -> OwnerTimeline:
    """Events `start` to `end`. Of each handful of neighbours the highest and the lowest are kept, so the highest of
    all is among them; `phases` are the numbers of the events at which one begins."""
    end = min(end, len(timeline.changes))
    kept = _kept(timeline.allocated[start:end], most)
    held = dict.fromkeys(OWNERS, 0) | timeline.owners_at(start - 1) if start else dict.fromkeys(OWNERS, 0)
    points, wanted = [], set(kept)
    for offset, (event, change) in enumerate(zip(timeline.tape.events[start:end], timeline.changes[start:end],
                                                 strict=True)):
        held[event.owner] += change
        if offset in wanted:
            points.append(tuple(held[owner] for owner in OWNERS))
    totals = [sum(point) for point in points]
    marks = tuple((next((place for place, offset in enumerate(kept) if offset >= begin - start), len(kept) - 1), phase)
                  for phase, begin in phases)
    return OwnerTimeline(OWNERS, tuple(points), marks, totals.index(max(totals)))


def _kept(totals: list[int], most: int) -> list[int]:
    """The places to keep, in order: the ends, and of each handful the first highest and the first lowest."""
    if len(totals) <= most:
        return list(range(len(totals)))
    handful = -(-2 * len(totals) // (most - 2))
    kept = {0, len(totals) - 1}
    for begin in range(0, len(totals), handful):
        part = totals[begin:begin + handful]
        kept |= {begin + part.index(max(part)), begin + part.index(min(part))}
    return sorted(kept)
