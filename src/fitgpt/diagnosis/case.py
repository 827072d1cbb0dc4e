"""Everything known about an out-of-memory failure: message, GPU usage, and the run that failed, if its config is known.

Infers trainer and compile mode from the message when they were not given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..config.argv import walk
from ..config.fields import Assignment
from ..config.resolve import ResolvedRun, resolve_run
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB
from ..hardware.gpus import GpuModel, load
from ..memory.platform import Platform
from ..memory.tape import Tape
from ..memory.timeline import Timeline, replay
from ..planning.budget import Budget, platform_for
from ..planning.forecast import Forecast, MemoryPlan, forecast, write_tape
from ..planning.request import run_config_from, with_data
from ..runs.folder import recorded_config
from .gpu_usage import GpuUsage, budget_at_failure, usage_in
from .oom_message import OomMessage
from .stack_frames import is_compiled, phase_of, trainer_of
from .tensor_match import TensorMatch, match_tensor

NOT_ON_GPU = ("killed", "ram", "mps")  # kinds of messages that the forecast of a CUDA GPU does not explain
SAME_CARD = 0.004  # the usable memory of one GPU model may differ by this: 24084 and 24217 MiB of a 4090
SAME_RUN = 0.1     # if the allocated memory differs by more, tape and message are not of the same run
OTHER_TRAINER = {"fitgpt": "nanogpt", "nanogpt": "fitgpt"}
TRAINERS = {"fitgpt": "fitgpt", "nanogpt": "nanoGPT"}
SCRIPTS = {"fitgpt": "fitgpt", "nanogpt": "nanoGPT's train.py"}
RESUMED = ("init_from", "resume")  # a resumed run has the tape of a run from scratch


# ---- the run


@dataclass(frozen=True)
class ExplainedRun:
    """The run whose memory is explained."""

    config: RunConfig
    trainer: str
    platform: Platform
    name: str = ""          # the arguments of `fitgpt train` that start it: a config file and flags
    inferred: bool = False  # `compile` was not given, and the message shows another value than the default

    @property
    def expandable(self) -> bool:
        return self.platform.uses_expandable_segments(self.trainer)

    @cached_property
    def settled(self) -> ResolvedRun:
        return resolve_run(self.config, self.platform, self.trainer)

    @cached_property
    def tape(self) -> Tape:
        return write_tape(self.settled, self.platform, self.trainer)

    @cached_property
    def timeline(self) -> Timeline:
        return replay(self.tape, expandable=self.expandable)

    @cached_property
    def forecast(self) -> Forecast:
        return forecast(self.settled, self.platform, self.trainer)

    def plan(self, budget: Budget) -> MemoryPlan:
        return MemoryPlan(self.forecast, budget)

    def with_other_trainer(self) -> ExplainedRun:
        return replace(self, trainer=OTHER_TRAINER[self.trainer])

    def fits_with_expandable_segments(self, limit: int) -> bool:
        """Whether expandable segments, if the run does not use them yet, would make it fit."""
        return not self.expandable and replay(self.tape, limit, expandable=True).failed is None

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and AdamW's moments in float32, which do not depend on the batch size."""
        return 16 * self.settled.gpt_config().count_params()


@dataclass(frozen=True)
class ExplainRequest:
    """What the user gives besides the text or figures to explain."""

    config: RunConfig | None = None
    name: str = ""                 # the arguments of `fitgpt train` that start the run
    gpu: str = ""
    trainer: str = "auto"
    others: int | None = None      # bytes of other processes
    process: int | None = None     # bytes of the run's process

    def run_on(self, card: GpuModel | None) -> ExplainedRun | None:
        """The run on that card, or on one of compute capability 8.6; None without a config."""
        platform = platform_for(card) if card else Platform((8, 6))
        return self.run_with(platform) if self.config is not None else None

    def run_with(self, platform: Platform) -> ExplainedRun:
        assert self.config is not None
        return ExplainedRun(self.config, "fitgpt" if self.trainer == "auto" else self.trainer, platform, self.name)


def find_config(assignments: Sequence[Assignment], config: str = "", folder: Path | None = None,
                log: str = "") -> tuple[RunConfig | None, str, tuple[str, ...]]:
    """The run's config, the arguments that start it, and notes. Flags override config files, which override the config
    recorded in a run folder.

    `config`: a config file or a run folder. `log`: a file to explain, which may lie in the folder of its run.
    """
    assignments, recorded, name = list(assignments), None, ""
    if config and Path(config).is_dir():
        folder = Path(config)
    elif config:
        assignments = [*walk([config], RunConfig, config_files=True), *assignments]
    if folder is None and log and not assignments and (Path(log).parent / "run.json").is_file():
        folder = Path(log).parent
    if folder is not None:
        recorded, name = recorded_config(folder), f"--out_dir={folder} --init_from=resume"
        if recorded is None and not assignments:
            raise UsageError(f"{folder} holds no run of fitgpt: no run.json, which contains its config.",
                             f"fitgpt explain {folder} --config=config.py")
    if not assignments and recorded is None:
        return None, "", ()
    arguments = dict.fromkeys(each.source if each.source.startswith("-") else each.source.rpartition(":")[0]
                              for each in assignments)
    known = RunConfig.from_dict(recorded).to_dict() if recorded else {}
    assignments = [*(Assignment(key, value, str(folder)) for key, value in known.items()), *assignments]
    found, _ = run_config_from([each for each in assignments if (each.key, each.value) != RESUMED])
    found, _, _, notes = with_data(found)
    return found, name if recorded else " ".join(arguments), tuple(notes)


# ---- how it ran, if that was not given


class Hypothesis(NamedTuple):
    """One way in which the run may have been started, and the allocation that explains the message then."""

    run: ExplainedRun
    match: TensorMatch | None

    def distance(self, message: OomMessage) -> tuple[int, float]:
        """Least if the replay fails at the allocation; then if an allocation of the size exists, with a similar amount
        allocated before it."""
        if self.match is None:
            return 3, 0.0
        off = abs(self.match.allocated - message.allocated) / max(message.allocated, 1) if message.allocated else 0.0
        return 0 if self.match.fails_here else 1 if off <= SAME_RUN else 2, off

    def describe(self) -> str:
        return f"{'compiled' if self.run.settled.compile else 'eager'} {TRAINERS[self.run.trainer]}"


def possible_runs(message: OomMessage, run: ExplainedRun, trainer: str) -> list[ExplainedRun]:
    """The run with every trainer and compile mode that is neither given nor shown by the traceback; the given run
    first."""
    shown = trainer_of(message.frames)
    trainers = [trainer] if trainer != "auto" else [shown] if shown else [run.trainer, OTHER_TRAINER[run.trainer]]
    default, shown_compiled = bool(run.settled.compile), is_compiled(message.frames)
    if run.config.compile != "auto":
        modes = [default]
    else:
        modes = [default, not default] if shown_compiled is None else [shown_compiled]
    return [replace(run, trainer=each) if compiled == default else
            replace(run, trainer=each, config=replace(run.config, compile=compiled), inferred=True)
            for each in trainers for compiled in modes]


def check_hypothesis(message: OomMessage, run: ExplainedRun, phase: str, limit: int | None) -> Hypothesis:
    if message.requested is None:
        return Hypothesis(run, None)
    failed = None if limit is None else replay(run.tape, limit, expandable=run.expandable).failed
    return Hypothesis(run, match_tensor(message, phase, run.tape, run.timeline.allocated, failed))


def describe_choice(chosen: Hypothesis, hypotheses: Sequence[Hypothesis]) -> str:
    """How trainer and compile mode were inferred; empty if both were given."""
    compiled = bool(chosen.run.settled.compile)
    if len(hypotheses) < 2 and chosen.run.inferred:
        return f"The traceback shows that it ran {'compiled' if compiled else 'eager'}: --compile={compiled}."
    if len(hypotheses) < 2 or chosen.match is None:
        return ""
    also = [each.describe() for each in hypotheses if each.match is not None and each is not chosen]
    without = [each.describe() for each in hypotheses if each.match is None]
    text = (f"Trainer or compile mode was not given: {chosen.describe()} (--trainer={chosen.run.trainer} "
            f"--compile={compiled}) explains the message")
    text += f" best; {_join(also)} may request this size, too" if also else ""
    text += f"; {_join(without)} never request{'s' if len(without) == 1 else ''} this size" if without else ""
    return f"{text}."


def _join(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# ---- the case


@dataclass(frozen=True)
class Case:
    """What is known about an out-of-memory failure."""

    message: OomMessage
    phase: str = ""                 # load, eval, forward, backward or step, by the traceback; empty: not known
    usage: GpuUsage | None = None
    match: TensorMatch | None = None  # the allocation of the run's tape that failed
    run: ExplainedRun | None = None
    plan: MemoryPlan | None = None  # the run under the budget of the message, or else of its card
    hypotheses: tuple[Hypothesis, ...] = ()  # `run` and `match` are the best of them

    @property
    def requested(self) -> int:
        return self.message.requested or 0

    @property
    def total(self) -> int:
        return self.usage.total if self.usage else 0

    @property
    def free(self) -> int:
        return self.usage.free if self.usage else 0

    @property
    def missing(self) -> int:
        """Requested and not free."""
        return max(self.requested - self.free, 0)

    @property
    def unallocated(self) -> int:
        return (self.usage.unallocated if self.usage else None) or 0

    @property
    def reserved(self) -> int:
        return (self.usage.reserved if self.usage else None) or 0

    @property
    def tape_phase(self) -> str:
        return self.match.phase if self.match else self.phase

    @property
    def owner(self) -> str:
        return self.match.event.owner if self.match else ""

    @property
    def budget_from_card(self) -> bool:
        """Whether the plan uses the card's figures, because the message does not say how much PyTorch could reserve."""
        return self.usage is None or self.usage.limit is None

    @property
    def vendor(self) -> str:
        """The GPU's vendor, by the words of the message."""
        text = f"{self.message.kind} {self.message.source} {self.message.text}".lower()
        return "amd" if "hip" in text or "rocblas" in text else "intel" if self.message.kind == "xpu" else "nvidia"

    @property
    def is_nanogpt(self) -> bool:
        return self.run is not None and self.run.trainer == "nanogpt"


def build_case(message: OomMessage, run: ExplainedRun | None = None, card: GpuModel | None = None, trainer: str = "",
               others: int = 0) -> Case:
    """`trainer`: as given, may be auto; by default the run's. `others`: bytes of other processes, as given."""
    usage, phase = usage_in(message), phase_of(message.frames)
    if message.kind in NOT_ON_GPU or run is None:
        return Case(message, phase, usage, run=run)
    budget = budget_at_failure(message, usage, card or (card_with(usage.total) if usage else None), others)
    limit = budget.reserve_limit if budget else None
    hypotheses = tuple(check_hypothesis(message, each, phase, limit)
                       for each in possible_runs(message, run, trainer or run.trainer))
    best = min(hypotheses, key=lambda each: each.distance(message))
    return Case(message, phase, usage, best.match, best.run, best.run.plan(budget) if budget else None, hypotheses)


def card_with(usable: int) -> GpuModel | None:
    """The only GPU model with this much usable memory; None if there is none or more than one."""
    near = [card for card in load() if card.usable_mib and abs(card.usable_mib * MiB / usable - 1) <= SAME_CARD]
    return near[0] if len({card.name for card in near}) == 1 else None
