"""Config + Platform → fallback plans: smaller plans of the same run, for use after an out-of-memory error. Forecast
before the run starts, in steps from fast to small; or searched for when it is known how much memory there is.

A fallback plan changes how a step is computed, never what: the same samples in the same order, the same arithmetic up
to rounding order. One exception: dropout masks are drawn per micro-batch, so a smaller micro-batch draws others; such
plans come last, and say so. Candidates, their memory and their speed are those of `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config.optimizers import host_bytes
from ..config.run_config import RunConfig, diff, resolve_run
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from .budget import Budget
from .fit_search import OFFLOAD, Candidate, FitTarget, SaverSet, Search, place_permission, works_with
from .forecast import replay_run
from .plan_file import FallbackPlan

MOST_PLANS = 6  # each takes a tenth of a second to forecast


def fallback_plans(config: RunConfig, platform: Platform, *, host_bytes: int | None = None) -> tuple[FallbackPlan, ...]:
    """From the plan that costs least speed to the one that needs least; each needs less than the one before it, by
    about the same factor, and is the fastest that does.

    `host_bytes`: CPU RAM that may be used besides what the run uses already; None: no limit.
    """
    search = InRunSearch(config, platform, None, None, host_bytes)
    by_speed = sorted(search.candidates, key=search.price)
    needs = most = search.needs(search.config)
    least, plans = min(one.mapped for one in by_speed), list[FallbackPlan]()
    for number in range(1, MOST_PLANS + 1):
        room = max(most * (least / most) ** (number / MOST_PLANS), least)
        plan = search.plan(next(one for one in by_speed if one.mapped <= room))
        if plan.needs < needs:
            plans.append(plan)
            needs = plan.needs
    return tuple(plans)


def fastest_within(config: RunConfig, platform: Platform, card: GpuModel | None, limit: int, *,
                   host_bytes: int | None = None) -> FallbackPlan | None:
    """The fastest plan of the same run that needs at most `limit` bytes, as `fit` chooses it; None if there is none.
    With dropout, one with the same masks if there is one. `host_bytes`: as above."""
    for same_batch in (True, False) if config.dropout else (False,):
        search = InRunSearch(config, platform, card, limit, host_bytes, same_batch)
        if chosen := search.choose():
            return search.plan(chosen)
    return None


class InRunSearch(Search):
    """A search among the settings that a training can change to while it runs."""

    def __init__(self, config: RunConfig, platform: Platform, card: GpuModel | None, limit: int | None,
                 spare_ram: int | None, same_batch: bool = False) -> None:
        """`limit`: bytes that may be reserved; None: as many as the run needs. `spare_ram`: bytes of CPU RAM besides
        what the run uses already; None: no limit."""
        run = resolve_run(config, platform)
        limit = replay_run(run, platform).needs if limit is None else limit
        host_limit = None if spare_ram is None else spare_ram + host_bytes(run)
        super().__init__(run, FitTarget(platform, Budget("", limit, 0, limit, 0), card, run.batch_size, host_limit),
                         frozenset())
        self._same_batch = same_batch
        self.saver_sets = [SaverSet("free", (), {"offload": run.offload})]
        for place in OFFLOAD if can_offload(run) else ():
            options: dict[str, Any] = {"offload": place}
            if place == "gradients":  # they leave the GPU in a micro-step, which a CUDA graph cannot do
                options["cuda_graphs"] = False
            if place != run.offload and works_with(run, options) and self.has_ram(replace(run, **options)):
                self.saver_sets.append(SaverSet(place_permission(run, place), (), options))

    def modes(self, savers: SaverSet) -> list[dict[str, Any]]:
        return [mode for mode in super().modes(savers) if mode["compile"] == self.config.compile]

    def batches(self, savers: SaverSet) -> list[int]:
        return [self.config.batch_size] if self._same_batch else super().batches(savers)

    def price(self, candidate: Candidate) -> tuple[bool, float]:
        """What a fallback plan costs: other dropout masks, then seconds per step. As in `fit`, more in CPU RAM must
        gain more than the estimate's error."""
        error = self.error if candidate.savers.permission == "places" else 0.0
        return draws_other_masks(self.config, candidate.config), (1 + error) * candidate.seconds

    def plan(self, candidate: Candidate) -> FallbackPlan:
        found = self.config_of(candidate)
        in_run = replace(found, eval_iters=self.config.eval_iters)
        changes = {option: now for option, _, now in diff(self.config, in_run)}
        return FallbackPlan(changes, self.needs(found), describe(self.config, found, changes))


def can_offload(config: RunConfig) -> bool:
    """Whether more or less can go to CPU RAM in a run: only AdamW with float32 weights gives the same result there."""
    return config.weights == "float32" and config.optimizer == "adamw" and not config.step_in_backward


def describe(config: RunConfig, smaller: RunConfig, changes: Mapping[str, Any]) -> str:
    """What changes: 'batch 4 × 160, saved activations no_mlp_up'."""
    texts = {
        "batch_size": f"batch {smaller.batch_size} × {smaller.gradient_accumulation_steps}",
        "eval_batch_size": f"evaluation batch {smaller.eval_batch}",
        "saved_activations": f"saved activations {smaller.saved_activations}",
        "loss_chunk": f"loss in chunks of {smaller.loss_chunk or 'the usual number of'} tokens",
        "cuda_graphs": "no CUDA graphs", "offload": f"{smaller.offload} in CPU RAM"}
    same_evaluation = smaller.eval_batch == config.eval_batch
    parts = [text for option, text in texts.items() if option in changes
             and not (option == "eval_batch_size" and same_evaluation)]
    return ", ".join([*parts, *(["other dropout masks"] if draws_other_masks(config, smaller) else [])])


def draws_other_masks(config: RunConfig, smaller: RunConfig) -> bool:
    return config.dropout > 0 and smaller.batch_size != config.batch_size
