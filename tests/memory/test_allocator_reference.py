"""The allocator does the same as a second, independent implementation, event by event."""

from __future__ import annotations

import random

import pytest

from fitgpt.memory.allocator import MIN_LARGE_ALLOC
from fitgpt.memory.driver_addresses import MonotonicAddresses
from fitgpt.memory.tape import DEFAULT_POOL, GRAPH_POOL, SIDE_STREAM, Tape, Writer
from fitgpt.memory.timeline import Timeline, replay
from tests.memory import reference_allocator


def random_tape(seed: int, events: int = 400) -> Tape:
    """Random sizes from 64 bytes to 64 MiB in all pools, with a call of empty_cache() now and then."""
    rng, writer, alive = random.Random(seed), Writer(), list[str]()
    writer.phase("train")
    for number in range(events):
        writer.pool = rng.choice((DEFAULT_POOL, DEFAULT_POOL, DEFAULT_POOL, GRAPH_POOL, SIDE_STREAM))
        if rng.random() < 0.01:
            writer.empty_cache()
        elif alive and rng.random() < 0.48:
            writer.free(alive.pop(rng.randrange(len(alive))))
        else:
            alive.append(writer.alloc(str(number), "other", int(2 ** rng.uniform(6, 26))))
    return writer.tape()


def reserved_by_event(timeline: Timeline) -> list[int]:
    changes, reserved, found = dict(timeline.segments), 0, list[int]()
    for number in range(len(timeline.changes)):
        reserved = changes.get(number, reserved)
        found.append(reserved)
    return found


@pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])
@pytest.mark.parametrize("seed", range(6))
def test_replays_are_equal_with_and_without_a_limit(seed: int, expandable: bool) -> None:
    tape = random_tape(seed)
    most = replay(tape, expandable=expandable).reserved
    for limit in (None, *(int(share * most) for share in (0.5, 0.7, 0.8, 0.85, 0.9, 0.95))):
        timeline = replay(tape, limit, expandable=expandable)
        assert (timeline.changes, reserved_by_event(timeline), timeline.failed) == reference_allocator.replay(
            tape, limit, expandable=expandable)


@pytest.mark.parametrize("descending_from", [0, MIN_LARGE_ALLOC, 2**60])
def test_replays_are_equal_in_other_orders_of_addresses(descending_from: int) -> None:
    tape = random_tape(0)
    timeline = replay(tape, addresses=MonotonicAddresses(descending_from))
    assert (timeline.changes, reserved_by_event(timeline), timeline.failed) == reference_allocator.replay(
        tape, addresses=MonotonicAddresses(descending_from))


@pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_is_the_same_under_every_limit_that_it_names(seed: int, expandable: bool) -> None:
    tape = random_tape(seed)
    most = replay(tape, expandable=expandable).reserved
    for share in (0.6, 0.8, 0.9):
        timeline = replay(tape, int(share * most), expandable=expandable)
        for limit in (timeline.largest_granted, timeline.smallest_failed - 1):
            assert timeline.is_same_under(limit)
            assert replay(tape, limit, expandable=expandable) == timeline
