"""What is the largest model, the longest block or the least memory? Each is a search over runs of other shapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes, show_count
from ..nouns import Fitted, Standing
from . import model_sizes
from .choose import UNSURE, Here, could_fit, fit, fitted, nothing, smallest
from .permission import permitted
from .search import Finalist, Search

TOKENS_A_PARAMETER = 20  # of a model that is trained as long as its size is worth: Hoffmann et al. 2022
LOOK_AHEAD = 2  # runs beyond the first that does not fit


def reach(goal: str, config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    return _SEARCHES[goal](config, here, allow)


def largest_model(config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    """Of GPT-2's sizes and those between them; the run is otherwise as asked."""
    _from_scratch(config, "--goal largest-model")
    sizes = model_sizes.gpt2_sizes()
    runs = Runs(len(sizes), lambda number: model_sizes.of_size(config, sizes[number]))
    return _largest(config, runs, here, allow, "model", lambda run: (
        f"{run.n_layer} layers, {run.n_head} heads, width {run.n_embd:,}: "
        f"{show_count(run.gpt_config().count_params())} parameters"))


def longest_context(config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    """Blocks in steps of 128 tokens, one sequence at a time."""
    _from_scratch(config, "--goal longest-context")
    blocks = range(model_sizes.BLOCK_STEP, model_sizes.LONGEST + 1, model_sizes.BLOCK_STEP)
    runs = Runs(len(blocks), lambda number: model_sizes.of_block(config, blocks[number]))
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
    number, finalists, search = _last_that_fits(runs, here, may)
    if not finalists:
        return nothing(runs.make(0), search, here, allow)
    run = runs.make(number)
    found = fitted(config, search, finalists, allow, permission, "the largest that trains there")
    beyond = f"; {words(runs.make(number + 1))} {_why_not(runs, number + 1, here, may)}" if (
        number + 1 < runs.how_many) else ""
    notes = [f"The largest that trains there: {words(run)}{beyond}."]
    if found.chosen is not None:
        notes[0] += how_long(found.chosen)
        if found.chosen.config.offload != config.offload:
            notes += _on_the_card(runs, here, may, words)
    return found._replace(notes=(*found.notes, *notes))


def _why_not(runs: Runs, number: int, here: Here, may: frozenset[str]) -> str:
    """Whether it is the card's memory or the host's that ends it."""
    unlimited = here._replace(host_bytes=None)
    host = here.host_bytes is not None and could_fit(unlimited.search(runs.make(number), may))
    return f"wants more than {show_bytes(here.host_bytes or 0)} of the host's memory" if host else "does not fit"


def _on_the_card(runs: Runs, here: Here, may: frozenset[str], words: Callable[[RunConfig], str]) -> list[str]:
    """The largest that needs nothing of the host's memory: smaller, and often many times faster."""
    _, finalists, search = _last_that_fits(runs, here._replace(host_bytes=0), may)
    if not finalists:
        return []
    best = search.standing(finalists[0].config, "free", at_most=0)
    return [f"The largest that stays on the card: {words(best.config)}.{how_long(best)}"]


def how_long(standing: Standing) -> str:
    """What a training of the usual length would take: a sentence."""
    if standing.speed is None:
        return ""
    config = standing.config
    seen = config.gpt_config().count_params() - config.block_size * config.n_embd  # positions are no use of more text
    tokens = TOKENS_A_PARAMETER * seen
    hours = [tokens / speed / 3600 for speed in (standing.speed.high, standing.speed.low)]
    unit, of = ("days", 24) if hours[1] > 48 else ("hours", 1)
    least, most = (f"{each / of:,.0f}" if each / of >= 10 else f"{each / of:.1f}" for each in hours)
    low, high = (show_count(round(speed)) for speed in (standing.speed.low, standing.speed.high))
    return (f" At {low} to {high} tokens/s, {TOKENS_A_PARAMETER} tokens a parameter ({show_count(tokens)}, about what "
            f"its size is worth) take {least} to {most} {unit}.")


def _last_that_fits(runs: Runs, here: Here, may: frozenset[str]) -> tuple[int, list[Finalist], Search]:
    """Its number and finalists; no finalists: not even the first fits."""
    def fits(number: int) -> bool:
        return could_fit(here.search(runs.make(number), may))

    low = bisect_left(range(runs.how_many), True, key=lambda number: not fits(number))
    while True:  # pages make steps: a slightly larger run may need no more
        further = next((number for number in range(low, min(low + LOOK_AHEAD, runs.how_many)) if fits(number)), None)
        if further is None:
            break
        low = further + 1
    for number in reversed(range(low)):
        search = here.search(runs.make(number), may)
        if finalists := search.finalists():
            return number, finalists, search
    return 0, [], here.search(runs.make(0), may)


def least_memory(config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    """And how little without the host's memory, where that takes some of it."""
    found = smallest(config, here, allow)
    least = found.least
    if least is None:
        return found
    if found.chosen is not None:
        process = least.needs + here.budget.outside
        found = found._replace(notes=(*found.notes, f"As nvidia-smi shows it that is about {show_bytes(process)}, with "
                                      f"what CUDA holds: --budget={-(-(process + UNSURE) // MiB)}MiB is enough."))
    if least.config.offload == config.offload:
        return found
    search = here._replace(host_bytes=0).search(config, permitted(config, allow))
    alone = search.standing(*search.least())
    return found._replace(notes=(*found.notes, f"With nothing more in the host's memory: {show_bytes(alone.needs)}, by "
                                               f"{' '.join(alone.flags) or 'what was asked for'}."))


def _from_scratch(config: RunConfig, goal: str) -> None:
    if config.init_from != "scratch":
        raise UsageError(f"{goal} makes another model, and init_from={config.init_from} names one that exists.",
                         "--init_from=scratch")


_SEARCHES: dict[str, Callable[[RunConfig, Here, frozenset[str]], Fitted]] = {
    "fastest": fit, "largest-model": largest_model, "longest-context": longest_context, "smallest-memory": least_memory}
