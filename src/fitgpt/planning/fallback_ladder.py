"""Which smaller plans are kept ready, should memory run out? Each trains the same thing, in less memory and more time.

A rung changes how a step is computed, never what it computes: the same samples in the same order, the same arithmetic
up to rounding order. One exception: masks of dropout are drawn for a micro-batch, so a smaller one draws others; such
rungs come last, and say so. Of all such plans the rungs are those that nothing faster undercuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby, product
from typing import Any

from ..config.memory_savers import LEVELS, loss_piece_tokens
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..hardware import gpus
from ..hardware.gpus import Card
from ..memory import gpt
from ..memory.allocator import needs
from ..memory.setting import Setting
from ..nouns import Rung
from . import speed
from .closed import mix_of
from .folded import Folded
from .forecast import settled, tape_of

MOST_RUNGS = 6        # each takes a tenth of a second to forecast
WORTH_A_RUNG = 0.9    # of what the one before needs, by estimate
WORTH_A_PIECE = 0.04  # of what is needed: a smaller piece of the loss must save as much
STOPS = ("no_wide", "attention_projection", "input")  # levels of recompute that a ladder halts at
HOST_UNKNOWN = 1.25   # how much slower than the roofline says a plan is taken to be that leans on an unknown host


def ladder(config: RunConfig, setting: Setting, *, host_bytes: int | None = None) -> tuple[Rung, ...]:
    """From the plan that costs least speed to the one that needs least; each needs less than the one before it.

    `host_bytes`: what may be taken of the host's memory, besides what the run as it is holds there; None: no limit.
    """
    config = settled(config, setting)
    least = needs_of(config, setting)
    rungs: list[Rung] = []
    for smaller in _thinned(_frontier(config, setting, least, host_bytes)):
        needed = needs_of(smaller, setting)
        if needed < least:
            rungs.append(Rung(_difference(config, smaller), needed, in_words(config, smaller)))
            least = needed
    return tuple(rungs)


def needs_of(config: RunConfig, setting: Setting) -> int:
    return needs(tape_of(config, setting), expandable=setting.expandable)


def in_words(config: RunConfig, smaller: RunConfig) -> str:
    """What is done otherwise: 'batch 4 × 160, recompute no_wide'."""
    words = {
        "batch_size": f"batch {smaller.batch_size} × {smaller.gradient_accumulation_steps}",
        "eval_batch_size": f"evaluation batch {smaller.eval_batch}",
        "recompute": f"recompute {smaller.recompute}", "loss_chunk": f"loss in pieces of {smaller.loss_chunk}",
        "cuda_graphs": "GPU work not recorded", "offload": f"{smaller.offload} in the host's memory"}
    changed = _difference(config, smaller)
    said = [words[knob] for knob in words if knob in changed]
    return ", ".join([*said, *(["under other dropout masks"] if draws_other_masks(config, smaller) else [])])


def draws_other_masks(config: RunConfig, smaller: RunConfig) -> bool:
    return config.dropout > 0 and smaller.batch_size != config.batch_size


def _difference(config: RunConfig, smaller: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in smaller.to_dict().items() if value != getattr(config, name)}


def _thinned(path: list[RunConfig]) -> list[RunConfig]:
    """At most MOST_RUNGS of them: the first, which are nearly as fast as the plan, and some of the rest."""
    if len(path) <= MOST_RUNGS:
        return path
    kept = MOST_RUNGS // 2
    first, rest = path[:kept], path[kept:]
    return [*first, *(rest[round((place + 1) * len(rest) / kept) - 1] for place in range(kept))]


def _frontier(config: RunConfig, setting: Setting, needed: int, host_bytes: int | None) -> list[RunConfig]:
    """The fastest first, those with other masks of dropout last; each undercuts all before it. Sizes are estimates:
    they only choose."""
    card, folded = card_like(setting), Folded(setting)

    def size(each: RunConfig) -> int:
        return folded.shape(each).needs(mix_of(each.levels))

    least, found = float(size(config)), list[RunConfig]()
    there = None if host_bytes is None else host_bytes + gpt.host_bytes(config)
    everything = sorted((each for each in _smaller(config, needed) if there is None or gpt.host_bytes(each) <= there),
                        key=lambda each: (draws_other_masks(config, each), seconds_a_token(each, card, setting)))
    for each in everything:
        if (estimate := size(each)) < WORTH_A_RUNG * least:
            least = estimate
            found.append(each)
    smallest = min(everything, key=size, default=None)
    return found if smallest is None or smallest in found else [*found, smallest]


# ---- the changes


def _smaller(config: RunConfig, needed: int) -> Iterator[RunConfig]:
    """Every combination of what may be changed."""
    for changes in product(_batches(config), _levels(config), _pieces(config, needed), _recordings(config),
                           _places(config)):
        try:
            yield replace(config, **{knob: value for part in changes for knob, value in part.items()})
        except UsageError:  # another knob rules it out
            continue


def _batches(config: RunConfig) -> Iterator[dict[str, Any]]:
    """12 → 6, 3, 1: by the smallest factor, again and again; an evaluation is never larger than a micro-batch."""
    batch, pieces = config.batch_size, config.gradient_accumulation_steps
    while True:
        yield {"batch_size": batch, "gradient_accumulation_steps": pieces,
               "eval_batch_size": min(config.eval_batch_size, batch)}
        if batch == 1:
            return
        parts = next(factor for factor in range(2, batch + 1) if batch % factor == 0)
        batch, pieces = batch // parts, pieces * parts


def _levels(config: RunConfig) -> Iterator[dict[str, Any]]:
    """As it is, then every layer at least at the next level that the shallowest has not reached."""
    yield {}
    shallowest = min(map(LEVELS.index, config.levels))
    for level in map(LEVELS.index, STOPS):
        if level > shallowest:
            yield {"recompute": _told(tuple(LEVELS[max(LEVELS.index(each), level)] for each in config.levels))}


def _pieces(config: RunConfig, needed: int) -> Iterator[dict[str, Any]]:
    yield {}
    piece = loss_piece_tokens(config.batch_size * config.block_size, config.vocab_size, config.loss_chunk)
    if gpt.BYTES[config.dtype] * config.vocab_size * piece // 2 > WORTH_A_PIECE * needed:
        yield {"loss_chunk": piece // 2}


def _recordings(config: RunConfig) -> Iterator[dict[str, Any]]:
    yield {}
    if gpt.records(config):
        yield {"cuda_graphs": False}


def _places(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Only float32 AdamW is the same elsewhere; gradients that leave the card cannot be recorded."""
    yield {}
    if config.weights == "float32" and config.optimizer == "adamw" and not config.step_in_backward:
        if config.offload == "none":
            yield {"offload": "optimizer"}
        if config.offload != "gradients":
            yield {"offload": "gradients", "cuda_graphs": False}


def _told(levels: tuple[str, ...]) -> str:
    runs = [(level, len(list(run))) for level, run in groupby(levels)]
    return runs[0][0] if len(runs) == 1 else ",".join(f"{layers}*{level}" for level, layers in runs)


# ---- their price


def seconds_a_token(config: RunConfig, card: Card, setting: Setting) -> float:
    """By the roofline: it only has to put plans in order."""
    host = HOST_UNKNOWN if config.offload != "none" else 1.0
    return host / speed.modelled(config, card, setting, speed.reach_of(card))


@cache
def card_like(setting: Setting) -> Card:
    """A card of that kind whose figures are known: the nearest in compute capability, then in multiprocessors."""
    known = [card for card in gpus.load() if card.capability and speed.has_figures(card)]

    def distance(card: Card) -> tuple[float, int]:
        (major, minor), (ours, its) = setting.capability, card.capability or (0, 0)
        return abs(10 * (major - ours) + minor - its), abs((card.sms or 0) - setting.sms)

    return min(known, key=distance)
