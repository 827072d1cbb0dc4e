"""Expandable segments, one rule per test: pages, splitting, unmapping."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from fitgpt.core.units import MiB
from fitgpt.memory.allocator import CachingAllocator, ExpandableAllocator, MemoryBlock
from fitgpt.memory.tape import Tape, Writer, round_size
from fitgpt.memory.timeline import replay
from tests.memory.tape_script import tape


def test_pages_are_2_mib_for_small_and_20_for_large_requests() -> None:
    assert replay(tape(("a", 512)), expandable=True).reserved == 2 * MiB
    assert replay(tape(("a", 21 * MiB)), expandable=True).reserved == 40 * MiB


def test_a_large_block_is_split_down_to_512_bytes() -> None:
    timeline = replay(tape(("a", 20 * MiB - 512), ("b", 2 * MiB)), expandable=True)
    assert timeline.changes == [20 * MiB - 512, 2 * MiB]
    assert timeline.reserved == 40 * MiB  # b begins in what a left of its page


def test_a_free_block_grows_into_the_pages_behind_it() -> None:
    """Plain segments would hold both: 50 and 100 MiB."""
    assert replay(tape(("a", 50 * MiB), "a", ("b", 100 * MiB)), expandable=True).reserved == 100 * MiB


def test_free_pages_between_taken_blocks_are_unmapped_at_the_limit() -> None:
    script = (("a", 20 * MiB), ("b", 60 * MiB), ("c", 20 * MiB), "b", ("d", 80 * MiB))
    assert replay(tape(*script), expandable=True).reserved == 180 * MiB
    capped = replay(tape(*script), 120 * MiB, expandable=True)
    assert capped.failed is None
    assert capped.reserved == 120 * MiB


def test_unmapped_pages_are_mapped_again_where_they_lie() -> None:
    script = (("a", 20 * MiB), ("b", 60 * MiB), ("c", 20 * MiB), "b", ("d", 80 * MiB), "d", ("e", 60 * MiB))
    capped = replay(tape(*script), 120 * MiB, expandable=True)
    assert capped.failed is None
    assert capped.allocated[-1] == 100 * MiB


def shuffled(seed: int) -> Tape:
    """Allocations and frees by chance, of sizes around the allocator's borders."""
    chance, writer = random.Random(seed), Writer()
    alive: list[str] = []
    writer.phase("train")
    for number in range(400):
        if alive and chance.random() < 0.48:
            writer.free(alive.pop(chance.randrange(len(alive))))
        else:
            alive.append(writer.alloc(str(number), "other", int(2 ** chance.uniform(6, 26))))
    return writer.tape()


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_in_use_never_overlap(expandable: bool, seed: int) -> None:
    written = shuffled(seed)
    limit = replay(written, expandable=expandable).needs
    allocator = ExpandableAllocator(limit) if expandable else CachingAllocator(limit)
    blocks: dict[str, MemoryBlock] = {}
    for event in written.events:
        if not event.alloc:
            allocator.free(blocks.pop(event.name))
            continue
        block = allocator.malloc(round_size(event.nbytes), event.pool)
        assert block is not None
        assert block.size >= event.nbytes
        assert not any(each.pool is block.pool and each.address < block.address + block.size
                       and block.address < each.address + each.size for each in blocks.values())
        blocks[event.name] = block
        assert sum(each.size for each in blocks.values()) <= allocator.reserved


@pytest.mark.parametrize("seed", range(4))
def test_a_tape_completes_under_what_it_needs_and_allocates_rounded_sizes(seed: int) -> None:
    written = shuffled(seed)
    least = replay(written, expandable=True).needs
    timeline = replay(written, least, expandable=True)
    assert timeline.failed is None
    assert replay(written, least - 2 * MiB, expandable=True).failed is not None
    expected = accumulate((1 if event.alloc else -1) * max(-(-event.nbytes // 512) * 512, 512)
                          for event in written.events)
    assert timeline.allocated == list(expected)
