"""The caching allocator's rules, one by one, on tapes small enough to check by hand."""

from __future__ import annotations

import pytest

from fitgpt.core.units import MiB
from fitgpt.memory.tape import Writer
from fitgpt.memory.timeline import Timeline, replay
from tests.memory.tape_script import tape


def run(*script: tuple[str, int] | str, limit: int | None = None) -> Timeline:
    return replay(tape(*script), limit)


@pytest.mark.parametrize(("requested", "given"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MiB, MiB)])
def test_a_request_is_rounded_up_to_512_bytes(requested: int, given: int) -> None:
    assert run(("a", requested)).allocated == [given]


@pytest.mark.parametrize(("requested", "segment"), [
    (512, 2 * MiB), (MiB, 2 * MiB), (MiB + 1, 20 * MiB), (10 * MiB - 512, 20 * MiB), (10 * MiB, 10 * MiB),
    (10 * MiB + 1, 12 * MiB), (33 * MiB, 34 * MiB),
])
def test_a_segment_is_2_or_20_mib_or_the_size_rounded_to_2(requested: int, segment: int) -> None:
    assert run(("a", requested)).reserved == segment


def test_small_and_large_requests_never_share_a_segment() -> None:
    assert run(("large", 2 * MiB), ("small", 512)).reserved == 22 * MiB
    assert run(("large", 2 * MiB), "large", ("small", 512)).reserved == 22 * MiB


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left() -> None:
    assert run(("a", 21 * MiB)).changes == [22 * MiB]  # 1 MiB would be left: it stays with the block, and is counted
    split = run(("a", 21 * MiB - 512), ("b", MiB + 512))
    assert split.changes == [21 * MiB - 512, MiB + 512]
    assert split.reserved == 22 * MiB


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    timeline = run(("a", MiB), ("b", MiB - 512), ("c", 512))
    assert timeline.changes == [MiB, MiB - 512, 512]
    assert timeline.reserved == 2 * MiB


def test_the_smallest_block_that_fits_is_taken() -> None:
    """Of two free ones, 12 and 40 MiB, an 11 MiB request takes the 12: the 40 stays whole."""
    timeline = run(("a", 40 * MiB), ("b", 12 * MiB), "a", "b", ("c", 11 * MiB), ("d", 40 * MiB))
    assert timeline.reserved == 52 * MiB


def test_freed_neighbours_merge_in_any_order() -> None:
    thirds = (("a", 4 * MiB), ("b", 4 * MiB), ("c", 4 * MiB))
    for order in (("a", "b", "c"), ("c", "b", "a"), ("a", "c", "b")):
        assert run(*thirds, *order, ("d", 20 * MiB)).reserved == 20 * MiB


def test_a_gap_between_taken_blocks_cannot_serve_a_larger_request() -> None:
    timeline = run(("a", 8 * MiB), ("b", 8 * MiB), "a", ("c", 12 * MiB))
    assert timeline.reserved == 32 * MiB


def test_cached_blocks_stay_reserved_without_a_limit() -> None:
    timeline = run(("a", 50 * MiB), "a", ("b", 100 * MiB))
    assert (timeline.allocated[-1], timeline.reserved) == (100 * MiB, 150 * MiB)


def test_at_the_limit_free_segments_are_released_and_the_request_is_tried_again() -> None:
    timeline = run(("a", 50 * MiB), "a", ("b", 100 * MiB), limit=100 * MiB)
    assert timeline.failed is None
    assert timeline.segments == [(0, 50 * MiB), (2, 100 * MiB)]


def test_a_segment_with_a_block_in_use_is_not_released() -> None:
    timeline = run(("a", 8 * MiB), ("b", 8 * MiB), "a", ("c", 90 * MiB), limit=100 * MiB)
    assert timeline.failed == 3
    assert timeline.failed_allocation is not None
    assert timeline.failed_allocation.name == "c"
    assert timeline.allocated == [8 * MiB, 16 * MiB, 8 * MiB]


def test_the_limit_counts_segments_not_tensors() -> None:
    assert run(("a", 2 * MiB), limit=19 * MiB).failed == 0
    assert run(("a", 2 * MiB), limit=20 * MiB).failed is None


def test_a_phase_begins_with_live_tensors_and_reserved_is_the_maximum_so_far() -> None:
    timeline = run(("a", 100 * MiB), ("b", 50 * MiB), "b", "train:", "a", ("c", 20 * MiB))
    peaks = timeline.peaks()
    assert (peaks["load"].allocated, peaks["load"].event) == (150 * MiB, 1)
    assert peaks["train"].allocated == 100 * MiB
    assert peaks["train"].reserved == 150 * MiB


def test_a_phase_that_comes_twice_shows_its_highest_point() -> None:
    timeline = run("train:", ("a", 30 * MiB), "a", "eval:", "train:", ("b", 20 * MiB))
    assert timeline.peaks()["train"].allocated == 30 * MiB


def test_a_run_that_fails_has_peaks_up_to_there() -> None:
    peaks = run(("a", 30 * MiB), "train:", ("b", 30 * MiB), "eval:", ("c", 30 * MiB), limit=50 * MiB).peaks()
    assert peaks["load"].allocated == 30 * MiB
    assert "eval" not in peaks


def test_owners_sum_to_what_is_allocated() -> None:
    writer = Writer()
    writer.phase("train")
    writer.alloc("a", "weights", 19 * MiB + 1)
    writer.alloc("b", "logits", 100)
    writer.alloc("c", "logits", 512)
    writer.free("b")
    timeline = replay(writer.tape())
    assert timeline.owners_at(2) == {"weights": 20 * MiB, "logits": 1024}
    assert timeline.owners_at(3) == {"weights": 20 * MiB, "logits": 512}
    assert sum(timeline.owners_at(3).values()) == timeline.allocated[3]


def test_a_tape_completes_under_what_it_needs_and_fails_with_2_mib_less() -> None:
    script = (("a", 50 * MiB), "a", ("b", 100 * MiB), ("c", 3 * MiB), "b", ("d", 60 * MiB), ("e", 30 * MiB))
    least = replay(tape(*script)).needs
    assert replay(tape(*script), least).failed is None
    assert replay(tape(*script), least - 2 * MiB).failed is not None
    assert least < replay(tape(*script)).reserved


@pytest.mark.reproduction
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("nbytes", [2**61, 10**20])
def test_a_replay_without_a_limit_reserves_any_size(nbytes: int, expandable: bool) -> None:
    replayed = replay(tape(("small", MiB), ("large", nbytes), ("larger", 2 * nbytes), "large", ("last", nbytes)),
                      expandable=expandable)
    assert replayed.failed is None
    assert 0 <= replayed.peak - (3 * nbytes + MiB) <= MiB
    assert 0 <= replayed.reserved - 3 * nbytes <= 64 * MiB
    assert 0 <= replayed.needs - 3 * nbytes <= 64 * MiB
