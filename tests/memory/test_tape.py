"""A tape can only say what can happen, and its sums are what was written."""

from __future__ import annotations

import pytest

from fitgpt.memory.tape import Event, Mark, Writer


def test_events_stand_in_the_order_they_were_written_and_phases_span_them() -> None:
    writer = Writer()
    writer.phase("load")
    writer.alloc("a", "weights", 10)
    writer.phase("train")
    writer.alloc("b", "logits", 20)
    writer.free("a")
    tape = writer.tape()
    assert tape.events == (Event(True, "a", "weights", 10), Event(True, "b", "logits", 20),
                           Event(False, "a", "weights", 10))
    assert tape.marks == (Mark("load", 0), Mark("train", 1))
    assert list(tape.spans()) == [("load", 0, 1), ("train", 1, 3)]
    assert list(tape.alive_at_end()) == ["b"]


def test_a_name_comes_back_after_a_free_but_not_before() -> None:
    writer = Writer()
    writer.phase("load")
    writer.alloc("a", "other", 1)
    with pytest.raises(ValueError, match="already alive"):
        writer.alloc("a", "other", 1)
    writer.free("a")
    writer.alloc("a", "other", 2)
    assert [event.nbytes for event in writer.tape().events] == [1, 1, 2]


def test_what_is_not_alive_cannot_be_freed() -> None:
    writer = Writer()
    writer.free_if_alive("a")
    with pytest.raises(ValueError, match="not alive"):
        writer.free("a")


def test_owners_and_phases_are_words_of_the_list() -> None:
    writer = Writer()
    with pytest.raises(ValueError, match="not a phase"):
        writer.phase("warmup")
    with pytest.raises(ValueError, match="not an owner"):
        writer.alloc("a", "nobody", 1)


def test_scratch_lives_as_long_as_its_with() -> None:
    writer = Writer()
    writer.phase("train")
    with writer.held("scratch", "workspace", 5) as name:
        assert writer.alive(name)
    assert not writer.alive("scratch")
    assert [event.alloc for event in writer.tape().events] == [True, False]


def test_a_tape_begins_with_a_phase() -> None:
    writer = Writer()
    writer.alloc("a", "other", 1)
    writer.phase("load")
    with pytest.raises(ValueError, match="begins with a phase"):
        writer.tape()
