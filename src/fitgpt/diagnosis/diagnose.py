"""Case → Diagnosis: which tensor did not fit, why, who held the GPU's memory, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..config.fields import shown
from ..config.run_config import RunConfig, diff
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes, show_count
from ..hardware.allocator_env import USE_EXPANDABLE_SEGMENTS
from ..hardware.gpus import GpuModel
from ..memory.timeline import replay
from ..planning.changes import RANKS, Change, ChangedRun, by_family, single_changes, smallest
from ..planning.forecast import MemoryPlan, fits, replay_run, tensor_formula
from ..runs.metrics import PHASES
from .case import (
    NOT_ON_GPU,
    SAME_RUN,
    SCRIPTS,
    Case,
    ExplainedRun,
    TensorMatch,
    build_case,
    describe_choice,
    describe_tensor,
    guess_logits,
    is_segment_size,
)
from .oom_message import CUDA_MALLOC_ASYNC, FRAMEWORKS, MORE_THAN_1EB, OomMessage, user_frame
from .rules import SMALLER_BATCH, TOOLS, Rule, had_free_memory, matching_rules


@dataclass(frozen=True)
class MemoryShare:
    """A number of bytes and who holds them."""

    what: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Cause:
    """A rule of `fitgpt explain` that applies: its code, and its text for this case."""

    code: str
    what: str


@dataclass(frozen=True)
class Remedy:
    """Something to type or do, and its effect. None: not known."""

    todo: str
    effect: str                  # "7.31 GiB allocated at the peak, 3.1 GiB less", or another text
    fits: bool | None = None
    costs: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What happened to a run's memory, why, and what would change it. `print` it for the text of `fitgpt explain`."""

    subject: str                 # message, reading, plan, run, snapshot, unknown
    title: str
    what: str = ""               # which tensor was requested, or what dominates: a paragraph
    phase: str = ""              # of the run: load, first_eval, train …; empty: not known
    shares: tuple[MemoryShare, ...] = ()
    shares_of: str = ""          # what the shares add up to
    causes: tuple[Cause, ...] = ()      # those that decide first
    remedies: tuple[Remedy, ...] = ()   # the one to try first
    needed: tuple[str, ...] = ()        # what the user could add to learn more
    notes: tuple[str, ...] = ()
    inferred: dict[str, Any] = field(default_factory=dict)  # options of the explained run that were not given

    def __str__(self) -> str:
        from ..show.diagnosis_text import diagnosis_text  # a diagnosis prints itself; nothing else here shows anything
        from ..show.terminal import columns

        return diagnosis_text(self, min(columns(), 80))

    def __repr__(self) -> str:
        return f"<fitgpt.explain: {self.title}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def diagnose(message: OomMessage, run: ExplainedRun | None = None, card: GpuModel | None = None, trainer: str = "",
             others: int = 0) -> Diagnosis:
    """`trainer`: as given, may be auto; by default the run's. `others`: bytes of other processes, as given."""
    case = build_case(message, run, card, trainer, others)
    rules = matching_rules(case)

    # The advice of the rules that decide, then changes with their forecast, then the advice of the other rules.
    advice = {decides: [Remedy(todo, effect) for each in rules if each.decides == decides
                        for todo, effect in each.rule.advice_for(case)] for decides in (True, False)}
    changes = remedies_for(case.run, case.plan) if case.run and case.plan and case.phase != "save" else ()
    remedies = (*advice[True], *changes, *advice[False])
    places: dict[str, int] = {}  # of each remedy once; a smaller batch comes late if several rules advise it
    for number, remedy in enumerate(remedies):
        if remedy.todo not in places or remedy.todo == SMALLER_BATCH[0][0]:
            places[remedy.todo] = number

    notes = []
    if message.repeated:
        notes.append(f"Further messages of this kind: {message.repeated}. The first one counts.")
    if case.run is not None and case.plan is not None:
        notes.append(_forecast_note(case, case.run, case.plan))
    chosen = next((each for each in case.hypotheses if each.run is case.run), None)
    if chosen is not None and (choice := describe_choice(chosen, case.hypotheses)):
        notes.append(choice)

    shares, shares_of = _usage_shares(case)
    return Diagnosis(
        subject="message", title=_title(message, rules[0].rule), what=_what(case), phase=case.tape_phase, shares=shares,
        shares_of=shares_of, causes=tuple(Cause(each.rule.code, each.text) for each in rules),
        remedies=tuple(remedies[number] for number in sorted(places.values())), needed=_needed(case),
        notes=tuple(notes),
        inferred={"compile": case.run.config.compile} if case.run is not None and case.run.inferred else {})


# ---- what happened


def _title(message: OomMessage, cause: Rule) -> str:
    if message.kind == "killed":
        return "The process was killed, most likely because CPU RAM ran out, not GPU memory."
    if message.kind == "ram":
        return "CPU RAM ran out, not GPU memory."
    if message.kind in FRAMEWORKS:
        return f"{cause.title}."
    if message.kind == "vague":
        return "Memory ran out."
    if message.requested is None:
        likely = message.kind == "library" and "ALLOC_FAILED" not in message.text
        return "Most likely GPU memory ran out." if likely else "GPU memory ran out."
    if message.requested == MORE_THAN_1EB:
        return "Out of memory: more than 1 EB were requested."
    free = "" if message.free is None else f"; {show_bytes(message.free)} were free"
    gpu = "" if message.gpu is None else f" on GPU {message.gpu}"
    return f"Out of memory: {show_bytes(message.requested)} were requested{gpu}{free}."


def _what(case: Case) -> str:
    """What was requested, for which tensor and in which phase, as far as it is known."""
    message, sentences = case.message, []
    if message.shape:
        shape = " × ".join(f"{side:,}" for side in message.shape)
        sentences.append(f"Compiled code requested a {message.dtype} tensor of {shape}.")
    if case.match is not None and case.run is not None:
        sentences.append(_matched_tensor(case, case.match, case.run))
    elif message.requested is not None and is_segment_size(message):
        tensor = "1 to 10 MiB" if message.requested > 2 * MiB else "up to 1 MiB"
        full = "" if had_free_memory(case) else " The GPU was full before it."
        sentences.append(f"{show_bytes(message.requested)} is the size of a new segment for any tensor of {tensor}: it "
                         f"does not show which tensor.{full}")
    elif case.run is not None and message.requested is not None:
        tried = " or ".join(each.describe() for each in case.hypotheses)
        sentences.append(f"No allocation of this config with {tried} has this size: the message comes from another run "
                         "or another version.")
    elif not message.shape:
        sentences.append(guess_logits(message))
    frame = user_frame(message.frames)
    if frame is not None and case.match is None:
        where = f"{frame.file}, line {frame.line}" if frame.line else frame.file
        sentences.append(f"The program was at {where}{f': {frame.code}' if frame.code else ''}")
    return " ".join(filter(None, sentences))


def _matched_tensor(case: Case, match: TensorMatch, run: ExplainedRun) -> str:
    message = case.message
    direction = ", backward" if match.backward else ", forward" if match.phase in ("first_train", "train") else ""
    size = tensor_formula(match.event, run.resolved, run.trainer, match.phase)
    if is_segment_size(message):
        size = f"{size}, in a new segment of {show_bytes(message.requested or 0)}"
    text = f"{size}: {describe_tensor(match.event)}, in the {PHASES[match.phase]} phase{direction}."
    if match.fails_here:
        limit = "the memory of such a GPU" if case.budget_from_card else "the same limit"
        return f"{text} Replayed with {limit}, the forecast runs out of memory at exactly this allocation."
    if message.allocated is None:
        return text
    allocated = (f"{show_bytes(match.allocated)} are allocated before it in the forecast, "
                 f"{show_bytes(message.allocated)} in the message")
    if abs(match.allocated - message.allocated) <= SAME_RUN * message.allocated:
        return f"{text} {allocated}."
    return f"{text} But {allocated}: the run had another config, or another version of the trainer."


def _usage_shares(case: Case) -> tuple[tuple[MemoryShare, ...], str]:
    """Every byte of the GPU, once, and what the shares add up to."""
    usage, shares = case.usage, []
    if usage is None:
        return (), ""
    gpu = "the GPU" if case.message.gpu is None else f"GPU {case.message.gpu}"
    if usage.allocated is not None:
        pools = f"{case.message.private_pools / MiB:,.0f} MiB of it for CUDA graphs" if case.message.private_pools \
            else ""
        shares.append(MemoryShare("tensors of this process", usage.allocated, pools))
    if usage.unallocated is not None:
        guess = "or other processes; cudaMallocAsync does not say" if case.message.source == CUDA_MALLOC_ASYNC else ""
        shares.append(MemoryShare("reserved by PyTorch but unallocated", usage.unallocated, guess))
    if usage.reserved is None and usage.process is not None:
        shares.append(MemoryShare("this process", usage.process))
    if usage.spilled:
        return tuple(shares), f"reserved, where {gpu} has {show_bytes(usage.total)}"
    if usage.outside is not None:
        shares.append(MemoryShare("this process outside PyTorch", usage.outside, "context and kernels"))
    listed = ", ".join(f"process {pid}: {size / MiB:,.0f} MiB" for pid, size in usage.pids)
    if usage.truncated:
        unknown = "the message does not say by which process"
        shares.append(MemoryShare("in use", usage.not_pytorch,
                                  f"{listed}; of the rest {unknown}" if listed else unknown))
    elif usage.others is not None:
        shares.append(MemoryShare("other processes", usage.others, listed))
    elif usage.not_pytorch:
        shares.append(MemoryShare("neither free nor reserved by PyTorch", usage.not_pytorch,
                                  "this process's context, and other processes"))
    return (*shares, MemoryShare("free", usage.free)), f"{show_bytes(usage.total)} of {gpu}"


def _needed(case: Case) -> tuple[str, ...]:
    """What the user could add to learn more."""
    message = case.message
    if message.kind in NOT_ON_GPU:
        return ()
    needed = []
    if case.run is None and message.kind in ("cuda", "hip"):
        needed.append("the run's config, fitgpt explain FILE config.py: which tensor it was, what each change saves")
    if not message.frames and case.match is None:
        needed.append("the traceback above the message: in which phase it happened")
    without_figures = message.kind in ("library", "driver", "nccl", "unsloth")
    if without_figures or (case.usage is not None and case.usage.others is None):
        tool = TOOLS[case.vendor]["list_processes"]
        if case.vendor == "nvidia":
            needed.append(f"{tool}'s output at that moment: which processes hold the GPU's memory")
        elif case.usage is None:
            needed.append(f"`{tool}` at that moment: which processes hold the GPU's memory")
        else:
            needed.append(f"--others=…, as `{tool}` shows it: how much other processes hold of the GPU")
    return tuple(needed)


def _forecast_note(case: Case, run: ExplainedRun, plan: MemoryPlan) -> str:
    text = (f"By its forecast this run ({show_count(run.forecast.params)} parameters, {SCRIPTS[run.trainer]}) needs "
            f"{show_bytes(run.forecast.needs)}, and PyTorch could reserve {show_bytes(plan.budget.reserve_limit)}")
    larger = "allocates more than this config, so the figures after a change are not those of that program."
    if not case.budget_from_card:
        fits = plan.headroom >= 0
        return f"{text}: it would have fitted. The program that ran out of memory {larger}" if fits else f"{text}."
    others = plan.budget.others
    text += (f" on the {plan.budget.card} "
             f"{f'beside {show_bytes(others)} of other processes' if others else 'with no other processes'}")
    if plan.headroom >= 0:
        return (f"{text}: it would have fitted. Either other processes held {'more' if others else 'some'} of the GPU "
                f"(give it with --others=…), or the program that ran out of memory {larger}")
    hint = "" if others else "; give --others=…"
    return f"{text}. The message does not say how much other processes held{hint}."


# ---- changes of the run, with their forecast

MAX_REMEDIES = 4
MIN_SAVING = 0.05  # of the peak; less is not worth listing
# Tried if no single change is enough: several together, with fitgpt, the exact ones first.
COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"batch_size": 1, "saved_activations": "input"},
    {"batch_size": 1, "saved_activations": "input", "offload": "optimizer"},
    {"batch_size": 1, "saved_activations": "input", "offload": "gradients"},
    {"weights": "bfloat16", "optimizer": "adam8bit"},
    {"weights": "bfloat16", "optimizer": "adam8bit", "batch_size": 1, "saved_activations": "input"},
)


def _families(run: ExplainedRun) -> list[list[ChangedRun]]:
    """The single changes of the run by family, ranked as in planning/changes.py; for `fitgpt train` without a `compile`
    that was inferred from another trainer's run; without changes of what is trained: another context, or other tokens
    per step."""
    return list(by_family(tuple(
        changed if changed.change.trainer == run.trainer else changed._replace(config=_fitgpt_config(run))
        for changed in single_changes(run.config, run.trainer, compiles=run.platform.compiles)
        if changed.change.comparable and changed.change.family != "accumulation")).values())


def _fitgpt_config(run: ExplainedRun) -> RunConfig:
    return replace(run.config, compile="auto") if run.inferred and run.trainer != "fitgpt" else run.config


def savings(run: ExplainedRun) -> tuple[Remedy, ...]:
    """What the smallest exact change of each family saves, where that is worth listing."""
    first = [family[0] for family in _families(run) if family[0].change.exact]
    peaks = [(RANKS.index(changed.change.rank), _peak_after(changed, run), changed) for changed in first]
    saving = [changed for _, peak, changed in sorted(peaks, key=lambda each: each[:2])
              if run.timeline.peak - peak >= MIN_SAVING * run.timeline.peak]
    return tuple(_remedy(changed, run, fits=None) for changed in saving[:MAX_REMEDIES])


def remedies_for(run: ExplainedRun, plan: MemoryPlan) -> tuple[Remedy, ...]:
    """If the plan fits, `savings`. Otherwise the smallest change of each family that makes the run fit; if none does,
    several together."""
    if plan.headroom >= 0:
        return savings(run)
    families = _families(run)

    def is_enough(changed: ChangedRun) -> bool:
        return fits(changed.resolved(run.platform), run.platform, plan.budget.reserve_limit, changed.change.trainer)

    enough = [changed for family in families if (changed := smallest(family, is_enough))][:MAX_REMEDIES]
    if not enough:  # the first exact combination that is enough, and the first lossy one
        combined = [changed for options in COMBINATIONS if (
            changed := _combination(_fitgpt_config(run), options))]
        enough = [changed for exact in (True, False) if (changed := next(
            (each for each in combined if each.change.exact == exact and is_enough(each)), None))]
    remedies = [_remedy(changed, run, fits=True) for changed in enough]

    # nanoGPT does not enable expandable_segments; the environment variable can. Where that is enough, it costs least.
    if run.trainer == "nanogpt":
        after = replay(run.tape, plan.budget.reserve_limit, expandable=True)
        if after.failed is None:
            remedies.insert(0, Remedy(USE_EXPANDABLE_SEGMENTS, f"reserves {show_bytes(after.reserved)} instead of "
                                      f"{show_bytes(run.timeline.reserved)} for the same tensors", True,
                                      "nothing; not on Windows"))
    return tuple(remedies)


def _combination(config: RunConfig, options: dict[str, Any]) -> ChangedRun | None:
    times = config.batch_size // options["batch_size"] if "batch_size" in options else 1
    try:
        changed = replace(config, **options, grad_checkpoint=False,
                          gradient_accumulation_steps=config.gradient_accumulation_steps * times)
    except UsageError:
        return None
    flags = tuple(f"--{key}={shown(now)}" for key, _, now in diff(config, changed))
    exact = "weights" not in options
    slower = "slower" if {"saved_activations", "offload"} & options.keys() else "nothing measured"
    return ChangedRun(Change(flags, "", exact, True, slower, "together", "fitgpt"), changed) if flags else None


def _remedy(changed: ChangedRun, run: ExplainedRun, *, fits: bool | None) -> Remedy:
    """The flags to add; for a change of the trainer, the whole command."""
    change, before, after = changed.change, run.timeline.peak, _peak_after(changed, run)
    flags = () if change.family == "trainer" else change.flags
    todo = " ".join(flags if change.trainer == run.trainer else ("fitgpt train", run.name or "config.py", *flags))
    difference = f"{show_bytes(before - after)} less" if after <= before else f"{show_bytes(after - before)} more"
    return Remedy(todo, f"{show_bytes(after)} allocated at the peak, {difference}", fits,
                  f"{'' if change.exact else 'lossy; '}{change.slower}")


def _peak_after(changed: ChangedRun, run: ExplainedRun) -> int:
    return replay_run(changed.resolved(run.platform), run.platform, changed.change.trainer).peak
