"""A replay passes over micro-batches that meet large blocks as earlier ones did, and says what it would have said."""

from __future__ import annotations

import pytest

from fitgpt.memory import repeats
from fitgpt.memory.allocator import Timeline, needs, replay
from fitgpt.memory.expandable import Expandable
from fitgpt.memory.nanogpt import write
from fitgpt.memory.nanorun import NanoGPTRun
from fitgpt.memory.native import Native
from fitgpt.memory.tape import Tape, Writer
from fitgpt.units import MiB

MANY = NanoGPTRun(n_layer=2, n_head=4, n_embd=256, batch_size=4, block_size=512, gradient_accumulation_steps=12,
                  compile=False)


def all_followed(tape: Tape, cap: int | None = None) -> tuple[int | None, int, dict[int, int]]:
    allocator, extra = Native(), dict[int, int]()
    failed = allocator.follow(tape.steps, 0, len(tape.steps), cap, extra, [])
    return failed, allocator.reserved, extra


def figures(timeline: Timeline) -> dict[str, tuple[int, int]]:
    return {phase: (peak.allocated, peak.reserved) for phase, peak in timeline.peaks().items()}


@pytest.mark.parametrize("run", [
    MANY, NanoGPTRun(n_layer=3, n_head=4, n_embd=256, batch_size=8, block_size=256, gradient_accumulation_steps=9,
                     compile=True, dropout=0.1, bias=True, dtype="float16")], ids=["eager", "compiled"])
def test_what_is_passed_over_changes_nothing_but_small_segments(run: NanoGPTRun,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    tape, asked = write(run, history=(run.gradient_accumulation_steps,) * 4), 0
    own = Native.follow

    def counted(self: Native, steps: object, begin: int, stop: int, *rest: object, **more: object) -> int | None:
        nonlocal asked
        asked += stop - begin
        return own(self, steps, begin, stop, *rest, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Native, "follow", counted)
        passing = replay(tape)
    assert asked < 0.7 * len(tape.steps)  # if nothing is passed over, this compares nothing
    failed, reserved, extra = all_followed(tape)
    assert failed is None
    assert abs(passing.reserved - reserved) <= 2 * MiB
    assert sum(extra.values()) == sum(passing.changes) - sum(tape.changes)


def test_what_large_blocks_have_too_much_is_so_in_what_is_passed_over() -> None:
    w = Writer()
    w.phase("train")
    w.alloc("gap", "other", 12 * MiB)
    w.alloc("wall", "other", 12 * MiB)
    w.free("gap")
    for _ in range(7):
        w.part("one", (), lambda: (w.alloc("a", "other", 11 * MiB + MiB // 2), w.alloc("b", "other", 40 * MiB),
                                   w.free("a"), w.free("b")))
    tape = w.tape()
    timeline = replay(tape)
    assert len(tape.looks) == 7
    assert timeline.changes == [12 * MiB, 12 * MiB, -12 * MiB] + 7 * [12 * MiB, 40 * MiB, -12 * MiB, -40 * MiB]
    assert timeline.allocated[-1] == 12 * MiB


@pytest.mark.parametrize("allocator", [Native, Expandable])
def test_parts_that_are_not_met_alike_are_all_followed(allocator: type[Native] | type[Expandable]) -> None:
    w, names = Writer(), [f"kept {number}" for number in range(5)]
    w.phase("train")
    for name in names:
        w.part("one", (name,), lambda name=name: w.alloc(name, "other", 30 * MiB))  # type: ignore[misc]
    follower = allocator()
    repeats.follow(follower, repeats.track(w.tape()), 0, None, {}, [])
    assert follower.reserved >= 150 * MiB


def test_a_cap_is_enough_or_not_whatever_is_passed_over() -> None:
    tape = write(MANY)
    least = needs(tape)
    assert replay(tape, least).failed is None
    assert all_followed(tape, least)[0] is None
    assert replay(tape, least - 2 * MiB).failed is not None
    assert all_followed(tape, least - 2 * MiB)[0] is not None
