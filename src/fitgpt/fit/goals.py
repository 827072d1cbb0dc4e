"""What is the largest model, the longest block or the least memory? Each is a search over runs of other shapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..config import RunConfig
from ..errors import UsageError
from ..nouns import Fitted
from ..units import show_count
from . import shapes
from .choose import Here, could_fit, fit, fitted, nothing, smallest
from .permission import permitted

LOOK_AHEAD = 2  # runs beyond the first that does not fit


def reach(goal: str, config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    return _SEARCHES[goal](config, here, allow)


def largest_model(config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    """Of GPT-2's sizes and those between them; the run is otherwise as asked."""
    _from_scratch(config, "--goal largest-model")
    sizes = shapes.gpt2_sizes()
    runs = Runs(len(sizes), lambda number: shapes.of_size(config, sizes[number]))
    return _largest(config, runs, here, allow, "model", lambda run: (
        f"{run.n_layer} layers, {run.n_head} heads, width {run.n_embd:,}: "
        f"{show_count(run.gpt_config().count_params())} parameters"))


def longest_context(config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    """Blocks in steps of 128 tokens, one sequence at a time."""
    _from_scratch(config, "--goal longest-context")
    blocks = range(shapes.BLOCK_STEP, shapes.LONGEST + 1, shapes.BLOCK_STEP)
    runs = Runs(len(blocks), lambda number: shapes.of_block(config, blocks[number]))
    return _largest(config, runs, here, allow, "context", lambda run: (
        f"a block of {run.block_size:,} tokens, {run.tokens_per_step:,} tokens a step"))


class Runs(NamedTuple):
    """Each holds more than the one before it."""

    how_many: int
    make: Callable[[int], RunConfig]


def _largest(config: RunConfig, runs: Runs, here: Here, allow: frozenset[str], permission: str,
             words: Callable[[RunConfig], str]) -> Fitted:
    """The last of the runs that fits."""
    may = permitted(config, allow)

    def fits(number: int) -> bool:
        return could_fit(here.search(runs.make(number), may))

    low = bisect_left(range(runs.how_many), True, key=lambda number: not fits(number))
    while True:  # pages make steps: a slightly larger run may need no more
        further = next((number for number in range(low, min(low + LOOK_AHEAD, runs.how_many)) if fits(number)), None)
        if further is None:
            break
        low = further + 1
    for number in reversed(range(low)):
        run = runs.make(number)
        search = here.search(run, may)
        if finalists := search.finalists():
            found = fitted(config, search, finalists, allow, permission, "the largest that trains there")
            beyond = f"; {words(runs.make(low))} does not fit" if low < runs.how_many else ""
            return replace(found, notes=(*found.notes, f"The largest that trains there: {words(run)}{beyond}."))
    return nothing(runs.make(0), here.search(runs.make(0), may), here, allow)


def _from_scratch(config: RunConfig, goal: str) -> None:
    if config.init_from != "scratch":
        raise UsageError(f"{goal} makes another model, and init_from={config.init_from} names one that exists.",
                         "--init_from=scratch")


_SEARCHES: dict[str, Callable[[RunConfig, Here, frozenset[str]], Fitted]] = {
    "fastest": fit, "largest-model": largest_model, "longest-context": longest_context, "smallest-memory": smallest}
