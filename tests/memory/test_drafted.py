"""Two shallow runs tell what a deep one holds."""

from __future__ import annotations

import random
from functools import partial

import pytest

from fitgpt.memory import nanogpt
from fitgpt.memory.allocator import Timeline
from fitgpt.memory.drafted import drafted
from fitgpt.memory.nanorun import NanoGPTRun

short = partial(nanogpt.write, eval_batches=1, iterations=2, micro_steps=2)


def by_chance(seed: int, compiled: bool) -> NanoGPTRun:
    chance = random.Random(seed)
    heads = chance.choice((3, 12, 16))
    return NanoGPTRun(n_layer=chance.choice((13, 17, 24)), n_head=heads, n_embd=heads * chance.choice((32, 48, 64)),
                      batch_size=chance.choice((1, 2, 12)), block_size=chance.choice((128, 512, 1024)),
                      compile=compiled, bias=chance.random() < 0.5, dropout=chance.choice((0.0, 0.1)),
                      dtype=chance.choice(("bfloat16", "float16", "float32")),
                      gradient_accumulation_steps=chance.choice((1, 8)))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_the_highest_point_of_a_deep_run_is_that_of_two_shallow_ones_and_what_a_layer_adds(seed: int,
                                                                                          compiled: bool) -> None:
    run = by_chance(seed, compiled)
    tape = short(run)
    peaks = {phase: peak.allocated for phase, peak in Timeline(tape, tape.changes, [], None).peaks().items()}
    told = {phase: highest.allocated for phase, highest in drafted(run, short).items()}
    assert told.keys() == peaks.keys()
    assert max(told.values()) == pytest.approx(max(peaks.values()), rel=0.02 if compiled else 0.001)
    for phase in ("load", "first_eval", "step", "eval"):
        assert told[phase] == pytest.approx(peaks[phase], rel=1e-4), phase


def test_owners_add_up_to_what_is_allocated() -> None:
    for highest in drafted(by_chance(1, True), short).values():
        assert sum(highest.owners.values()) == highest.allocated
