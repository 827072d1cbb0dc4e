"""A replay passes over micro-batches that meet large blocks as earlier ones did, and says what it would have said."""

from __future__ import annotations

from functools import partial

import pytest

from fitgpt.core.units import MiB
from fitgpt.memory import repeats
from fitgpt.memory.allocator import _changes, needs, replay
from fitgpt.memory.expandable import Expandable
from fitgpt.memory.nanogpt import write
from fitgpt.memory.nanorun import NanoGPTRun
from fitgpt.memory.native import Native
from fitgpt.memory.tape import Tape, Writer

MANY = NanoGPTRun(n_layer=2, n_head=4, n_embd=256, batch_size=4, block_size=512, gradient_accumulation_steps=12,
                  compile=False)


@pytest.fixture(autouse=True)
def nothing_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "SHORT", 0)


def all_followed(tape: Tape, cap: int | None = None) -> tuple[int | None, int, dict[int, int]]:
    allocator, extra = Native(), dict[int, int]()
    failed = allocator.follow(tape.steps, 0, len(tape.steps), cap, extra, [])
    return failed, allocator.reserved, extra


@pytest.mark.parametrize("run", [
    MANY, NanoGPTRun(n_layer=3, n_head=4, n_embd=256, batch_size=8, block_size=256, gradient_accumulation_steps=9,
                     compile=True, dropout=0.1, bias=True, dtype="float16"),
    NanoGPTRun(n_layer=4, n_head=6, n_embd=384, batch_size=16, block_size=512, gradient_accumulation_steps=7,
               compile=False)], ids=["eager", "compiled", "eager, of an odd number"])
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
    assert passing.changes == _changes(tape, extra)


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
    assert len(tape.chained) == 7
    assert timeline.changes == [12 * MiB, 12 * MiB, -12 * MiB] + 7 * [12 * MiB, 40 * MiB, -12 * MiB, -40 * MiB]
    assert timeline.allocated[-1] == 12 * MiB


@pytest.mark.parametrize("allocator", [Native, Expandable])
def test_what_was_met_under_another_name_is_passed_over_and_has_its_name_afterwards(
        allocator: type[Native] | type[Expandable], monkeypatch: pytest.MonkeyPatch) -> None:
    w, asked = Writer(), list[int]()
    w.phase("train")
    w.alloc("0", "other", 30 * MiB)
    for number in range(9):
        before, after = str(number % 3), str((number + 1) % 3)

        def turn(before: str = before, after: str = after) -> None:
            w.alloc(after, "other", 30 * MiB)
            w.free(before)

        w.part("turn", (before, after), turn)
    w.free("0")
    own = allocator.follow

    def counted(self: Native, steps: object, begin: int, stop: int, *rest: object, **more: object) -> int | None:
        asked.append(stop - begin)
        return own(self, steps, begin, stop, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(allocator, "follow", counted)
    follower = allocator()
    assert repeats.follow(follower, repeats.track(w.tape()), 0, None, {}, []) is None
    assert sum(asked) < 12  # of 20
    assert follower.reserved == 60 * MiB
    assert follower._taken == {}


def taken(tape: Tape, allocator: type[Native] | type[Expandable]) -> tuple[object, object]:
    """Where tensors lie at the end: with what repeats passed over, and with all followed."""
    passing, following = allocator(), allocator()
    assert repeats.follow(passing, repeats.track(tape), 0, None, {}, []) is None
    following.follow(tape.steps, 0, len(tape.steps), None, {}, [])
    return passing._taken, following._taken


@pytest.mark.parametrize("repeats_itself", [True, False])
@pytest.mark.parametrize("allocator", [Native, Expandable])
def test_what_comes_between_parts_is_followed_and_so_are_parts_that_are_not_met_alike(
        allocator: type[Native] | type[Expandable], repeats_itself: bool) -> None:
    w = Writer()
    w.phase("train")
    for number in range(8):
        if number == 5:
            w.alloc("between", "other", 30 * MiB)
        names = () if repeats_itself else (f"kept {number}",)

        def write(names: tuple[str, ...] = names) -> None:
            w.free(*[w.alloc(name, "other", 30 * MiB) for name in ("a", "b")])
            for name in names:
                w.alloc(name, "other", 30 * MiB)

        w.part("one", names, write)
    passing, following = taken(w.tape(), allocator)
    assert passing == following


@pytest.mark.parametrize("times", [6, 7])
@pytest.mark.parametrize("allocator", [Native, Expandable])
def test_two_that_change_places_are_told_apart(allocator: type[Native] | type[Expandable], times: int) -> None:
    w = Writer()
    w.phase("train")
    for name in ("a", "wall", "b", "other wall"):
        w.alloc(name, "other", 30 * MiB)

    def change(first: str, second: str) -> None:
        w.free("a", "b")
        w.alloc(first, "other", 30 * MiB)
        w.alloc(second, "other", 30 * MiB)

    for number in range(times):
        w.part(number % 2, (), partial(change, *("ab" if number % 2 else "ba")))
    passing, following = taken(w.tape(), allocator)
    assert passing == following


@pytest.mark.parametrize("allocator", [Native, Expandable])
def test_small_tensors_that_a_part_leaves_behind_are_all_there(allocator: type[Native] | type[Expandable]) -> None:
    w, names = Writer(), [f"kept {number}" for number in range(6)]
    w.phase("train")
    for name in names:
        w.part("one", (name,), partial(w.alloc, name, "other", 600))
    passing, following = taken(w.tape(), allocator)
    assert passing == following


def test_a_cap_is_enough_or_not_whatever_is_passed_over() -> None:
    tape = write(MANY)
    least = needs(tape)
    assert replay(tape, least).failed is None
    assert all_followed(tape, least)[0] is None
    assert replay(tape, least - 2 * MiB).failed is not None
    assert all_followed(tape, least - 2 * MiB)[0] is not None
