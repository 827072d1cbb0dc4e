"""Which single changes would make a run smaller, and what does each one save?

A change is a config beside the one it changes; its flags are the difference between the two.
Changes of one family are in order: each saves more than the one before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isqrt
from typing import Any, NamedTuple

from ..config.fields import parse_value, shown
from ..config.memory_savers import LEVELS, SAVERS, loss_piece_tokens
from ..config.run_config import DEFAULT_VOCAB, RunConfig
from ..core.errors import UsageError
from ..memory.allocator import needs, replay
from ..memory.setting import Setting
from ..memory.tape import Tape
from ..nouns import Budget, Change, PricedChange
from .forecast import held_at_least, settled, tape_of

TRAINING, EVALUATION = ("first_train", "train", "step"), ("first_eval", "eval")
SMALLEST_PIECE = 128  # savers.loss_piece_tokens goes no lower by itself


class Option(NamedTuple):
    change: Change
    config: RunConfig


class Holdings(NamedTuple):
    """What a run holds, without the words: bytes allocated in each phase, and the smallest cap that will do."""

    phases: dict[str, int]
    needs: int

    def most_in(self, phases: tuple[str, ...]) -> int:
        return max((held for phase, held in self.phases.items() if phase in phases), default=0)


# ---- the changes


def single_changes(config: RunConfig, trainer: str = "fitgpt", *, compiles: bool = True) -> tuple[Option, ...]:
    """All that apply to this config, the exact ones first. `compiles`: whether the card can run what is compiled."""
    found = _of_nanogpt(config) if trainer == "nanogpt" else _of_fitgpt(config)
    options = [option for option in found if option is not None and (compiles or option.change.family != "compile")]
    return tuple(sorted(options, key=lambda option: not option.change.exact))  # a stable sort: families stay together


Found = Iterator[Option | None]


def _of_fitgpt(config: RunConfig) -> Found:
    yield from _batches(config, "fitgpt")
    yield from _recompute(config)
    yield from _evaluation(config)
    yield from _pieces(config)
    if config.compile is False:
        yield _option(config, "compile", "the temporaries between two products", "a slower start",
                      compile=True)
    for saver in SAVERS:
        knob, _, text = saver.flag.removeprefix("--").partition("=")
        if knob not in ("recompute", "loss_chunk", "adam8bit"):  # which saves what optimizer=adam8bit does
            value = parse_value(RunConfig, knob, text or "True")
            knobs = {knob: value, **_conditions(knob, value)}
            family = text if knob == "optimizer" else knob  # of two optimizers neither is more of the other
            costs = f"{saver.costs}{_other_steps(config, knobs)}"
            yield _option(config, family, _a_parameter(saver.saves), costs, exact=saver.exact, **knobs)
    yield from _blocks(config, "fitgpt")


def _of_nanogpt(config: RunConfig) -> Found:
    yield from _batches(config, "nanogpt")
    if not config.compile:
        yield _option(config, "compile", "float32 copies of logits and norms", "a slower start",
                      trainer="nanogpt", compile=True)
    yield Option(Change(("--trainer=fitgpt",), "all logits but those of a few tokens, and half of what each layer "
                        "keeps: the same model and precision, the data in another order", True, True,
                        "the time to recompute, which nanoGPT does not do"
                        if config.grad_checkpoint or config.recompute != RunConfig.recompute else "nothing",
                        "trainer", "fitgpt"), config)
    yield _option(config, "accumulation", "a second set of gradients beside the first",
                  f"steps of {config.gradient_accumulation_steps} times fewer tokens", exact=False, trainer="nanogpt",
                  gradient_accumulation_steps=1)
    yield from _blocks(config, "nanogpt")


def _batches(config: RunConfig, trainer: str) -> Found:
    """The same tokens a step and the same evaluation, in smaller pieces. Dropout's masks are drawn for a micro-batch,
    so they change."""
    batch = config.batch_size
    for smaller in _divided(batch):
        times = batch // smaller
        yield _option(config, "batch", "the activations of the other sequences", "smaller matrix products",
                      exact=not config.dropout, trainer=trainer, batch_size=smaller,
                      gradient_accumulation_steps=config.gradient_accumulation_steps * times,
                      eval_iters=config.eval_iters * times)


def _recompute(config: RunConfig) -> Found:
    told = {saver.flag: saver for saver in SAVERS}
    most_kept = min(LEVELS.index(level) for level in config.levels)
    for level in LEVELS[most_kept + 1:]:
        saver = told[f"--recompute={level}"]
        yield _option(config, "recompute", saver.saves, saver.costs, recompute=level, grad_checkpoint=False)


def _evaluation(config: RunConfig) -> Found:
    for smaller in _divided(config.eval_batch):
        yield _option(config, "evaluation", "what the other windows of an evaluation hold",
                      "a slower evaluation", eval_batch_size=smaller)


def _pieces(config: RunConfig) -> Found:
    piece = loss_piece_tokens(config.batch_size * config.block_size, config.vocab_size or DEFAULT_VOCAB,
                              config.loss_chunk)
    for smaller in (piece // 2, piece // 4):
        if smaller >= SMALLEST_PIECE:
            yield _option(config, "loss", "the logits of the other tokens", "smaller matrix products",
                          loss_chunk=smaller)


def _blocks(config: RunConfig, trainer: str) -> Found:
    """Attention sees half as far: another model, and another loss."""
    half = config.block_size // 2
    if half:
        yield _option(config, "block", "half of the activations: the model sees half as far",
                      "smaller matrix products", exact=False, comparable=False, trainer=trainer, block_size=half,
                      gradient_accumulation_steps=2 * config.gradient_accumulation_steps,
                      eval_block_size=min(config.eval_block_size, half))


def _conditions(knob: str, value: Any) -> dict[str, Any]:
    """What a saver needs besides its own flag."""
    if knob == "step_in_backward":
        return {"gradient_accumulation_steps": 1, "grad_clip": 0.0, "gradients": "freed", "states": "early"}
    if knob == "offload":
        return {"states": "early", **({"gradients": "freed"} if value == "gradients" else {})}
    return {}


def _other_steps(config: RunConfig, knobs: dict[str, Any]) -> str:
    """A saver that rules out accumulation changes what a step is, unless the micro-batch takes all of it."""
    times = config.gradient_accumulation_steps // knobs.get("gradient_accumulation_steps",
                                                            config.gradient_accumulation_steps)
    return f"; steps of {times} times fewer tokens, unless batch_size grows as much" if times > 1 else ""


def _a_parameter(words: str) -> str:
    """savers.py's '8P', for readers who have not seen its letters explained."""
    return re.sub(r"\b(\d+)P\b", r"\1 bytes a parameter", words)


def _divided(number: int) -> list[int]:
    """12 → 6, 3, 1: by its smallest factor, again and again."""
    found = []
    while number > 1:
        number //= next((factor for factor in range(2, isqrt(number) + 1) if number % factor == 0), number)
        found.append(number)
    return found


def _option(config: RunConfig, family: str, what: str, slower: str, *, exact: bool = True, comparable: bool = True,
            trainer: str = "fitgpt", **knobs: Any) -> Option | None:
    """None where the knobs change nothing, or where other knobs rule the change out."""
    try:
        changed = replace(config, **knobs)
    except UsageError:
        return None
    flags = tuple(f"--{key}={shown(getattr(changed, key))}" for key in knobs
                  if getattr(changed, key) != getattr(config, key))
    return Option(Change(flags, what, exact, comparable, slower, family, trainer), changed) if flags else None


# ---- their price


def holdings(config: RunConfig, setting: Setting, trainer: str = "fitgpt") -> Holdings:
    tape, expandable = _tape(config, setting, trainer)
    timeline = replay(tape, expandable=expandable)
    return Holdings({phase: peak.allocated for phase, peak in timeline.peaks().items()},
                    needs(tape, expandable=expandable, free_run=timeline))


def priced(option: Option, before: Holdings, setting: Setting, budget: Budget) -> PricedChange:
    """What a change saves against what the run holds without it."""
    after = holdings(option.config, setting, option.change.trainer)
    saved = {phase: held - after.phases[phase] for phase, held in before.phases.items() if phase in after.phases}
    if "train" in saved:  # the optimizer's step included, as a plan tells it
        saved["train"] = before.most_in(("train", "step")) - after.most_in(("train", "step"))
    in_training, in_evaluation = (before.most_in(phases) - after.most_in(phases) for phases in (TRAINING, EVALUATION))
    return PricedChange(option.change, saved, in_training, in_evaluation, after.needs,
                        budget.reserve_limit - after.needs)


def fits(config: RunConfig, setting: Setting, budget: Budget, trainer: str = "fitgpt") -> bool:
    """One replay at the cap itself: the answer that `needs` gives, unless more memory happens to be worse."""
    tape, expandable = _tape(config, setting, trainer)
    cap = budget.reserve_limit
    return tape.asked_at_most <= cap and replay(tape, cap, expandable=expandable).failed is None


def smallest_that_fit(config: RunConfig, setting: Setting, budget: Budget, trainer: str = "fitgpt", most: int = 3,
                      known: Callable[[Option], bool | None] = lambda option: None) -> tuple[Change, ...]:
    """Of each family the smallest change that makes the run fit, the exact ones first, and no more than `most`.

    `known` says of some whether they fit, in less time than a replay takes.
    """
    families: dict[str, list[Option]] = {}
    for option in single_changes(config, trainer, compiles=setting.compiles):
        families.setdefault(option.change.family, []).append(option)
    found: list[Change] = []

    def possible(option: Option) -> bool:
        least = held_at_least(settled(option.config, setting, option.change.trainer), setting, option.change.trainer)
        return least <= budget.reserve_limit and known(option) is not False

    def enough(option: Option) -> bool:
        return known(option) or fits(option.config, setting, budget, option.change.trainer)

    for family in families.values():
        if len(found) == most:
            break
        smallest = _smallest([option for option in family if possible(option)], enough)
        found += [smallest.change] if smallest else []
    return tuple(found)


def _smallest(family: list[Option], enough: Callable[[Option], bool]) -> Option | None:
    """The first that is enough. If the last is not, none is: each saves more than the one before it."""
    if not family:
        return None
    first, *others = family
    if enough(first):
        return first
    if not others or not enough(others[-1]):
        return None
    return next((option for option in others[:-1] if enough(option)), others[-1])


def _tape(config: RunConfig, setting: Setting, trainer: str) -> tuple[Tape, bool]:
    """The tape, and whether its segments expand."""
    return tape_of(settled(config, setting, trainer), setting, trainer), setting.expands(trainer)
