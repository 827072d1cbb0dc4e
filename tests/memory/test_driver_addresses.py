"""Where the driver puts segments: which of two lies higher is all that matters of it."""

from __future__ import annotations

from fitgpt.core.units import MiB
from fitgpt.memory.allocator import MIN_LARGE_ALLOC, NO_LIMIT
from fitgpt.memory.driver_addresses import MonotonicAddresses, ObservedAddresses
from fitgpt.memory.timeline import replay
from tests.memory.tape_script import tape


def put(*sizes: int, large_weight: bool = True) -> list[int]:
    """Addresses of segments of these sizes in MiB, in a run whose weights are loaded; from the first weight on."""
    ranges = ObservedAddresses()
    weight = ranges.place((100 if large_weight else 50) * MiB, loading=True)
    return [weight, *(ranges.place(size * MiB, loading=False) for size in sizes)]


def test_a_new_range_lies_below_all_others() -> None:
    found = put(200, 300, 1000)
    assert found == sorted(found, reverse=True)


def test_after_a_large_weight_ranges_of_128_mib_lie_above_it() -> None:
    weight, first, large, second, other = put(40, 200, 40, 40)
    assert large < weight < second < first
    assert other < large, "of 128 MiB nothing was left"


def test_the_rest_of_a_range_of_32_mib_is_filled_upwards() -> None:
    weight, large, first, second, other = put(200, 20, 4, 4)
    assert large < first < second < weight
    assert other > weight, "of 224 MiB nothing was left"


def test_the_newest_gap_comes_first() -> None:
    older, newer, in_gap = put(50, 50, 12)[1:]
    assert newer < in_gap < older


def test_while_weights_are_loaded_every_other_range_takes_the_place_of_the_cpu_copy() -> None:
    ranges = ObservedAddresses()
    weight, *others = [ranges.place(30 * MiB, loading=True) for _ in range(5)]
    assert [other > weight for other in others] == [True, False, True, False]


def test_after_loading_a_segment_lies_above_the_weights_unless_the_weight_is_large() -> None:
    weight, segment = put(300, large_weight=False)
    assert segment > weight
    weight, segment = put(300)
    assert segment < weight


def test_blocks_of_two_segments_never_merge() -> None:
    """They lie in one range, side by side; both are free, and what neither can hold alone needs a third."""
    first, second = put(40, 12, 12)[2:]
    assert second - first > 12 * MiB
    script = [("weight", 100 * MiB), "weight", *((name, 10 * MiB) for name in "ab"), *"ab"]
    assert replay(tape(*script)).reserved == 100 * MiB
    script = [("weight", 100 * MiB), *((name, 10 * MiB) for name in "ab"), *"ab"]
    assert replay(tape(*script, ("c", 20 * MiB))).reserved == 140 * MiB


def test_other_orders_put_large_segments_down_or_all_up() -> None:
    for descending_from, large_goes_down in ((MIN_LARGE_ALLOC, True), (NO_LIMIT, False)):
        other = MonotonicAddresses(descending_from)
        small, large = ([other.place(size * MiB, loading=True) for _ in range(3)] for size in (2, 20))
        assert small == sorted(small)
        assert large == sorted(large, reverse=large_goes_down)
