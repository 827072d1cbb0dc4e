"""A step drawn with fewer points keeps its peak, its owners and its phases."""

from __future__ import annotations

import pytest

from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.core.units import MiB
from fitgpt.memory.platform import Platform
from fitgpt.memory.tape import OWNERS, Writer
from fitgpt.memory.timeline import Timeline, chart_points, replay
from fitgpt.planning.forecast import one_step, replay_run

SMALL = RunConfig(n_layer=4, n_head=4, n_embd=128, batch_size=4, block_size=128, vocab_size=1024)


@pytest.fixture(params=[("nanogpt", False), ("nanogpt", True), ("fitgpt", False), ("fitgpt", True)], ids=str)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    trainer, compiled = request.param
    run = resolve_run(RunConfig(**{**SMALL.to_dict(), "compile": compiled}), Platform((8, 9)), trainer)
    return replay_run(run, Platform((8, 9)), trainer)


@pytest.mark.parametrize("most", [10, 60, 100_000])
def test_the_peak_of_training_is_kept_to_the_byte(timeline: Timeline, most: int) -> None:
    drawn, peaks = one_step(timeline, most), timeline.peaks()
    highest = max(peaks[phase].allocated for phase in ("first_train", "train", "step"))
    totals = [sum(point) for point in drawn.points]
    assert totals[drawn.peak] == max(totals) == highest
    assert len(totals) <= most


def test_the_owners_at_the_peak_are_those_of_the_tape(timeline: Timeline) -> None:
    drawn, peaks = one_step(timeline), timeline.peaks()
    highest = max((peaks[phase] for phase in ("first_train", "train", "step")), key=lambda peak: peak.allocated)
    held = dict(zip(drawn.owners, drawn.points[drawn.peak], strict=True))
    assert {owner: nbytes for owner, nbytes in held.items() if nbytes} == timeline.owners_at(highest.event)


def test_a_step_begins_with_training_and_ends_with_the_optimizer(timeline: Timeline) -> None:
    drawn = one_step(timeline, 60)
    assert drawn.marks[0] == (0, "training")
    if timeline.peaks()["train"].allocated >= timeline.peaks()["first_train"].allocated:
        (at, name), = drawn.marks[1:]
        assert name == "step"
        assert drawn.peak < at < len(drawn.points)


def test_every_point_is_a_moment_of_the_tape_in_its_order() -> None:
    writer = Writer()
    writer.phase("eval")
    for number in range(50):
        writer.alloc(str(number), "activations" if number % 2 else "logits", (number % 7 + 1) * MiB)
        if number % 3 == 2:
            writer.free(str(number - 1))
    timeline = replay(writer.tape())
    drawn = chart_points(timeline, 10, 60, (("eval", 10),), most=20)
    moments = iter(timeline.allocated[10:60])
    assert all(sum(point) in moments for point in drawn.points)  # each is found after the one before it
    assert len(drawn.points) <= 20
    assert drawn.owners == OWNERS


def test_where_nothing_trains_the_highest_phase_is_drawn() -> None:
    writer = Writer()
    writer.phase("load")
    writer.alloc("weights", "weights", 5 * MiB)
    writer.phase("sample")
    writer.alloc("keys", "activations", 3 * MiB)
    drawn = one_step(replay(writer.tape()))
    assert drawn.marks == ((0, "sample"),)
    assert sum(drawn.points[drawn.peak]) == 8 * MiB
