"""Assignments → FitRequest → FitResult → config file. `fitgpt.fit` is here, and the settings of `train --fit`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..config.command_options import FitArguments, FitOptions
from ..config.fields import Assignment, build, option_specs, shown
from ..config.run_config import RunConfig, resolve_run
from ..core.errors import DeviceError, DoesNotFit, UsageError
from ..core.units import GiB, show_bytes, show_count
from ..hardware import nvidia
from ..hardware.host import SHARE, spare_memory
from . import gpu_record, measured_speeds
from .budget import Budget, Target, apply_limits, check_supported, for_ranks, select_gpu, targets_for
from .fit_goals import (
    OUTSIDE_ERROR,
    FitResult,
    decisions_for,
    describe_suggestions,
    describe_too_small,
    fit_to_goal,
)
from .fit_search import FitTarget, parse_allow
from .measure import SECONDS_EACH, TimingProcess, rerank
from .plan import with_training_length
from .request import NO_OPTIONS, assignments_from, check_vocab_matches_data, run_config_from, with_data

ASSUMED_HOST = 32 * GiB  # CPU RAM of a machine that is not here
OF_THE_COMMAND = ("out", "html", "json")  # options of `fitgpt fit` that the function does not take


class FitRequest(NamedTuple):
    """What to fit, and where."""

    options: FitOptions
    given: RunConfig          # as the user gave it
    config: RunConfig         # with the vocabulary of its data
    target: FitTarget
    notes: tuple[str, ...]


def fit(config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig = NO_OPTIONS, gpu: str | int = "", *,
        allow: str = "", goal: str = "fastest", **options: Any) -> FitResult:
    """The fastest settings of a run that fit a GPU, or what another goal asks for. `config` and `gpu`: as in
    `fitgpt.plan`.

    `allow`: "lossy", "context", "model" or savers by name. `goal`: "fastest", "largest-model", "longest-context" or
    "smallest-memory". `options` such as batch_size=8 override the config; budget, others, torch, tokens, epochs, hours
    and measure=True are taken, too.
    """
    own = dict(gpu=gpu, allow=allow, goal=goal)
    given = {key: value for key, value in own.items() if value != option_specs(FitOptions)[key].default}
    return fit_from(fit_request(assignments_from(config, given | options, FitArguments, OF_THE_COMMAND)))


def fit_request(assignments: Sequence[Assignment]) -> FitRequest:
    own = option_specs(FitOptions)
    options = build(FitOptions, [each for each in assignments if each.key in own])
    given, notes = run_config_from([each for each in assignments if each.key not in own or each.key == "budget"])
    if given.eval_only:
        raise UsageError("With eval_only nothing is trained, and `fitgpt fit` looks for the fastest training.",
                         "`fitgpt plan` with the same options says whether the evaluation fits; or --eval_only=False")
    config, data, missing, more = with_data(given)
    check_vocab_matches_data(config, data)
    if options.measure and options.gpu:
        raise UsageError(f"--measure times candidates on the GPU of this machine, and --gpu {options.gpu} names a GPU "
                         "that may not be here.", "Leave out one of them.")
    if options.measure and not (seen := nvidia.survey()).gpus:
        raise DeviceError(f"There is no GPU here to measure on: {seen.reason or 'the driver shows none'}.",
                          "Leave out --measure: without it the speed is estimated.")
    if options.measure and config.gpus:
        raise UsageError(f"--measure times candidates on one GPU, and --gpus {config.gpus} names several.",
                         "Leave out one of them.")
    config, target = tightest(options.gpu, config, others=options.others, budget=options.budget, torch=options.torch)
    given = replace(given, gpus=config.gpus)
    check_supported(config, target, "fitgpt")
    config, length_notes = with_training_length(config, options, data, missing, target.card)
    given = replace(given, max_iters=config.max_iters, lr_decay_iters=config.lr_decay_iters)
    on_gpu = fit_target(target, config, is_here=not options.gpu and "x" not in config.gpus)
    return FitRequest(options, given, config, on_gpu,
                      (*notes, *more, *target.notes, *length_notes, *shared_gpu_note(on_gpu)))


def fit_from(request: FitRequest, say: Callable[[str], None] = lambda text: None) -> FitResult:
    """`say`: where progress of --measure goes."""
    options, target = request.options, request.target
    result = fit_to_goal(options.goal, request.config, target, parse_allow(options.allow))
    notes = list(request.notes)
    if options.gpu and result.chosen is not None and result.chosen.config.offload != "none":
        notes.append(f"The machine is assumed to have {show_bytes(ASSUMED_HOST)} of CPU RAM, {SHARE:.0%} of it for "
                     "this run.")
    if options.measure and result.chosen is not None:
        by_estimate = result.chosen.config
        with TimingProcess(SECONDS_EACH) as process:
            result = rerank(result, process.time, say)
        chosen = result.chosen
        for each in (chosen, *result.runners_up):
            if each is not None and each.measured and target.card:
                measured_speeds.add(target.card.name, resolve_run(each.config, target.platform), each.measured,
                                    target.platform.torch, "fit --measure")
        if chosen is not None and chosen.config != by_estimate:
            result = result._replace(decisions=decisions_for(request.config, chosen.config, target))
    return result._replace(notes=(*result.notes, *notes))


# ---- the target


def tightest(gpu: str, config: RunConfig, **limits: str) -> tuple[RunConfig, Target]:
    """(the config with the number of its ranks, the GPU that leaves a run least): all ranks have the same settings."""
    config, targets = targets_for(gpu, config, **limits)
    limited = [for_ranks(config, target._replace(budget=apply_limits(config, target.budget))) for target in targets]
    return config, min(limited, key=lambda each: each.budget.reserve_limit)


def fit_target(target: Target, config: RunConfig, *, is_here: bool) -> FitTarget:
    """A target with the limits of a fit, for `fit`, `train --fit` and the page alike. `is_here`: no GPU was named."""
    keep_small = is_here and not config.budget and other_users_on_gpu(config.device)
    budget = target.budget if config.budget or config.leave else with_margin(target)
    return FitTarget(target.platform, budget, target.card, config.batch_size if keep_small else None,
                     spare_memory() if is_here else int(SHARE * ASSUMED_HOST))


def with_margin(target: Target) -> Budget:
    """Without a user's limit, a fit keeps a margin free: for most GPUs the memory outside the allocator is estimated by
    a rule, and a run that uses every byte of the estimate could run out of memory."""
    if target.card is not None and target.card.outside_src in ("seen", gpu_record.OWN):
        return target.budget
    return target.budget._replace(margin=OUTSIDE_ERROR)


def shared_gpu_note(target: FitTarget) -> list[str]:
    """A note where the micro-batch is limited."""
    if target.most_batch is None:
        return []
    return [f"Another user computes on this GPU: the micro-batch stays at {target.most_batch} or below. --budget sets "
            "what this run may use instead."]


def other_users_on_gpu(device: str) -> bool:
    """Whether another user's program, other than the desktop's, is on the GPU that a run would use."""
    seen = nvidia.survey()
    if not seen.gpus:
        return False
    reading = select_gpu(seen, device)
    return any(each.kind == "other" and not is_own_process(each.pid) for each in reading.processes)


def is_own_process(pid: int) -> bool:
    """Whether a process belongs to this user; False if it cannot be seen from here."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except (OSError, AttributeError):  # it ended, is in another container, or this system has no /proc
        return False


# ---- for `train --fit`


def for_train(given: RunConfig) -> tuple[RunConfig, list[str]]:
    """The run with the settings chosen for the GPU of this machine, and why; unchanged where there is no GPU."""
    given = replace(given, fit=False)
    if given.eval_only:
        return given, ["fit: nothing to choose, because nothing is trained."]
    if given.device in ("cpu", "mps") or not nvidia.survey().gpus:
        return given, ["fit: nothing to choose, because there is no NVIDIA GPU here."]
    config = with_data(given)[0]
    config, target = tightest("", config)
    result = fit_to_goal("fastest", config, fit_target(target, config, is_here=True), frozenset())
    if result.chosen is None:
        raise DoesNotFit(describe_too_small(result), f"{describe_suggestions(result)} `fitgpt fit` with the same "
                         "options, that flag and -o config/my_run.py writes a config for `train`.")
    chosen = replace(result.chosen.config, vocab_size=given.vocab_size)
    notes = [f"fit: {', '.join(f'{option}={shown(now)}' for option, (_, now) in each.changes.items())}, {each.why}"
             for each in result.decisions]
    return chosen, notes or [f"fit: the given settings fit, and nothing is faster by more than the estimate's error, "
                             f"±{100 * result.error:.0f} %."]


# ---- the config file that `fit` writes

MARK = "# Fitted by `fitgpt fit`"  # the beginning of a file that was written here, and may be replaced
WIDTH = 110
NOT_WRITTEN = ("plan",)            # an option of one command, not of the run
ALWAYS = ("out_dir", "dataset", "n_layer", "n_head", "n_embd", "block_size", "batch_size",
          "gradient_accumulation_steps", "max_iters")  # written even at their defaults


def config_text(fitted: FitResult, run: str) -> str:
    """The text of a config file that `train` takes, with the reasons beside the changed options. `run`: a description
    of the given run."""
    chosen, budget = fitted.chosen, fitted.budget
    assert chosen is not None  # only settings that fit are written
    options = {name: getattr(chosen.config, name) for name, option in option_specs(RunConfig).items()
               if name not in NOT_WRITTEN and (name in ALWAYS or getattr(chosen.config, name) != option.default)}
    speed = ""
    if chosen.measured is not None:
        speed = f"; {show_count(round(chosen.measured))} tokens/s measured"
    elif chosen.speed is not None:
        low, high = round(chosen.speed.low), round(chosen.speed.high)
        speed = f"; {show_count(low)} to {show_count(high)} tokens/s by estimate"

    def one_line(text: str) -> str:
        """Text of the user must not end a comment."""
        return " ".join(text.split())

    card = f" for {one_line(budget.card)}" if budget.card else ""
    lines = [f"{MARK}{card}, from {one_line(run)}.",
             f"# Needs {show_bytes(chosen.needs)} of the {show_bytes(budget.reserve_limit)} available to PyTorch"
             f"{speed}.", ""]
    changed = {option for decision in fitted.decisions for option in decision.changes}
    lines += [f"{name} = {value!r}" for name, value in options.items() if name not in changed]
    for decision in fitted.decisions:
        lines += ["", *textwrap.wrap(one_line(decision.why), WIDTH, initial_indent="# ", subsequent_indent="# ")]
        lines += [f"{option} = {now!r}  # was {before!r}" for option, (before, now) in decision.changes.items()
                  if option in options]
    return "\n".join(lines) + "\n"


def without_float_errors(config: RunConfig) -> RunConfig:
    """6e-4 / 10 in a config file is 5.9999999999999995e-05: → 6e-05."""
    rounded: dict[str, Any] = {name: float(f"{value:.15g}") for name, value in config.to_dict().items()
                               if isinstance(value, float)}
    return replace(config, **rounded)


def is_own_config(text: str) -> bool:
    return text.startswith(MARK)
