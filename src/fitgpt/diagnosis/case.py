"""Everything known about an out-of-memory failure: who held the GPU's memory, the run that failed, its failing tensor.

Infers trainer and compile mode from the message when they were not given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..config.run_config import DEFAULT_VOCAB, GPT2_VOCAB, ResolvedRun, RunConfig, resolve_run
from ..core.units import GiB, MiB, show_bytes
from ..hardware.gpus import GpuModel, load
from ..memory.allocator import LARGE_BUFFER, SMALL_BUFFER, allocation_size
from ..memory.platform import Platform
from ..memory.tape import Event, Tape, round_size
from ..memory.timeline import Timeline, replay
from ..planning.budget import Budget, budget_for, platform_for, torch_version
from ..planning.forecast import Forecast, MemoryPlan, forecast, write_tape
from ..tracing.trace_file import Trace
from .oom_message import CUDA_MALLOC_ASYNC, FRAMEWORKS, OomMessage, is_compiled, phase_of, trainer_of

# Kinds of messages that the forecast of a CUDA GPU does not explain.
NOT_ON_GPU = ("killed", "ram", "mps", "vague", *FRAMEWORKS.keys() - {"nccl", "unsloth", "no batch"})
SAME_CARD = 0.004  # the usable memory of one GPU model may differ by this: 24084 and 24217 MiB of a 4090
SAME_RUN = 0.1     # if the allocated memory differs by more, tape and message are not of the same run
TRAINERS = {"fitgpt": "fitgpt", "nanogpt": "nanoGPT"}
SCRIPTS = {"fitgpt": "fitgpt", "nanogpt": "nanoGPT's train.py"}


# ---- the run


@dataclass(frozen=True)
class ExplainedRun:
    """The run whose memory is explained."""

    config: RunConfig
    trainer: str
    platform: Platform
    name: str = ""          # the arguments of `fitgpt train` that start it: a config file and flags
    inferred: bool = False  # the message shows another value of `compile` than the one given, or than the default

    @property
    def expandable(self) -> bool:
        return self.platform.uses_expandable_segments(self.trainer)

    @cached_property
    def resolved(self) -> ResolvedRun:
        return resolve_run(self.config, self.platform, self.trainer)

    @cached_property
    def tape(self) -> Tape:
        return write_tape(self.resolved, self.platform, self.trainer)

    @cached_property
    def timeline(self) -> Timeline:
        return replay(self.tape, expandable=self.expandable)

    @cached_property
    def forecast(self) -> Forecast:
        return forecast(self.resolved, self.platform, self.trainer)

    def with_other_trainer(self) -> ExplainedRun:
        return replace(self, trainer="fitgpt" if self.trainer == "nanogpt" else "nanogpt")

    def with_other_compile_mode(self) -> ExplainedRun:
        return replace(self, config=replace(self.config, compile=not self.resolved.compile), inferred=True)


@dataclass(frozen=True)
class ExplainRequest:
    """What the user gives besides the text or figures to explain."""

    config: RunConfig | None = None
    name: str = ""                 # the arguments of `fitgpt train` that start the run
    gpu: str = ""
    trainer: str = "auto"
    others: int | None = None      # bytes of other processes
    process: int | None = None     # bytes of the run's process
    trace: Trace | None = None     # of the script
    torch: str = ""                # version; by default the one installed here

    def run_on(self, card: GpuModel | None) -> ExplainedRun | None:
        """The run on that GPU, or on one of compute capability 8.6; None without a config."""
        if self.config is None:
            return None
        torch = torch_version(self.torch)
        return self.run_with(platform_for(card, torch=torch) if card else Platform((8, 6), torch))

    def run_with(self, platform: Platform) -> ExplainedRun:
        assert self.config is not None
        return ExplainedRun(self.config, "fitgpt" if self.trainer == "auto" else self.trainer, platform, self.name)


# ---- who held the GPU's memory

# Non-PyTorch memory of a process, CUDA context and kernels: 109 to 767 MiB were measured (hardware/gpus.csv). Where a
# message does not separate it from other processes, the part above this belongs to them.
MAX_OUTSIDE = GiB


@dataclass(frozen=True)
class GpuUsage:
    """Bytes of one GPU. None: the message does not contain the figure."""

    total: int
    free: int
    allocated: int | None = None
    unallocated: int | None = None  # reserved by PyTorch but unallocated
    process: int | None = None      # of this process, non-PyTorch memory included
    others: int | None = None
    pids: tuple[tuple[int, int], ...] = ()  # other processes, as listed

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated

    @property
    def used(self) -> int:
        return max(self.total - self.free, 0)

    @property
    def not_pytorch(self) -> int:
        """Neither free nor reserved by PyTorch: non-PyTorch memory of this process, and other processes."""
        held = self.reserved if self.reserved is not None else self.process or 0
        return max(self.total - self.free - held, 0)

    @property
    def outside(self) -> int | None:
        """Non-PyTorch memory of this process."""
        if self.process is None or self.reserved is None:
            return None
        return max(self.process - self.reserved, 0)

    @property
    def truncated(self) -> bool:
        """The message ends before the figures of this process and of PyTorch."""
        return self.process is None and self.reserved is None

    @property
    def others_at_least(self) -> int:
        if self.others is not None:
            return self.others
        return 0 if self.truncated else max(self.not_pytorch - MAX_OUTSIDE, 0)

    @property
    def spilled(self) -> bool:
        """More is reserved than the GPU has: Windows and WSL move the rest into CPU RAM."""
        return (self.reserved or 0) > self.total

    @property
    def limit(self) -> int | None:
        """The most that PyTorch could have reserved."""
        return None if self.reserved is None or self.spilled else self.reserved + self.free


def usage_in(message: OomMessage) -> GpuUsage | None:
    """None: the message does not contain the GPU's total and free memory."""
    if message.total is None or message.free is None:
        return None
    process, listed = message.process, list(message.others)
    if process is None and listed and message.reserved is not None:  # a container lists the own process with the others
        own = min((each for each in listed if each[1] >= message.reserved - 8 * MiB), key=lambda each: each[1],
                  default=None)
        if own is not None:
            listed.remove(own)
            process = own[1]
    others = None if process is None else max(message.total - message.free - process, sum(size for _, size in listed))
    unallocated = message.unallocated
    if message.source == CUDA_MALLOC_ASYNC:  # its pool keeps what neither tensors nor a context take
        unallocated = max(message.total - message.free - (message.allocated or 0) - MAX_OUTSIDE, 0)
    return GpuUsage(message.total, message.free, message.allocated, unallocated, process, others, tuple(listed))


MIN_CONTEXT, MAX_CONTEXT = 150 * MiB, 800 * MiB  # of a process that only touched a GPU
MAX_CONTEXT_OF_MANY = 3 * GiB // 2  # with NCCL's buffers; of three or more processes of the same size
SAME_CONTEXT = 0.03  # contexts on one GPU differ by less


def rank_contexts(processes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of (pid, bytes), those that are contexts of other ranks: two or more of nearly the same size."""
    small = sorted((each for each in processes if MIN_CONTEXT <= each[1] <= MAX_CONTEXT_OF_MANY),
                   key=lambda each: each[1])
    alike = [[other for other in small if abs(other[1] - size) <= SAME_CONTEXT * size] for _, size in small]
    most = max(alike, key=len, default=[])
    return most if len(most) > 2 or (len(most) == 2 and most[1][1] <= MAX_CONTEXT) else []


def describe_rank_contexts(contexts: Sequence[tuple[int, int]]) -> str:
    total = sum(size for _, size in contexts)
    return (f"{len(contexts)} other processes hold about {show_bytes(total // len(contexts))} each, "
            f"{show_bytes(total)} together: the CUDA contexts of other ranks, which should be on their own GPUs.")


def budget_at_failure(message: OomMessage, usage: GpuUsage | None, card: GpuModel | None, others: int) -> Budget | None:
    """What the run could have reserved, by the message's figures or else by the GPU's; None if neither is known.

    `others`: bytes of other processes, for a message that does not contain them.
    """
    if usage is not None and usage.limit is not None:
        outside = usage.outside if usage.outside is not None else min(
            usage.not_pytorch, card.outside_mib * MiB if card and card.outside_mib else usage.not_pytorch)
        limit = usage.limit if message.allowed is None else min(usage.limit, message.allowed)
        return Budget(card.name if card else f"GPU of {usage.total / GiB:.2f} GiB", usage.total,
                      max(usage.not_pytorch - outside, 0), limit + outside, outside,
                      ("The figures are those of the message.",))
    if card is None or card.usable_mib is None or card.outside_mib is None:
        return None
    others = max(others, usage.others_at_least) if usage else others
    budget = budget_for(card, others=others)
    usable = usage.total if usage else budget.usable
    left = max(usable - others, 0)
    return budget._replace(usable=usable, budget=left if message.allowed is None
                           else min(left, message.allowed + budget.outside))


# ---- the tensor that requested the allocation


class TensorMatch(NamedTuple):
    event: Event
    phase: str        # of the tape: first_eval, train …
    backward: bool
    allocated: int    # on the tape, before this allocation
    fails_here: bool  # replayed under the message's memory limit, the tape runs out of memory at this allocation


def match_tensor(message: OomMessage, phase: str, run: ExplainedRun, limit: int | None) -> TensorMatch | None:
    """The allocation of the run's tape that has the requested size.

    If several have it: the one at which the tape, replayed under the limit, runs out of memory; else the one with the
    most similar amount allocated before it, in the phase that the traceback shows.
    """
    if message.requested is None:
        return None
    tape, allocated = run.tape, run.timeline.allocated
    failed = None if limit is None else replay(tape, limit, expandable=run.expandable).failed
    found = [TensorMatch(event, tape_phase, _BACKWARD.fullmatch(event.name) is not None,
                         allocated[number - 1] if number else 0, number == failed)
             for tape_phase, start, end in tape.phases
             for number, event in enumerate(tape.events[start:end], start)
             if event.alloc and has_requested_size(event.nbytes, message)]
    agreeing = [each for each in found if _agrees(each, phase)]
    failing = next((each for each in agreeing if each.fails_here), None)
    if failing is not None or is_segment_size(message):
        return failing
    if phase == "save":  # another tensor of this size says nothing about it
        found = []
    return min(agreeing or found, key=lambda each: abs(each.allocated - (message.allocated or 0)), default=None)


def has_requested_size(nbytes: int, message: OomMessage) -> bool:
    """Whether PyTorch requests the message's size for a tensor of `nbytes`: rounded to 512 bytes, or to a segment."""
    assert message.requested is not None
    size = round_size(nbytes)
    return any(abs(each - message.requested) <= message.tolerance for each in (size, allocation_size(size)))


def is_segment_size(message: OomMessage) -> bool:
    """Whether it is the size of a new segment for small tensors, which is the same for every tensor."""
    return message.requested in (SMALL_BUFFER, LARGE_BUFFER)


def _agrees(found: TensorMatch, phase: str) -> bool:
    if phase == "eval":
        return found.phase.endswith("eval")
    if phase in ("forward", "backward"):
        return found.phase.endswith("train") and found.backward == (phase == "backward")
    if phase == "step":
        return found.event.owner == "optimizer" or found.phase == "step"
    return phase in ("", found.phase)


# Tokens of a usual batch are a multiple of this. Sizes are printed to 2 MiB, those in GiB to 10 MiB, so one in 30 to 60
# other tensors has such a size by chance: it remains a guess.
TOKENS_MULTIPLE, TOKENS_MULTIPLE_IN_GIB = 1024, 4096


def guess_logits(message: OomMessage) -> str:
    """A sentence if logits with GPT-2's vocabulary have the requested size; otherwise empty."""
    if message.requested is None or is_segment_size(message):
        return ""
    multiple = TOKENS_MULTIPLE if message.tolerance < MiB else TOKENS_MULTIPLE_IN_GIB
    found = []
    for width, precision in ((4, "float32"), (2, "half precision")):
        for vocab in (DEFAULT_VOCAB, GPT2_VOCAB):
            tokens = round(message.requested / (vocab * width * multiple)) * multiple
            if tokens and has_requested_size(tokens * vocab * width, message):
                found.append(f"{tokens:,} tokens in {precision} ({tokens:,} × {vocab:,} × {width} bytes)")
                break
    return f"A guess: this is the size of logits, with GPT-2's vocabulary, of {' or '.join(found)}." if found else ""


# What tensors are called, by their owner or their name on the tape.
_OWNERS = {"weights": "weights", "gradients": "a gradient", "optimizer": "optimizer state",
           "casts": "a half-precision copy of weights", "activations": "an activation", "logits": "logits",
           "attention": "attention scores", "workspace": "a kernel's workspace", "data": "the batch",
           "other": "a small tensor"}
_BACKWARD = re.compile(r"(?:\d+\.)?d_.*|.*\.(?:grad|raw|fresh)|.*backward.*")
_TENSORS = tuple((re.compile(pattern), text) for pattern, text in (
    (r"log_softmax\.float", "the float32 copy of the log-probabilities, which the loss is computed from"),
    (r"log_softmax", "the log-probabilities of every token"),
    (r"logits of .*", "the logits of every token"),
    (r"logits", "the logits of one chunk of the loss"),
    (r"zeros for logits", "zeros for the gradient of the logits, which forward returns and nothing uses"),
    (r"d_log_softmax", "the float32 gradient of the log-probabilities, the first tensor of the backward pass"),
    (r"d_log_softmax\.half", "the half-precision gradient of the log-probabilities"),
    (r"d_logits", "the gradient of the logits"),
    (r"(\d+)\.fc", "the output of the first MLP matmul of layer {0}"),
    (r"(\d+)\.(?:gelu|g)", "the GELU output of layer {0}"),
    (r"(\d+)\.qkv", "queries, keys and values of layer {0}"),
    (r"(\d+)\.att(?:\.padded)?", "the attention output of layer {0}"),
    (r"wte", "the token embedding, which is also the output head"),
    (r"(.+)\.(?:exp_avg(?:_sq)?|first|second)", "the optimizer's moments of {0}"),
    (r"(.+)\.(?:grad|fresh|raw)", "the gradient of {0}"),
    (r"(.+)\.cast", "the half-precision copy of {0}"),
    (r"(?:\d+\.)?d_(.+)", "a gradient inside the backward pass ({0})"),
))


def describe_tensor(event: Event) -> str:
    """'the GELU output of layer 3' for the event named 3.gelu."""
    for pattern, text in _TENSORS:
        if found := pattern.fullmatch(event.name):
            return text.format(*found.groups())
    return f"{_OWNERS[event.owner]} ({event.name})"


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
        return f"{'compiled' if self.run.resolved.compile else 'eager'} {TRAINERS[self.run.trainer]}"


def possible_runs(message: OomMessage, run: ExplainedRun, trainer: str) -> list[ExplainedRun]:
    """The run with every trainer and compile mode that is neither given nor shown by the traceback; the given run
    first."""
    trainers, compile_modes = [trainer], [default := bool(run.resolved.compile)]
    if trainer == "auto":
        shown = trainer_of(message.frames)
        trainers = [shown] if shown else [run.trainer, run.with_other_trainer().trainer]
    if run.config.compile == "auto":
        compiled = is_compiled(message.frames)
        compile_modes = [default, not default] if compiled is None else [compiled]
    return [replace(run, trainer=each) if compiled == default else
            replace(run, trainer=each, config=replace(run.config, compile=compiled), inferred=True)
            for each in trainers for compiled in compile_modes]


SURELY = (2, 0.0)  # less than this distance: it fails there, or has a similar amount allocated


def describe_choice(chosen: Hypothesis, hypotheses: Sequence[Hypothesis]) -> str:
    """How trainer and compile mode were inferred; empty if both were given."""
    compiled = bool(chosen.run.resolved.compile)
    if len(hypotheses) < 2 and chosen.run.inferred:
        return f"The traceback shows that it ran {'compiled' if compiled else 'eager'}: --compile={compiled}."
    if len(hypotheses) < 2 or chosen.match is None:
        return ""
    given = hypotheses[0].run
    if given.config.compile != "auto" and chosen.run.inferred:
        return (f"With --compile={given.config.compile}, as given, no allocation has this size: {chosen.describe()} "
                f"(--compile={compiled}) explains the message.")

    def join(names: list[str]) -> str:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    also = [each.describe() for each in hypotheses if each.match is not None and each is not chosen]
    without = [each.describe() for each in hypotheses if each.match is None]
    flags = {"trainer": f"--trainer={chosen.run.trainer}", "compile mode": f"--compile={compiled}"}
    if len({each.run.trainer for each in hypotheses}) == 1:
        del flags["trainer"]
    if len({each.run.inferred for each in hypotheses}) == 1:
        del flags["compile mode"]
    missing = "Trainer and compile mode were" if len(flags) > 1 else f"The {next(iter(flags))} was"
    text = f"{missing} not given: {chosen.describe()} ({' '.join(flags.values())}) explains the message"
    text += f" best; {join(also)} may request this size, too" if also else ""
    text += f"; {join(without)} never request{'s' if len(without) == 1 else ''} this size" if without else ""
    return f"{text}."


# ---- the case


@dataclass(frozen=True)
class Case:
    """What is known about an out-of-memory failure."""

    message: OomMessage
    phase: str = ""                 # load, eval, forward, backward or step, by the traceback; empty: not known
    usage: GpuUsage | None = None
    match: TensorMatch | None = None  # the allocation of the run's tape that failed
    run: ExplainedRun | None = None
    plan: MemoryPlan | None = None  # the run under the budget of the message, or else of its GPU
    hypotheses: tuple[Hypothesis, ...] = ()  # `run` and `match` are the best of them

    @property
    def requested(self) -> int:
        return self.message.requested or 0

    @property
    def missing(self) -> int:
        """Requested and not free; less than 32 MiB are the rest of a full GPU, too little for a segment."""
        free = self.usage.free if self.usage else 0
        return max(self.requested - (free if free >= 32 * MiB else 0), 0)

    @property
    def tape_phase(self) -> str:
        return self.match.phase if self.match else self.phase

    @property
    def owner(self) -> str:
        return self.match.event.owner if self.match else ""

    @property
    def budget_from_card(self) -> bool:
        """Whether the plan uses the GPU's figures, because the message does not say how much PyTorch could reserve."""
        return self.usage is None or self.usage.limit is None

    @property
    def vendor(self) -> str:
        """The GPU's vendor, by the words of the message."""
        text = f"{self.message.kind} {self.message.source} {self.message.text}".lower()
        return ("amd" if "hip" in text or "rocblas" in text else
                {"xpu": "intel", "npu": "huawei"}.get(self.message.kind, "nvidia"))

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


    def tried(run: ExplainedRun) -> tuple[Hypothesis, ...]:
        return tuple(Hypothesis(each, match_tensor(message, phase, each, limit))
                     for each in possible_runs(message, run, trainer or run.trainer))

    hypotheses = tried(run)
    if run.config.compile != "auto" and all(each.match is None for each in hypotheses):
        other_mode = tried(run.with_other_compile_mode())  # the config file says compile=True, and a flag said False
        hypotheses += tuple(each for each in other_mode if each.distance(message) < SURELY)
    best = min(hypotheses, key=lambda each: each.distance(message))
    plan = MemoryPlan(best.run.forecast, budget) if budget else None
    return Case(message, phase, usage, best.match, best.run, plan, hypotheses)


def card_with(usable: int) -> GpuModel | None:
    """The only GPU model with this much usable memory; None if there is none or more than one."""
    near = [card for card in load() if card.usable_mib and abs(card.usable_mib * MiB - usable) <= SAME_CARD * usable]
    return near[0] if len({card.name for card in near}) == 1 else None
