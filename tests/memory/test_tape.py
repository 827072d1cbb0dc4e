"""A tape can only say what can happen, and its sums are what was written."""

from __future__ import annotations

import pytest

from fitgpt.memory.tape import DEFAULT_POOL, GRAPH_POOL, Event, Span, SpanCost, Writer


def test_events_are_in_the_order_written_and_phases_span_them() -> None:
    writer = Writer()
    writer.phase("load")
    writer.alloc("a", "weights", 10)
    writer.phase("train")
    writer.alloc("b", "logits", 20)
    writer.free("a")
    tape = writer.tape()
    assert tape.events == (Event(True, "a", "weights", 10), Event(True, "b", "logits", 20),
                           Event(False, "a", "weights", 10))
    assert tape.phases == (Span("load", 0, 1), Span("train", 1, 3))


def test_a_name_can_be_reused_after_its_free_but_not_before() -> None:
    writer = Writer()
    writer.phase("load")
    writer.alloc("a", "other", 1)
    with pytest.raises(ValueError, match="already alive"):
        writer.alloc("a", "other", 1)
    writer.free("a")
    writer.alloc("a", "other", 2)
    assert [event.nbytes for event in writer.tape().events] == [1, 1, 2]


def test_a_tensor_that_is_not_alive_cannot_be_freed() -> None:
    writer = Writer()
    writer.free_if_alive("a")
    with pytest.raises(ValueError, match="not alive"):
        writer.free("a")


def test_an_unknown_owner_is_an_error_and_any_phase_is_allowed() -> None:
    writer = Writer()
    writer.phase("warmup")
    with pytest.raises(ValueError, match="not an owner"):
        writer.alloc("a", "nobody", 1)


def test_scratch_is_freed_at_the_end_of_its_with_block() -> None:
    writer = Writer()
    writer.phase("train")
    with writer.scratch("scratch", "workspace", 5) as name:
        assert writer.alive(name)
    assert not writer.alive("scratch")
    assert [event.alloc for event in writer.tape().events] == [True, False]


def test_a_tape_begins_with_a_phase() -> None:
    writer = Writer()
    writer.alloc("a", "other", 1)
    writer.phase("load")
    with pytest.raises(ValueError, match="begins with a phase"):
        writer.tape()


def test_a_span_costs_what_it_adds_at_its_end_and_at_its_peak() -> None:
    writer = Writer()
    writer.phase("train")
    writer.alloc("weights", "weights", 4096)
    with writer.span("forward"):
        with writer.span("layer 0"):
            writer.alloc("saved", "activations", 1024)
            with writer.scratch("scratch", "workspace", 5120):
                pass
        writer.free("weights")
    tape = writer.tape()
    assert tape.spans == (Span("forward", 1, 5), Span("layer 0", 1, 4))
    assert tape.span_costs() == [SpanCost("forward", 1024 - 4096, 6144), SpanCost("layer 0", 1024, 6144)]


def test_the_cost_of_a_span_can_be_read_per_pool() -> None:
    writer = Writer()
    writer.phase("train")
    with writer.span("step"):
        writer.alloc("a", "other", 512)
        writer.pool = GRAPH_POOL
        writer.alloc("b", "other", 1024)
    tape = writer.tape()
    assert tape.span_costs([DEFAULT_POOL]) == [SpanCost("step", 512, 512)]
    assert tape.span_costs([GRAPH_POOL]) == [SpanCost("step", 1024, 1024)]


def test_a_copied_section_has_its_own_names_spans_and_tensors() -> None:
    writer = Writer()
    writer.phase("train")
    for batch in ("first", "second"):
        def write(batch: str = batch) -> None:
            with writer.span("batch"):
                writer.alloc(batch, "data", 5)

        writer.section("batch", (batch,), write)
    tape = writer.tape()
    assert [event.name for event in tape.events] == ["first", "second"]
    assert tape.spans == (Span("batch", 0, 1), Span("batch", 1, 2))
    assert writer.alive("first")
    assert writer.alive("second")
