"""Forecast + Budget → Plan: whether a run fits, how long it takes, what would make it fit. `fitgpt.plan` is here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..config.command_options import PlanArguments, PlanOptions
from ..config.fields import option_specs
from ..config.resolve import ResolvedRun, resolve_run
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, parse_bytes
from ..data.shards import DataSummary
from ..hardware import gpus
from ..memory.platform import Platform
from ..memory.timeline import needs, needs_under, replay
from ..tapes import engine as engine_tape
from ..tapes.nanogpt_compiled import splits_loss_rows
from .budget import Target, apply_limits, check_supported, on_card, target_for, unmodelled_allocator_options
from .changes import Change, PricedChange, memory_use, priced, single_changes, smallest_that_fit
from .duration import Duration, duration_of, relative_speed, with_training_length
from .forecast import MemoryPlan, forecast, write_tape
from .nanogpt_notes import gpu_notes
from .plan_file import document
from .request import NO_OPTIONS, PlanRequest, assignments_from, plan_request
from .track_record import TrackRecord, track_record_of

OF_THE_COMMAND = ("all_cards", "timeline", "json")  # options of `fitgpt plan` that the function does not take


@dataclass(frozen=True)
class Plan(MemoryPlan):
    """A run, the target it is planned for, and its forecast there. What only some answers need is computed on demand.

    `print` it for the table; `to_dict()` has the keys of --json.
    """

    run: ResolvedRun
    target: Target
    data: DataSummary | None = None
    notes: tuple[str, ...] = ()
    with_options: bool = False

    @property
    def trainer(self) -> str:
        return self.forecast.trainer

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The smallest changes that make it fit, where it does not."""
        return () if self.fits else smallest_that_fit(self.run, self.target.platform, self.budget, self.trainer)

    @cached_property
    def duration(self) -> Duration:
        return duration_of(self.run, self.forecast, self.data, self.target.card)

    @cached_property
    def track_record(self) -> TrackRecord:
        return track_record_of(self.forecast, self.budget.card)

    @cached_property
    def options(self) -> list[PricedChange] | None:
        """What every single change saves, with --options."""
        if not self.with_options:
            return None
        platform, card = self.target.platform, self.target.card
        before = memory_use(self.run, platform, self.trainer)
        return [priced(changed, before, platform, self.budget)._replace(
                    speed=relative_speed(changed.config, changed.change.trainer, self.run, self.trainer, card))
                for changed in single_changes(self.run, self.trainer, compiles=platform.compiles)]

    def to_dict(self) -> dict[str, Any]:
        """What --json prints."""
        return {**document(self, self.target.platform.torch, self.track_record),
                "run": {**self.duration._asdict(), "tokens_per_param": self.duration.tokens / self.duration.params},
                "formulas": {share.owner: share.formula for share in self.forecast.owners_at_peak},
                "changes": [change._asdict() for change in self.changes],
                "options": self.options and [{**each._asdict(), "change": each.change._asdict()}
                                             for each in self.options],
                "notes": list(self.notes), "sources": list(self.budget.sources)}

    def __str__(self) -> str:
        from ..show.plan_text import plan_text  # a plan prints itself; nothing else here shows anything
        from ..show.terminal import columns

        return plan_text(self, columns()).rstrip("\n")

    def __repr__(self) -> str:
        from ..show.plan_text import verdict

        return f"<fitgpt.plan: {'fits' if self.fits else 'does not fit'}: {verdict(self)}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def plan(config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig = NO_OPTIONS, gpu: str | int = "", *,
         budget: int | str | None = None, others: int | str | None = None, trainer: str = "fitgpt",
         torch: str = "", **options: Any) -> Plan:
    """What a run will use of GPU memory, and whether it fits. `config`: a config file, a dict of options, a RunConfig,
    or nothing.

    `gpu` is a name such as "4070"; without one, the GPU that is here. Sizes are bytes, or "11.5GiB". `options` such as
    batch_size=8 override the config; tokens, epochs, hours and options=True are taken, too.
    """
    own = dict(gpu=gpu, budget=budget, others=others, trainer=trainer, torch=torch)
    defaults = option_specs(PlanOptions)
    given = {key: value for key, value in own.items() if value not in (None, defaults[key].default)}
    return plan_from(plan_request(assignments_from(config, given | options, PlanArguments, OF_THE_COMMAND)))


def plan_from(request: PlanRequest) -> Plan:
    options, trainer = request.options, request.options.trainer
    target = target_for(options.gpu, request.config.device, others=options.others, budget=options.budget,
                        torch=options.torch)
    if request.config.leave:
        target = target._replace(budget=apply_limits(request.config, target.budget))
    check_supported(request.config, target, trainer)
    config, length = with_training_length(request.config, options, request.data, request.missing, target.card)
    run = resolve_run(config, target.platform, trainer)
    more = _graph_notes(run) if trainer == "fitgpt" else gpu_notes(config, target.platform)
    notes = (*request.notes, *target.notes, *length, *more, *unmodelled_allocator_options())
    return Plan(forecast(run, target.platform, trainer, target.budget.reserve_limit), target.budget, run, target,
                request.data, notes, options.options)


def plan_for(config: RunConfig, target: Target, trainer: str = "fitgpt") -> Plan:
    """The plan of a config whose vocabulary is known."""
    run = resolve_run(config, target.platform, trainer)
    return Plan(forecast(run, target.platform, trainer, target.budget.reserve_limit), target.budget, run, target)


def _graph_notes(run: ResolvedRun) -> list[str]:
    if run.eval_only or not engine_tape.uses_cuda_graphs(run):
        return []
    return ["The first step is captured into CUDA graphs. Later steps replay them in memory that stays reserved, and "
            "allocate next to nothing."]


# ---- every GPU of the table


class GpuVerdict(NamedTuple):
    """Whether a run fits a GPU; `problem` says why it cannot be planned there."""

    name: str
    usable: int | None
    needs: int = 0
    headroom: int = 0
    problem: str = ""

    @property
    def fits(self) -> bool:
        return not self.problem and self.headroom >= 0


def verdicts(config: RunConfig, trainer: str = "fitgpt", others: int = 0, torch: str = "") -> list[GpuVerdict]:
    """One verdict per GPU. GPUs on which the tape is the same are replayed once."""
    known: dict[tuple[Any, ...], Callable[[int], int]] = {}
    rows = []
    for card in gpus.load():
        usable = card.usable_mib * MiB if card.usable_mib else None
        if card.vendor != "nvidia" or usable is None:
            rows.append(GpuVerdict(card.name, usable, problem="not known"))
            continue
        if others >= usable:
            rows.append(GpuVerdict(card.name, usable, problem="nothing left by others"))
            continue
        target = on_card(card, others=others, torch=torch)
        try:
            check_supported(config, target, trainer)
        except UsageError as error:
            rows.append(GpuVerdict(card.name, usable, problem=f"needs {error.fix}"))
            continue
        platform, limit = target.platform, target.budget.reserve_limit
        run = resolve_run(config, platform, trainer)
        kind = same_tape(run, platform)
        if kind not in known:
            known[kind] = _needs_by_limit(run, platform, trainer)
        needed = known[kind](limit)
        rows.append(GpuVerdict(card.name, usable, needed, limit - needed))
    return rows


def same_tape(run: ResolvedRun, platform: Platform) -> tuple[Any, ...]:
    """What a tape depends on. Where two platforms agree in it, so do their tapes, except for the partial sums of a
    norm: a few MiB that grow with the number of multiprocessors."""
    return (run.dtype, run.compile, platform.workspace, engine_tape.attention_kernel(run, platform), platform.torch,
            platform.expandable, platform.cache, splits_loss_rows(run.batch_size * run.block_size, platform.sms))


def _needs_by_limit(run: ResolvedRun, platform: Platform, trainer: str) -> Callable[[int], int]:
    """What a run needs under a given limit; the tape is written and searched once."""
    tape, expandable = write_tape(run, platform, trainer), platform.uses_expandable_segments(trainer)
    unlimited = replay(tape, expandable=expandable)
    usual = needs(tape, expandable=expandable, free_run=unlimited)
    return lambda limit: needs_under(limit, tape, usual, free_run=unlimited, expandable=expandable)


def kept_free(config: RunConfig, others: str) -> int:
    """Bytes that --others and --leave keep from the run on any GPU."""
    return sum(parse_bytes(size) for size in (others, config.leave) if size)
