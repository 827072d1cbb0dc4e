"""A tape: every allocation and free that a program makes on a GPU, in order. Here are its events and its writer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

OWNERS = ("weights", "gradients", "optimizer", "casts", "activations", "attention", "logits", "workspace", "data",
          "other")
EMPTY_CACHE = "torch.cuda.empty_cache()"  # the name of an event that is neither an allocation nor a free
MIN_BLOCK_SIZE = 512                      # torch's kMinBlockSize

# Memory pools of the caching allocator: a block of one is never handed out in another. Work on the default stream, the
# private pool of captured CUDA graphs, and the side stream on which a program warms up before it captures.
DEFAULT_POOL, GRAPH_POOL, SIDE_STREAM = range(3)


class Event(NamedTuple):
    """One allocation (`alloc`), or the free of an earlier one. `nbytes` is the tensor's size before any rounding."""

    alloc: bool
    name: str
    owner: str
    nbytes: int
    pool: int = DEFAULT_POOL


class Span(NamedTuple):
    """A named stretch of a tape: the number of its first event, and of the first event after it."""

    name: str
    start: int
    end: int


class SpanCost(NamedTuple):
    """What a span adds to the bytes allocated when it begins: at its end, and at its highest point."""

    name: str
    net: int
    peak: int


def round_size(nbytes: int) -> int:
    """Size of a tensor in bytes → size of its block: a multiple of 512 bytes, and at least that."""
    return -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE or MIN_BLOCK_SIZE


@dataclass(frozen=True)
class Tape:
    """All events of a program. Names are unique among the tensors alive; after a free a name may be used again."""

    events: tuple[Event, ...]
    phases: tuple[Span, ...]       # they follow each other without a gap, from the first event to the last
    spans: tuple[Span, ...] = ()   # marked with Writer.span; they may nest, and several may have one name

    @cached_property
    def changes(self) -> list[int]:
        """By event: the change of the bytes allocated, if every block is as large as its tensor, rounded."""
        sizes = {nbytes: round_size(nbytes) for nbytes in {event.nbytes for event in self.events}}
        return [sizes[nbytes] if alloc else 0 if name == EMPTY_CACHE else -sizes[nbytes]
                for alloc, name, _, nbytes, _ in self.events]

    @cached_property
    def allocated(self) -> list[int]:
        """By event: the bytes allocated after it, under the same assumption."""
        return list(accumulate(self.changes))

    @property
    def peak(self) -> int:
        """The most bytes allocated at one time, under the same assumption: no smaller memory can hold the tensors."""
        return max(self.allocated, default=0)

    def span_costs(self, pools: Collection[int] = (DEFAULT_POOL, GRAPH_POOL, SIDE_STREAM)) -> list[SpanCost]:
        """What each span costs in these pools, in the order of `spans`."""
        changes = (change if event.pool in pools else 0
                   for event, change in zip(self.events, self.changes, strict=True))
        before = [0, *accumulate(changes)]  # bytes before each event, and at the end
        return [SpanCost(name, before[end] - before[start], max(before[start:end + 1]) - before[start])
                for name, start, end in self.spans]


class _Section(NamedTuple):
    """Events that were written once and can be copied, and what the copy does to the tensors alive."""

    events: list[Event]
    spans: list[Span]             # relative to the section's start
    names: tuple[str, ...]        # tensors that have other names in a copy
    renamed: list[int]            # the numbers of the events of these tensors
    frees: list[str]              # tensors that were alive before
    leaves: list[Event]           # allocations that are alive afterwards


class Writer:
    """Writes a tape. It raises ValueError for an unknown owner, a double free, and a name that is already alive."""

    def __init__(self) -> None:
        self.pool = DEFAULT_POOL  # where the next allocations come from
        self._events: list[Event] = []
        self._phases: list[tuple[str, int]] = []
        self._spans: list[Span] = []
        self._alive: dict[str, Event] = {}
        self._sections: dict[Hashable, _Section] = {}

    def phase(self, name: str) -> None:
        """Begins a phase, which lasts until the next one. The same phase may come again."""
        self._phases.append((name, len(self._events)))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Marks the events written inside the `with` block as a span."""
        number, start = len(self._spans), len(self._events)
        yield
        self._spans.insert(number, Span(name, start, len(self._events)))

    def alloc(self, name: str, owner: str, nbytes: int) -> str:
        """Allocates a tensor and returns its name."""
        if name in self._alive:
            raise ValueError(f"{name!r} is already alive")
        if owner not in OWNERS:
            raise ValueError(f"{owner!r} is not an owner: {', '.join(OWNERS)}")
        event = self._alive[name] = Event(True, name, owner, nbytes, self.pool)
        self._events.append(event)
        return name

    def free(self, *names: str) -> None:
        for name in names:
            event = self._alive.pop(name, None)
            if event is None:
                raise ValueError(f"{name!r} is not alive")
            self._events.append(Event(False, name, event.owner, event.nbytes, event.pool))

    def free_if_alive(self, *names: str) -> None:
        self.free(*(name for name in names if name in self._alive))

    @contextmanager
    def scratch(self, name: str, owner: str, nbytes: int) -> Iterator[str]:
        """Allocates a tensor that is freed at the end of the `with` block."""
        yield self.alloc(name, owner, nbytes)
        self.free(name)

    def empty_cache(self) -> None:
        """The program calls torch.cuda.empty_cache()."""
        self._events.append(Event(False, EMPTY_CACHE, "other", 0))

    def section(self, kind: Hashable, names: tuple[str, ...], write: Callable[[], object]) -> None:
        """Calls `write` for the first section of a kind and copies its events for later ones, with other `names`.

        A copy takes a tenth of the time, and a training run repeats few kinds of sections. The kind must state
        everything that the events depend on. Copies are not checked as other events are.
        """
        if kind not in self._sections:
            start, spans, before = len(self._events), len(self._spans), self._alive.copy()
            write()
            events, after = self._events[start:], self._alive
            self._sections[kind] = _Section(
                events, [Span(name, first - start, end - start) for name, first, end in self._spans[spans:]],
                names, [number for number, event in enumerate(events) if event.name in names],
                frees=[name for name, event in before.items() if after.get(name) is not event],
                leaves=[event for name, event in after.items() if before.get(name) is not event])
            return
        section, start = self._sections[kind], len(self._events)
        renamed, events = dict(zip(section.names, names, strict=True)), section.events.copy()
        for number in section.renamed:
            events[number] = events[number]._replace(name=renamed[events[number].name])
        for name in section.frees:
            del self._alive[renamed.get(name, name)]
        for event in section.leaves:
            name = renamed.get(event.name, event.name)
            self._alive[name] = event._replace(name=name)
        self._events += events
        self._spans += [Span(name, first + start, end + start) for name, first, end in section.spans]

    def alive(self, name: str) -> bool:
        return name in self._alive

    @property
    def length(self) -> int:
        """How many events were written so far."""
        return len(self._events)

    def events_since(self, number: int) -> list[Event]:
        return self._events[number:]

    def tape(self) -> Tape:
        if not self._phases or self._phases[0][1] != 0:
            raise ValueError("a tape begins with a phase")
        starts = [start for _, start in self._phases[1:]]
        phases = [Span(name, start, end)
                  for (name, start), end in zip(self._phases, [*starts, len(self._events)], strict=True)]
        return Tape(tuple(self._events), tuple(phases), tuple(self._spans))
