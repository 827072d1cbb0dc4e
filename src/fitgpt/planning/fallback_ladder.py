"""Config + Platform → fallback plans: smaller plans of the same run, for use after an out-of-memory error. Forecast
before the run starts, in steps from fast to small; or searched for when it is known how much memory there is.

A fallback plan changes how a step is computed, never what: the same samples in the same order, the same arithmetic up
to rounding order. One exception: dropout masks are drawn per micro-batch, so a smaller micro-batch draws others; such
plans come last, and say so. Of all such plans, those remain that no faster plan undercuts in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ..config.fields import option_specs
from ..config.memory_savers import LEVELS, loss_chunk_tokens
from ..config.resolve import resolve_run
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..hardware import gpus
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from ..tapes import engine as engine_tape
from . import speed
from .budget import Budget
from .changes import repeatedly_divided
from .fit_search import FitTarget, SaverSet, Search
from .forecast import needs_of
from .layer_costs import CostCache, describe_mix, mix_of, with_usual_loss
from .plan_file import FallbackPlan

MOST_PLANS = 6            # each takes a tenth of a second to forecast
MAX_NEEDS = 0.9           # of what the plan before needs, by estimate
MIN_CHUNK_SAVING = 0.04   # of what is needed: what a smaller chunk of the loss must save
STOPS = ("no_mlp_up", "attention_projection", "input")  # recompute levels of fallback plans
UNKNOWN_CPU = 1.25        # how much slower than by the roofline a plan with offload is taken to be


def fallback_plans(config: RunConfig, platform: Platform, *, host_bytes: int | None = None) -> tuple[FallbackPlan, ...]:
    """From the plan that costs least speed to the one that needs least; each needs less than the one before it.

    `host_bytes`: CPU RAM that may be used besides what the run uses already; None: no limit.
    """
    config = resolve_run(config, platform)
    least = needs_of(config, platform)
    plans: list[FallbackPlan] = []
    for smaller in _frontier(config, platform, least, host_bytes):
        needed = needs_of(resolve_run(smaller, platform), platform)
        if needed < least:
            plans.append(FallbackPlan(_difference(config, smaller), needed, describe(config, smaller)))
            least = needed
    return tuple(plans)


def fastest_within(config: RunConfig, platform: Platform, card: GpuModel | None, limit: int, *,
                   host_bytes: int | None = None) -> FallbackPlan | None:
    """The fastest plan of the same run that needs at most `limit` bytes, as `fit` chooses it; None if there is none.
    With dropout, one with the same masks if there is one. `host_bytes`: as above."""
    config = resolve_run(config, platform)
    host_limit = None if host_bytes is None else host_bytes + engine_tape.host_bytes(config)
    target = FitTarget(platform, Budget("", limit, 0, limit, 0), card, config.batch_size, host_limit)
    for same_batch in (True, False) if config.dropout else (False,):
        search = InRunSearch(config, target, same_batch)
        chosen = search.choose()
        if chosen is not None:
            found = search.config_of(chosen)
            changes = _difference(config, replace(found, eval_iters=config.eval_iters))
            return FallbackPlan(changes, search.needs(found), describe(config, found))
    return None


class InRunSearch(Search):
    """A search among the settings that a training can change to while it runs."""

    def __init__(self, config: RunConfig, target: FitTarget, same_batch: bool) -> None:
        super().__init__(config, target, frozenset())
        self._same_batch = same_batch
        self.saver_sets = [savers for savers in self.saver_sets if self._is_possible(savers.options)]

    def batches(self, savers: SaverSet) -> list[int]:
        return [self.config.batch_size] if self._same_batch else super().batches(savers)

    def _is_possible(self, options: dict[str, Any]) -> bool:
        changed = {option for option, value in options.items() if getattr(self.config, option) != value}
        return changed <= ({"offload"} if can_offload_more(self.config) else set())


def can_offload_more(config: RunConfig) -> bool:
    """Whether more can go to CPU RAM in a run: only AdamW with float32 weights gives the same result there."""
    return config.weights == "float32" and config.optimizer == "adamw" and not config.step_in_backward


def describe(config: RunConfig, smaller: RunConfig) -> str:
    """What changes: 'batch 4 × 160, recompute no_mlp_up'."""
    texts = {
        "batch_size": f"batch {smaller.batch_size} × {smaller.gradient_accumulation_steps}",
        "eval_batch_size": f"evaluation batch {smaller.eval_batch}",
        "recompute": f"recompute {smaller.recompute}",
        "loss_chunk": f"loss in chunks of {smaller.loss_chunk or 'the usual number of'} tokens",
        "cuda_graphs": "no CUDA graphs", "offload": f"{smaller.offload} in CPU RAM"}
    changed = _difference(config, smaller)
    parts = [text for option, text in texts.items() if option in changed]
    return ", ".join([*parts, *(["other dropout masks"] if draws_other_masks(config, smaller) else [])])


def draws_other_masks(config: RunConfig, smaller: RunConfig) -> bool:
    return config.dropout > 0 and smaller.batch_size != config.batch_size


def _difference(config: RunConfig, smaller: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in smaller.to_dict().items() if value != getattr(config, name)}


def _frontier(config: RunConfig, platform: Platform, needed: int, host_limit: int | None) -> list[RunConfig]:
    """The fastest first, those with other dropout masks last; each needs less than all before it. The sizes are
    estimates that only select. At most MOST_PLANS: the first, which are nearly as fast as the run, and some of the
    rest."""
    card, costs = similar_gpu(platform), CostCache(platform)

    def size(each: RunConfig) -> int:
        return with_usual_loss(costs.cost(each).mapped(mix_of(each.levels)), platform.expandable)

    least, found = float(size(config)), list[RunConfig]()
    limit = None if host_limit is None else host_limit + engine_tape.host_bytes(config)
    everything = sorted((each for each in _smaller(config, needed) if limit is None
                         or engine_tape.host_bytes(each) <= limit),
                        key=lambda each: (draws_other_masks(config, each), seconds_per_token(each, card, platform)))
    for each in everything:
        if (estimate := size(each)) < MAX_NEEDS * least:
            least = estimate
            found.append(each)
    smallest = min(everything, key=size, default=None)
    if smallest is not None and smallest not in found:
        found.append(smallest)
    if len(found) <= MOST_PLANS:
        return found
    kept = MOST_PLANS // 2
    first, rest = found[:kept], found[kept:]
    return [*first, *(rest[round((place + 1) * len(rest) / kept) - 1] for place in range(kept))]


def _smaller(config: RunConfig, needed: int) -> Iterator[RunConfig]:
    """Every valid combination of changes."""
    # Smaller micro-batches. An evaluation batch is at most a micro-batch.
    sequences = config.batch_size * config.gradient_accumulation_steps
    batches: list[dict[str, Any]] = [
        {"batch_size": batch, "gradient_accumulation_steps": sequences // batch,
         "eval_batch_size": min(config.eval_batch_size, batch)}
        for batch in (config.batch_size, *repeatedly_divided(config.batch_size))]

    # As given; then every layer at least at each recompute level of STOPS that some layer has not reached.
    keeps_most = min(map(LEVELS.index, config.levels))
    levels: list[dict[str, Any]] = [{}]
    for level in map(LEVELS.index, STOPS):
        if level > keeps_most:
            at_least = tuple(LEVELS[max(LEVELS.index(each), level)] for each in config.levels)
            levels.append({"recompute": describe_mix(mix_of(at_least))})

    chunks: list[dict[str, Any]] = [{}]
    chunk = loss_chunk_tokens(config.batch_size * config.block_size, config.vocab_size, config.loss_chunk)
    if engine_tape.BYTES[config.dtype] * config.vocab_size * chunk // 2 > MIN_CHUNK_SAVING * needed:
        chunks.append({"loss_chunk": chunk // 2})

    graphs: list[dict[str, Any]] = [{}, {"cuda_graphs": False}] if engine_tape.uses_cuda_graphs(config) else [{}]

    # More in CPU RAM. Gradients that leave the GPU exclude CUDA graphs.
    offload: list[dict[str, Any]] = [{}]
    if can_offload_more(config):
        places = option_specs(RunConfig)["offload"].choices
        offload += [{"offload": place, **({"cuda_graphs": False} if place == "gradients" else {})}
                    for place in places[places.index(config.offload) + 1:]]

    for changes in product(batches, levels, chunks, graphs, offload):
        try:
            yield replace(config, **{option: value for part in changes for option, value in part.items()})
        except UsageError:  # two options exclude each other
            continue


# ---- their speed


def seconds_per_token(config: RunConfig, card: GpuModel, platform: Platform) -> float:
    """By the roofline: it only ranks plans."""
    slower = UNKNOWN_CPU if config.offload != "none" else 1.0
    return slower / speed.modelled(config, card, platform, speed.likely_efficiency(card))


def similar_gpu(platform: Platform) -> GpuModel:
    """A GPU whose figures are known: the nearest in compute capability, then in multiprocessors."""
    known = [card for card in gpus.load() if card.capability and speed.has_figures(card)]

    def distance(card: GpuModel) -> tuple[float, int]:
        (major, minor), (other_major, other_minor) = platform.capability, card.capability or (0, 0)
        return abs(10 * (major - other_major) + minor - other_minor), abs((card.sms or 0) - platform.sms)

    return min(known, key=distance)
