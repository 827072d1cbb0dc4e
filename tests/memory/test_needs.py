"""The smallest cap is found with few replays; the shortcuts change nothing of the answer."""

from __future__ import annotations

import pytest

from fitgpt.config import RunConfig
from fitgpt.memory import allocator
from fitgpt.memory.allocator import needs, replay
from fitgpt.memory.blocks import ROUND_SEGMENT, rounded, segment_size
from fitgpt.memory.forecast import settled, tape_of
from fitgpt.memory.setting import Setting
from fitgpt.memory.tape import Tape

SMALL = dict(n_layer=3, n_head=4, n_embd=128, batch_size=4, block_size=128, vocab_size=50304)


def by_trying_every_cap(tape: Tape, expandable: bool) -> int:
    """The same bisection, with a replay for each cap."""
    free_run = replay(tape, expandable=expandable)
    enough = free_run.reserved
    if expandable:
        enough += max(segment_size(rounded(event.nbytes)) for event in tape.events)
    too_little = max(free_run.allocated) // ROUND_SEGMENT * ROUND_SEGMENT - ROUND_SEGMENT
    while enough - too_little > ROUND_SEGMENT:
        cap = (enough + too_little) // 2 // ROUND_SEGMENT * ROUND_SEGMENT
        tried = replay(tape, cap, expandable=expandable)
        if tried.failed is not None:
            too_little = cap
        else:
            enough = cap if expandable else tried.reserved
    return enough


def tape(trainer: str, **knobs: object) -> Tape:
    config, setting = RunConfig(**{**SMALL, **knobs}), Setting((8, 9))  # type: ignore[arg-type]
    return tape_of(settled(config, setting), setting, trainer)


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
@pytest.mark.parametrize("knobs", [dict(compile=True), dict(compile=False), dict(compile=False, dropout=0.1, n_layer=6),
                                   dict(dtype="float32", recompute="input"), dict(batch_size=16, vocab_size=64)],
                         ids=str)
def test_the_smallest_cap_is_the_one_that_trying_them_finds(expandable: bool, trainer: str,
                                                           knobs: dict[str, object]) -> None:
    written = tape(trainer, **knobs)
    assert needs(written, expandable=expandable) == by_trying_every_cap(written, expandable)


def test_most_caps_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(allocator, "replay",
                        lambda tape, cap=None, **more: tried.append(cap) or replay(tape, cap, **more))
    written = tape("nanogpt", compile=False, batch_size=16)
    by_trying = sum(1 for _ in range(ROUND_SEGMENT, replay(written).reserved, ROUND_SEGMENT)).bit_length()
    needs(written)
    assert len(tried) < by_trying / 2
