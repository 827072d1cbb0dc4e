"""Shallow runs tell what a deep one holds."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.memory import nanogpt
from fitgpt.memory.allocator import Timeline
from fitgpt.memory.drafted import drafted
from fitgpt.memory.nanorun import NanoGPTRun
from fitgpt.memory.setting import Setting
from fitgpt.memory.tape import Tape
from fitgpt.planning.forecast import draft, settled, tape_of


def short(run: NanoGPTRun, layers: int = 0) -> Tape:
    asked = run.gradient_accumulation_steps
    return nanogpt.write(replace(run, n_layer=layers or run.n_layer), eval_batches=(2, 2),
                         history=(min(asked, 2 + asked % 2),) * 2)


def by_chance(seed: int, compiled: bool) -> NanoGPTRun:
    chance = random.Random(seed)
    heads = chance.choice((3, 12, 16))
    return NanoGPTRun(n_layer=chance.choice((13, 17, 24)), n_head=heads, n_embd=heads * chance.choice((32, 48, 64)),
                      batch_size=chance.choice((1, 2, 12)), block_size=chance.choice((128, 512, 1024)),
                      compile=compiled, bias=chance.random() < 0.5, dropout=chance.choice((0.0, 0.1)),
                      dtype=chance.choice(("bfloat16", "float16", "float32")),
                      gradient_accumulation_steps=chance.choice((1, 3, 8)),
                      vocab_size=chance.choice((256, 8192, 50304)))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_the_highest_point_of_a_deep_run_is_told_by_shallow_ones(seed: int, compiled: bool) -> None:
    run = by_chance(seed, compiled)
    tape = short(run)
    peaks = {phase: peak.allocated for phase, peak in Timeline(tape, tape.changes, [], None).peaks().items()}
    drawn = drafted(run.n_layer, partial(short, run), reuses=compiled)
    told = {phase: highest.allocated for phase, highest in drawn.items()}
    assert told.keys() == peaks.keys()
    assert max(told.values()) == pytest.approx(max(peaks.values()), rel=0.01)
    assert 0.99 <= max(told.values()) / max(nanogpt.write(run).heights) <= 1.01
    for phase in ("load", "first_eval", "step", "eval"):
        assert told[phase] == pytest.approx(peaks[phase], rel=1e-4), phase


def test_owners_add_up_to_what_is_allocated() -> None:
    for highest in drafted(24, partial(short, by_chance(1, True))).values():
        assert sum(highest.owners.values()) == highest.allocated


@pytest.mark.parametrize("knobs", [
    dict(), dict(compile=False, bias=True, dropout=0.1, dtype="float16"), dict(recompute="input", residual="bfloat16"),
    dict(optimizer="muon", gradient_accumulation_steps=1), dict(grad_checkpoint=True, casts="kept"),
    dict(weights="bfloat16", optimizer="adam8bit", compile=False), dict(offload="gradients"),
    dict(step_in_backward=True, gradient_accumulation_steps=1, grad_clip=0.0, compile=False), dict(offload="optimizer"),
    dict(recompute="14*no_wide", gradients="kept", states="late", cuda_graphs=False)], ids=str)
def test_so_it_is_with_fitgpts_own(knobs: dict[str, Any]) -> None:
    setting = Setting((8, 9))
    config = settled(RunConfig(n_layer=14, n_head=8, n_embd=512, batch_size=4, vocab_size=50304, **knobs), setting)
    tape = tape_of(config, setting)
    for phase, peak in Timeline(tape, tape.changes, [], None).peaks().items():
        assert draft(config, setting)[phase].allocated == pytest.approx(peak.allocated, rel=0.002), phase
