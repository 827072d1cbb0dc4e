"""The closed forms say what the tape says: allocated to the byte, needs within bounds that are never too low."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from fitgpt.config.memory_savers import LEVELS
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import UsageError
from fitgpt.core.units import MiB
from fitgpt.hardware import gpus
from fitgpt.memory import gpt
from fitgpt.memory.allocator import needs, replay
from fitgpt.memory.blocks import rounded
from fitgpt.memory.setting import Setting, setting_for
from fitgpt.memory.tape import RELEASE, Tape
from fitgpt.planning import folded
from fitgpt.planning.candidates import Field, Scanned
from fitgpt.planning.closed import MOST_LOST, PAGE, Lost, in_words, mix_of
from fitgpt.planning.forecast import settled
from fitgpt.planning.permission import ways

RUNS = 160
SETTINGS = tuple(setting_for(gpus.find(name)) for name in ("4070", "h200", "t4"))


def random_run(dice: random.Random) -> tuple[RunConfig, Setting]:
    """Any saver, any mix of levels, sizes from a toy's to a few hundred MiB."""
    setting = dice.choice(SETTINGS)
    layers, heads = dice.randint(1, 5), dice.choice((2, 4, 6, 8))
    first = dice.randint(0, layers)
    levels = [f"{count}*{dice.choice(LEVELS)}" for count in (first, layers - first) if count]
    knobs: dict[str, Any] = dict(
        n_layer=layers, n_head=heads, n_embd=heads * dice.choice((64, 48, 42, 32)), recompute=",".join(levels),
        batch_size=dice.choice((1, 2, 3, 5, 8, 16)), block_size=dice.choice((64, 128, 256, 512)),
        gradient_accumulation_steps=dice.choice((1, 2, 5)), vocab_size=dice.choice((50304, 5000, 65)),
        bias=dice.random() < 0.3, dropout=dice.choice((0.0, 0.0, 0.1)), compile=dice.random() < 0.8,
        cuda_graphs=dice.choice(("auto", "auto", False)), dtype=dice.choice(("bfloat16", "float16", "float32")),
        weights=dice.choice(("float32", "float32", "bfloat16")), residual=dice.choice(("float32", "bfloat16")),
        optimizer=dice.choice(("adamw", "adamw", "adam8bit", "muon")),
        offload=dice.choice(("none", "none", "optimizer", "gradients")), loss_chunk=dice.choice((0, 0, 512)),
        eval_batch_size=dice.choice((0, 0, 1, 4)), eval_block_size=dice.choice((0, 0, 64)),
        casts=dice.choice(("brief", "brief", "kept")), gradients=dice.choice(("freed", "freed", "kept")))
    if dice.random() < 0.1:
        knobs |= dict(step_in_backward=True, grad_clip=0.0, gradient_accumulation_steps=1)
    try:
        return settled(RunConfig(**knobs), setting), setting
    except UsageError:  # two savers that exclude each other
        return random_run(dice)


@pytest.fixture(scope="module")
def runs() -> list[tuple[RunConfig, Setting, Tape]]:
    dice = random.Random(5)
    drawn = [random_run(dice) for _ in range(RUNS)]
    return [(config, setting, gpt.write(config, setting)) for config, setting in drawn]


def most_allocated(tape: Tape) -> int:
    held = most = 0
    for is_alloc, name, _, nbytes, _ in tape.events:
        if name != RELEASE:
            held += rounded(nbytes) if is_alloc else -rounded(nbytes)
            most = max(most, held)
    return most


def test_what_is_allocated_is_the_tapes_own_sum_to_the_byte(runs: list[tuple[RunConfig, Setting, Tape]]) -> None:
    for config, setting, tape in runs:
        shape = folded.Folded(setting).shape(config)
        assert shape.allocated(mix_of(config.levels)) == most_allocated(tape), config


@pytest.mark.parametrize("expandable", [True, False])
def test_no_run_needs_more_than_its_bound_or_less_than_what_it_maps(
        runs: list[tuple[RunConfig, Setting, Tape]], expandable: bool) -> None:
    """A replay under the bound gets through; one under less than what must be mapped does not."""
    for config, setting, tape in runs[::2 if expandable else 5]:
        shape = folded.Folded(replace(setting, expandable=expandable)).shape(config)
        mix = mix_of(config.levels)
        assert replay(tape, shape.needs(mix), expandable=expandable).failed is None, config
        too_little = shape.mapped(mix) - (PAGE if expandable else 0) - 1
        assert not shape.could_fit(mix, too_little)
        assert replay(tape, too_little, expandable=expandable).failed is not None, config


def test_the_bound_is_a_few_percent_above_what_a_run_of_gigabytes_needs() -> None:
    config = settled(RunConfig(n_layer=12, n_head=12, n_embd=768, batch_size=8, vocab_size=50304), SETTINGS[0])
    exact = needs(gpt.write(config, SETTINGS[0]), expandable=True)
    assert exact <= folded.needs(config, SETTINGS[0]) <= 1.08 * exact
    assert MOST_LOST[True] == Lost(80 * MiB, 7, 0.03, 0.06)


def test_a_row_of_mixes_is_each_of_them_alone(runs: list[tuple[RunConfig, Setting, Tape]]) -> None:
    for config, setting, _ in runs[:40]:
        shape, layers = folded.Folded(setting).shape(config), config.n_layer
        for few in range(len(LEVELS)):
            for many in range(len(LEVELS)):
                if few != many and layers > 1:
                    alone = [shape.mapped(((few, k), (many, layers - k))) for k in range(1, layers)]
                    assert shape.mapped_along(few, many, layers) == alone
                    assert shape.mapped_along(few, many, layers, 2) == alone[::2]


@pytest.mark.parametrize("setting", [SETTINGS[0], setting_for(gpus.find("1080 ti"))], ids=["4070", "without Triton"])
def test_parts_read_for_one_run_serve_another_of_other_depth_pieces_and_savers(setting: Setting) -> None:
    """The same Folded, asked about many runs, says of each what a fresh one says."""
    shared, dice = folded.Folded(setting), random.Random(1)
    base = settled(RunConfig(n_layer=5, n_head=4, n_embd=128, vocab_size=5000, block_size=128,
                             dtype="float32"), setting)
    savers: tuple[dict[str, Any], ...] = (
        {}, dict(offload="optimizer"), dict(offload="gradients"), dict(optimizer="adam8bit"), dict(optimizer="muon"),
        dict(optimizer="adam8bit", adam8bit="bitsandbytes"),
        dict(weights="bfloat16"), dict(weights="bfloat16", offload="optimizer"), dict(cuda_graphs=False),
        *(dict(step_in_backward=True, grad_clip=0.0, gradient_accumulation_steps=1, weights="bfloat16", optimizer=each)
          for each in ("adamw", "adam8bit")))
    for _ in range(100):
        sized = dict(n_layer=dice.randint(1, 6), batch_size=dice.choice((1, 4)), eval_batch_size=dice.choice((0, 2)),
                     gradient_accumulation_steps=dice.choice((1, 3)), loss_chunk=dice.choice((0, 64)))
        config = replace(base, **{**sized, **dice.choice(savers)})
        assert shared.shape(config) == folded.Folded(setting).shape(config)


def test_what_is_not_scanned_again_changes_nothing() -> None:
    """Of stems that differ in their evaluation alone, those that hold more have the mix of the one before."""
    config = settled(RunConfig(n_layer=7, n_head=4, n_embd=256, vocab_size=5000, block_size=256, batch_size=8,
                               gradient_accumulation_steps=4), SETTINGS[0])
    field = Field(config, SETTINGS[0], gpus.find("4070"))
    for limit in (70 * MiB, 100 * MiB, 200 * MiB, 10**12):
        scanned, anew, spared = Scanned(limit), Scanned(limit), 0
        for way in ways(config, SETTINGS[0], frozenset()):
            for branch in field.branches(way):
                for stem in field.stems(branch, limit):
                    spared += scanned._as_before(stem) is not None
                    scanned.scan(stem)
                    anew._last = None
                    anew.scan(stem)
        assert spared
        assert scanned.fastest == anew.fastest
        assert (scanned.considered, scanned.frontier()) == (anew.considered, anew.frontier())


def test_a_mix_in_words_is_what_recompute_takes() -> None:
    for told in ("products", "3*input,9*products", "1*input,10*no_wide,1*all"):
        config = RunConfig(recompute=told)
        assert in_words(mix_of(config.levels)) == told


def test_a_hundred_thousand_candidates_take_less_than_two_seconds() -> None:
    """Each time it is tried: another program's share of the cores may cost one try, not three."""
    card = gpus.find("h200")
    setting = setting_for(card)
    config = settled(RunConfig(n_layer=12, n_head=12, n_embd=768, batch_size=12, gradient_accumulation_steps=40,
                               vocab_size=50304, eval_batch_size=4), setting)
    took, considered = [], 0
    for _ in range(3):
        begun = time.process_time()
        scanned, field = Scanned(10**12), Field(config, setting, card)
        for way in ways(config, setting, frozenset()):
            for branch in field.branches(way):
                for stem in field.stems(branch):
                    scanned.scan(stem)
                    if scanned.considered > 100_000:
                        break
        took.append(time.process_time() - begun)
        considered = scanned.considered
        if took[-1] < 2:
            break
    assert considered > 100_000
    assert min(took) < 2
