"""Forecast + Budget → Plan: whether a run fits, how long it takes, what would make it fit. `fitgpt.plan` is here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from ..config.command_options import FitOptions, PlanArguments, PlanOptions
from ..config.fields import LARGEST_COUNT, option_specs
from ..config.optimizers import checkpoint_bytes
from ..config.run_config import NOT_NANOGPTS, ResolvedRun, RunConfig, resolve_run, warmup_notes
from ..core.errors import UsageError
from ..core.units import MiB, parse_count, show_count, show_steps
from ..data.shards import DataSummary
from ..hardware import gpus
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from ..memory.timeline import Timeline
from ..tapes.aten import round_up
from ..tapes.engine import attention_kernel, platform_of
from ..tapes.nanogpt_compiled import MULTIPLE, has_odd_sizes, splits_loss_rows
from . import nanogpt_speed, speed
from .budget import (
    Target,
    apply_limits,
    check_supported,
    for_ranks,
    on_card,
    platform_for,
    targets_for,
    unmodelled_allocator_options,
)
from .changes import Change, ChangedRun, PricedChange, memory_use, priced, ranked, single_changes, smallest_that_fit
from .forecast import (
    MemoryPlan,
    RecordedRun,
    TrackRecord,
    assumptions,
    forecast,
    lowest_error,
    nearest_recorded_run,
    replay_run,
    tight_on,
    track_record_of,
)
from .plan_file import Estimate, change_document, document, rank_document
from .request import NO_OPTIONS, PlanRequest, assignments_from, plan_request
from .speed import SpeedEstimate
from .verdict import Verdict, verdict_of

OF_THE_COMMAND = ("all_cards", "timeline", "json")  # options of `fitgpt plan` that the function does not take


class PrintedPlan(MemoryPlan):
    """A memory plan that prints itself, in a terminal and in a notebook."""

    function: ClassVar[str]  # that returns it

    def text(self, width: int) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        from ..show.terminal import columns  # a plan prints itself; nothing else here shows anything

        return self.text(columns()).rstrip("\n")

    def __repr__(self) -> str:
        from ..show.plan_text import VERDICTS, verdict

        return f"<{self.function}: {VERDICTS[self.verdict]}: {verdict(self)}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True, repr=False)
class Plan(PrintedPlan):
    """A run, the target it is planned for, and its forecast there. What only some answers need is computed on demand.

    `print` it for the table; `to_dict()` has the keys of --json.
    """

    function = "fitgpt.plan"

    run: ResolvedRun
    target: Target
    data: DataSummary | None = None
    notes: tuple[str, ...] = ()
    with_options: bool = False
    vocab_assumed: bool = False
    ranks: tuple[Plan, ...] = ()  # of each rank, if there are several; this plan is that of the one with least headroom

    @property
    def trainer(self) -> str:
        return self.forecast.trainer

    @property
    def changes(self) -> tuple[Change, ...]:
        """The smallest changes that make it fit, where it does not."""
        return tuple(each.change for each in self._changed)

    @cached_property
    def _changed(self) -> tuple[ChangedRun, ...]:
        if self.headroom >= 0:
            return ()
        return smallest_that_fit(self.run, self.target.platform, self.budget, self.trainer)

    @cached_property
    def duration(self) -> Duration:
        run, forecast, data = self.run, self.forecast, self.data
        steps = 0 if run.eval_only else run.max_iters
        tokens = steps * run.tokens_per_step
        expected = expected_speed(run, self.target.card, self.trainer)
        stored: RunConfig = run  # in a checkpoint: without the options that nanoGPT does not have
        if self.trainer == "nanogpt":
            stored = replace(run, **{name: getattr(RunConfig, name) for name in NOT_NANOGPTS})
        return Duration(tokens_per_step=run.tokens_per_step, steps=steps, tokens=tokens, params=forecast.params,
                        epochs=tokens / data.train_tokens if data else None,
                        checkpoint_bytes=checkpoint_bytes(stored), host_bytes=forecast.host_bytes,
                        hours=(tokens / expected.high / 3600, tokens / expected.low / 3600) if expected else None)

    @cached_property
    def track_record(self) -> TrackRecord:
        return track_record_of(self.forecast, self.budget.card)

    @cached_property
    def nearest_recorded_run(self) -> RecordedRun | None:
        return nearest_recorded_run(self.run, self.forecast, self.budget.card)

    @cached_property
    def options(self) -> list[PricedChange] | None:
        """What every single change saves, with --options."""
        if not self.with_options:
            return None
        return self._priced(single_changes(self.run, self.trainer, compiles=self.target.platform.compiles))

    def _priced(self, changes: Iterable[ChangedRun]) -> list[PricedChange]:
        platform, card = self.target.platform, self.target.card
        before = memory_use(self.run, platform, self.trainer)
        return ranked(priced(changed, before, platform, self.budget)._replace(
                          speed=relative_speed(changed.config, changed.change.trainer, self.run, self.trainer, card))
                      for changed in changes)

    @property
    def step_seconds(self) -> Estimate | None:
        """Of an optimizer step; None without one, and where the GPU's speed is not known."""
        speed = None if self.run.eval_only else expected_speed(self.run, self.target.card, self.trainer)
        return speed and Estimate(*(self.run.tokens_per_step / each for each in (speed.high, speed.likely, speed.low)))

    def to_dict(self) -> dict[str, Any]:
        """What --json prints."""
        return {**document(self, self.target.platform.torch, self.track_record, self.step_seconds),
                "run": {**self.duration._asdict(), "tokens_per_param": self.duration.tokens / self.duration.params},
                "formulas": {share.owner: share.formula for share in self.forecast.owners_at_peak},
                "changes": self._documents(self._priced(self._changed)),
                "options": self.options and self._documents(self.options),
                "nearest_recorded_run": self.nearest_recorded_run and self.nearest_recorded_run._asdict(),
                "notes": list(self.notes), "sources": list(self.budget.sources),
                **({"ranks": [{"rank": number, **rank_document(each)} for number, each in enumerate(self.ranks)]}
                   if self.ranks else {})}

    def _documents(self, changes: Iterable[PricedChange]) -> list[dict[str, Any]]:
        step = self.step_seconds
        return [change_document(
                    self, each.needs, flags=dict(flag[2:].split("=", 1) for flag in each.change.flags),
                    what=each.change.what, costs=each.change.slower, same_training=each.change.exact,
                    step_seconds=step.times(1 / each.speed) if step and each.speed else None) for each in changes]

    def text(self, width: int) -> str:
        from ..show.plan_text import plan_text

        return plan_text(self, width)


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
    if request.config.gpus and trainer == "nanogpt":
        raise UsageError("Plans of nanoGPT's train.py are for one GPU: torch's DDP, which it uses on several, is not "
                         "modelled.", "--trainer fitgpt, or without --gpus")
    given, targets = targets_for(options.gpu, request.config, others=options.others, budget=options.budget,
                                 torch=options.torch)
    if given.leave:
        targets = [target._replace(budget=apply_limits(given, target.budget)) for target in targets]
    for target in targets:
        check_supported(given, target, trainer)
    plans = {target: plan_for(given, target, trainer) for target in dict.fromkeys(targets)}
    target = min(targets, key=lambda each: plans[each].headroom)
    config, length = with_training_length(given, options, request.data, request.missing, target.card, trainer)
    found = plans[target] if config == given else plan_for(config, target, trainer)
    if len(targets) > 1:
        found = replace(found, ranks=tuple(plans[each] for each in targets))
    notes = nanogpt_notes(config, target.platform) if trainer == "nanogpt" else []
    if trainer == "fitgpt" and not config.eval_only and found.run.uses_cuda_graphs:
        notes = ["The first step is captured into CUDA graphs. Later steps replay them in memory that stays reserved, "
                 "and allocate next to nothing."]
    return replace(found, data=request.data, with_options=options.options, vocab_assumed=request.vocab_assumed, notes=(
        *request.notes, *target.notes, *length, *notes, *unmodelled_allocator_options()))


def plan_for(config: RunConfig, target: Target, trainer: str = "fitgpt") -> Plan:
    """The plan of a config whose vocabulary is known."""
    run = resolve_run(config, target.platform, trainer)
    target = for_ranks(config, target)
    return Plan(forecast(run, target.platform, trainer, target.budget.reserve_limit), target.budget, run, target)


def nanogpt_notes(config: RunConfig, platform: Platform) -> list[str]:
    """What depends on the GPU in a plan of nanoGPT's train.py: its data types, and how torch.compile pads matmuls."""
    run, notes = resolve_run(config, platform, "nanogpt"), list[str]()
    if not platform.has_bf16 and config.dtype == "auto":
        eager = ", and does not compile it here" if platform.compiles else ""
        notes.append("This plan is for float16. By default nanoGPT's train.py uses bfloat16, which torch reports as "
                     f"supported on this GPU{eager}: --dtype=bfloat16 plans that.")
    elif run.dtype == "bfloat16" and config.compile and not run.compile:
        other = " --dtype=float16 is compiled." if platform.compiles else ""
        notes.append("torch.compile does not support bfloat16 on this GPU and runs it eager, so this plan is for an "
                     f"eager run.{other}")
    tokens, vocab = run.batch_size * run.block_size, run.vocab_size
    if run.compile and has_odd_sizes(run.dtype, tokens, 0):
        notes.append(f"{tokens:,} tokens per micro-batch are not a multiple of {MULTIPLE}: how torch.compile pads that "
                     "is not modelled, and the run may use far more memory.")
    elif run.compile and has_odd_sizes(run.dtype, tokens, vocab):
        better = (f" {round_up(vocab, MULTIPLE):,} in the data's meta.pkl is more predictable and faster."
                  if config.init_from == "scratch" else "")
        notes.append(f"A vocabulary of {vocab:,} is not a multiple of {MULTIPLE}: torch.compile times on the GPU which "
                     "matmuls to pad, so the run may use more or less memory than forecast, usually by one array of "
                     f"logits.{better}")
    return notes


# ---- how long it takes


class Duration(NamedTuple):
    tokens_per_step: int
    steps: int
    tokens: int
    params: int
    epochs: float | None               # None: there is no data
    checkpoint_bytes: int
    host_bytes: int
    hours: tuple[float, float] | None  # None: the GPU's speed is not known


def expected_speed(config: RunConfig, card: GpuModel | None, trainer: str = "fitgpt",
                   platform: Platform | None = None) -> SpeedEstimate | None:
    """None where the GPU's figures are not known."""
    estimate = nanogpt_speed.estimate if trainer == "nanogpt" else speed.estimate
    return estimate(config, card, platform)


def with_training_length(config: RunConfig, options: PlanOptions | FitOptions, data: DataSummary | None, missing: str,
                         card: GpuModel | None, trainer: str = "fitgpt") -> tuple[RunConfig, list[str]]:
    """The config with as many steps as --tokens, --epochs or --hours require, and a note on it. `missing`: why there
    is no data to count epochs of."""
    given = {f"--{name}": value for name, value in (("tokens", options.tokens), ("epochs", options.epochs),
                                                    ("hours", options.hours)) if value}
    if not given:
        return config, []
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} set the length of the run.",
                         next(f"{flag}={value}" for flag, value in given.items()))
    if options.tokens:
        tokens, text = float(parse_count(options.tokens)), f"{show_count(parse_count(options.tokens))} tokens"
    elif options.epochs:
        if data is None:
            raise UsageError(f"--epochs={options.epochs:g}: of which data? {missing}", "--tokens 10B")
        tokens = options.epochs * data.train_tokens
        text = f"{options.epochs:g} × {show_count(data.train_tokens)} tokens"
    else:
        expected = expected_speed(config, card, trainer)
        if expected is None:
            raise UsageError(f"--hours={options.hours:g}: there is no speed estimate for this GPU, so hours cannot be "
                             "turned into steps.", "--tokens 10B, or --max_iters=10000")
        tokens = 3600 * options.hours * expected.low
        text = f"{options.hours:g} hours at {show_count(expected.low)} tokens per second"
    whole, rest = divmod(round(tokens), config.tokens_per_step)
    steps = max(whole if options.hours or not rest else whole + 1, 1)  # no more steps than the hours allow
    if steps > LARGEST_COUNT:
        raise UsageError(f"{text} are {steps:,} steps, and a run has at most {LARGEST_COUNT:,}.", "--tokens 10B")
    longer = replace(config, max_iters=steps, lr_decay_iters=steps)
    late = " One step takes longer." if options.hours and not whole else ""
    return longer, [f"{text} are {show_steps(steps)}: max_iters={steps} lr_decay_iters={steps}.{late}",
                    *warmup_notes(longer)]


def relative_speed(changed: RunConfig, its_trainer: str, config: RunConfig, trainer: str,
                   card: GpuModel | None) -> float | None:
    """The speed of a changed run relative to the run without the change; None where there is no estimate. By the
    roofline model alone: a measured figure of one config says nothing about another."""
    if card is None or changed.eval_only or config.eval_only:
        return None
    likely = {"fitgpt": speed.likely, "nanogpt": nanogpt_speed.likely}
    platform = platform_for(card)
    after, before = likely[its_trainer](changed, card, platform), likely[trainer](config, card, platform)
    return after / before if after and before else None


# ---- every GPU of the table


class GpuVerdict(NamedTuple):
    """Whether a run fits a GPU; `problem` says why it cannot be planned there."""

    name: str
    usable: int | None
    needs: int = 0
    headroom: int = 0
    verdict: Verdict | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    def to_dict(self) -> dict[str, Any]:
        """A row of `--all-cards --json`."""
        known = self.verdict is not None
        return {"gpu": self.name, "usable_bytes": self.usable, "needs_bytes": self.needs if known else None,
                "headroom_bytes": self.headroom if known else None, "verdict": self.verdict, "fits": self.fits,
                "problem": self.problem}


def best_of(rows: Sequence[GpuVerdict]) -> Verdict:
    """The verdict on the GPU that suits a run best."""
    found = {each.verdict for each in rows}
    return next((verdict for verdict in Verdict if verdict in found), Verdict.DOES_NOT_FIT)


def every_gpu(needs_and_tight: Callable[[Target], tuple[int, Sequence[str]]], others: int | None, torch: str = "", *,
              not_seen: Sequence[str] = ()) -> list[GpuVerdict]:
    """One verdict per GPU, by what the run needs there, and why it is tight; UsageError where it cannot run."""
    rows = []
    for card in gpus.load():
        usable = card.usable_mib * MiB if card.usable_mib else None
        if card.vendor != "nvidia" or usable is None:
            rows.append(GpuVerdict(card.name, usable, problem="not known"))
            continue
        if others and others >= usable:
            rows.append(GpuVerdict(card.name, usable, problem="nothing left by others"))
            continue
        target = on_card(card, others=others, torch=torch)
        try:
            needs, tight = needs_and_tight(target)
        except UsageError as error:
            rows.append(GpuVerdict(card.name, usable, problem=f"needs {error.fix}"))
        else:
            headroom = target.budget.reserve_limit - needs
            rows.append(GpuVerdict(card.name, usable, needs, headroom, verdict_of(headroom, not_seen, tight)))
    return rows


def verdicts(config: RunConfig, trainer: str = "fitgpt", others: int | None = None,
             torch: str = "") -> list[GpuVerdict]:
    """One verdict per GPU. GPUs on which the tape is the same are replayed once."""
    known: dict[tuple[Any, ...], Timeline] = {}

    def needs_and_tight(target: Target) -> tuple[int, Sequence[str]]:
        check_supported(config, target, trainer)
        run = resolve_run(config, target.platform, trainer)
        kind = same_tape(run, target.platform)
        if kind not in known:
            known[kind] = replay_run(run, target.platform, trainer)
        needs = known[kind].needs_under(target.budget.reserve_limit)
        lowest = lowest_error(trainer, assumptions(run, target.platform, trainer))
        return needs, tight_on(known[kind], needs, target.budget, lowest)

    return every_gpu(needs_and_tight, others, torch)


def same_tape(run: ResolvedRun, platform: Platform) -> tuple[Any, ...]:
    """What a tape depends on. Where two platforms agree in it, so do their tapes, except for the partial sums of a
    norm: a few MiB that grow with the number of multiprocessors."""
    here = platform_of(run, platform)
    return (run.dtype, run.compile, here.workspace, attention_kernel(run, platform), platform.torch,
            platform.expandable, platform.cache, splits_loss_rows(run.batch_size * run.block_size, platform.sms),
            here.flash_splits(run.batch_size, run.n_head))
