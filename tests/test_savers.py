"""The savers' table: nested levels, and the words that choose them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fitgpt.config.fields import walk
from fitgpt.config.memory_savers import KEEPS, LEVELS, SAVERS, Saver, parse_levels
from fitgpt.config.run_config import RunConfig, resolve
from fitgpt.core.errors import UsageError


def test_each_level_keeps_a_part_of_what_the_one_before_keeps() -> None:
    for more, less in pairwise(LEVELS):
        assert KEEPS[less] < KEEPS[more]


@pytest.mark.parametrize(("text", "levels"), [
    ("products", ["products"] * 3), (" input ", ["input"] * 3), ("1*input,2*all", ["input", "all", "all"]),
    ("2 * no_wide, 1*attention", ["no_wide", "no_wide", "attention"]), ("3*all", ["all"] * 3)])
def test_levels_are_named_for_all_layers_or_counted(text: str, levels: list[str]) -> None:
    assert parse_levels(text, 3) == levels


@pytest.mark.parametrize(("text", "says"), [
    ("produkts", "must be one of all, products"), ("2*input", "names 2 layers, and there are 3"),
    ("x*input", "must be one of"), ("input,all", "must be one of"), ("-1*input,4*all", "must be one of"),
    ("2*input,2*all", "names 4 layers")])
def test_words_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="recompute") as refusal:
        RunConfig(n_layer=3, n_head=1, n_embd=8, recompute=text)
    assert says in refusal.value.what


def test_grad_checkpoint_means_that_every_layer_keeps_its_input_only() -> None:
    assert RunConfig(grad_checkpoint=True).levels == ("input",) * 12
    assert RunConfig().levels == ("products",) * 12


def test_every_saver_is_a_flag_that_train_takes() -> None:
    without = RunConfig(recompute="all", casts="kept", gradients="kept", states="late")
    for saver in SAVERS:
        knob = saver.flag.removeprefix("--").partition("=")[0]
        assert getattr(taken(saver.flag, *SUITS.get(saver.flag, ())), knob) != getattr(without, knob)
        assert saver.saves
        assert saver.costs


def test_every_level_that_keeps_less_is_a_saver() -> None:
    told = [saver.flag for saver in SAVERS if "recompute" in saver.flag]
    assert told == [f"--recompute={level}" for level in LEVELS[1:]]


@pytest.mark.parametrize("saver", [saver for saver in SAVERS if saver.needs], ids=lambda saver: saver.flag)
def test_what_a_saver_needs_is_asked_for_and_the_fix_that_is_named_will_do(saver: Saver) -> None:
    for condition in saver.needs.split(", "):
        knob = condition.replace("=", " ").split()[0]
        flags = [saver.flag, *(each for each in SUITS.get(saver.flag, ()) if knob not in each), OTHERWISE[knob]]
        allowed = condition.partition("=")[2].split(" or ")
        assert OTHERWISE[knob].partition("=")[2] not in allowed
        with pytest.raises(UsageError) as refusal:
            taken(*flags)
        taken(*flags, *refusal.value.fix.split())


def taken(*flags: str) -> RunConfig:
    return resolve(walk(flags, RunConfig))[0]


SUITS = {"--step_in_backward": ("--gradient_accumulation_steps=1", "--grad_clip=0"),
         "--adam8bit=bitsandbytes": ("--optimizer=adam8bit",)}
OTHERWISE = {"optimizer": "--optimizer=muon", "offload": "--offload=optimizer", "weights": "--weights=bfloat16",
             "dtype": "--dtype=float16", "gradient_accumulation_steps": "--gradient_accumulation_steps=2",
             "grad_clip": "--grad_clip=1", "gradients": "--gradients=kept", "states": "--states=late",
             "step_in_backward": "--step_in_backward=True"}
