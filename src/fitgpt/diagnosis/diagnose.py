"""Case → Diagnosis: which tensor did not fit, why, who held the GPU's memory, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.units import MiB, show_bytes, show_count
from ..hardware.gpus import GpuModel
from ..planning.forecast import MemoryPlan, tensor_formula
from .case import NOT_ON_GPU, SAME_RUN, SCRIPTS, Case, ExplainedRun, build_case, describe_choice
from .gpu_usage import GpuUsage
from .oom_message import OomMessage
from .remedies import Remedy, remedies_for
from .rules import LIST_PROCESSES, Rule, had_free_memory, matching_rules
from .stack_frames import user_frame
from .tensor_match import PHASE_LABELS, TensorMatch, describe_tensor, guess_logits, is_segment_size


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
class Diagnosis:
    """What happened to a run's memory, why, and what would change it."""

    subject: str                 # message, reading, plan, run, unknown
    title: str
    what: str = ""               # which tensor was requested, or what dominates: a paragraph
    phase: str = ""              # of the run: load, first_eval, train …; empty: not known
    shares: tuple[MemoryShare, ...] = ()
    shares_of: str = ""          # what the shares add up to
    causes: tuple[Cause, ...] = ()      # those that decide first
    remedies: tuple[Remedy, ...] = ()   # the one to try first
    needed: tuple[str, ...] = ()        # what the user could add to learn more
    notes: tuple[str, ...] = ()


def diagnose(message: OomMessage, run: ExplainedRun | None = None, card: GpuModel | None = None, trainer: str = "",
             others: int = 0) -> Diagnosis:
    """`trainer`: as given, may be auto; by default the run's. `others`: bytes of other processes, as given."""
    case = build_case(message, run, card, trainer, others)
    rules = matching_rules(case)
    return Diagnosis(
        subject="message", title=_title(message), what=_what(case), phase=case.tape_phase,
        shares=usage_shares(case.usage, message) if case.usage else (), shares_of=_shares_of(case),
        causes=tuple(Cause(rule.code, rule.text_for(case)) for rule in rules),
        remedies=_remedies(case, rules), needed=_needed(case), notes=_notes(case))


# ---- what happened


def _title(message: OomMessage) -> str:
    if message.kind == "killed":
        return "The process was killed, most likely because CPU RAM ran out, not GPU memory."
    if message.kind == "ram":
        return "CPU RAM ran out, not GPU memory."
    if message.requested is None:
        return "Most likely GPU memory ran out." if "NOT_INITIALIZED" in message.text else "GPU memory ran out."
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
    size = tensor_formula(match.event, run.settled, run.trainer, match.phase)
    if is_segment_size(message):
        size = f"{size}, in a new segment of {show_bytes(message.requested or 0)}"
    text = f"{size}: {describe_tensor(match.event)}, in the {PHASE_LABELS[match.phase]} phase{direction}."
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


# ---- who held the memory


def usage_shares(usage: GpuUsage, message: OomMessage) -> tuple[MemoryShare, ...]:
    """Every byte of the GPU, once."""
    shares = []
    if usage.allocated is not None:
        pools = f"{message.private_pools / MiB:,.0f} MiB of it for CUDA graphs" if message.private_pools else ""
        shares.append(MemoryShare("tensors of this process", usage.allocated, pools))
    if usage.unallocated is not None:
        shares.append(MemoryShare("reserved by PyTorch but unallocated", usage.unallocated))
    if usage.reserved is None and usage.process is not None:
        shares.append(MemoryShare("this process", usage.process))
    if usage.spilled:
        return tuple(shares)
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
    return (*shares, MemoryShare("free", usage.free))


def _shares_of(case: Case) -> str:
    if case.usage is None:
        return ""
    gpu = "the GPU" if case.message.gpu is None else f"GPU {case.message.gpu}"
    if case.usage.spilled:
        return f"reserved, where {gpu} has {show_bytes(case.usage.total)}"
    return f"{show_bytes(case.usage.total)} of {gpu}"


# ---- what to do


def _remedies(case: Case, rules: tuple[Rule, ...]) -> tuple[Remedy, ...]:
    """The advice of the rules that decide, then changes with their forecast, then the advice of the other rules."""
    def advice(decides: bool) -> list[Remedy]:
        return [Remedy(todo, effect) for rule in rules if rule.decides(case) == decides
                for todo, effect in rule.advice_for(case)]

    changes = remedies_for(case.run, case.plan) if case.run is not None and case.plan is not None else ()
    found = [*advice(decides=True), *changes, *advice(decides=False)]
    return tuple({remedy.todo: remedy for remedy in reversed(found)}.values())[::-1]


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
    if message.kind in ("library", "driver") or (case.usage is not None and case.usage.others is None):
        tool = LIST_PROCESSES[case.vendor]
        if case.vendor == "nvidia":
            needed.append(f"{tool}'s output at that moment: which processes hold the GPU's memory")
        elif case.usage is None:
            needed.append(f"`{tool}` at that moment: which processes hold the GPU's memory")
        else:
            needed.append(f"--others=…, as `{tool}` shows it: how much other processes hold of the GPU")
    return tuple(needed)


def _notes(case: Case) -> tuple[str, ...]:
    notes = []
    if case.message.repeated:
        notes.append(f"Further messages of this kind: {case.message.repeated}. The first one counts.")
    if case.run is not None and case.plan is not None:
        notes.append(_forecast_note(case, case.run, case.plan))
    chosen = next((each for each in case.hypotheses if each.run is case.run), None)
    if chosen is not None and (choice := describe_choice(chosen, case.hypotheses)):
        notes.append(choice)
    return tuple(notes)


def _forecast_note(case: Case, run: ExplainedRun, plan: MemoryPlan) -> str:
    text = (f"By its forecast this run ({show_count(run.forecast.params)} parameters, {SCRIPTS[run.trainer]}) needs "
            f"{show_bytes(run.forecast.needs)}, and PyTorch could reserve {show_bytes(plan.budget.reserve_limit)}")
    larger = "allocates more than this config, so the figures after a change are not those of that program."
    if not case.budget_from_card:
        return f"{text}: it would have fitted. The program that ran out of memory {larger}" if plan.fits else f"{text}."
    others = plan.budget.others
    text += (f" on the {plan.budget.card} "
             f"{f'beside {show_bytes(others)} of other processes' if others else 'with no other processes'}")
    if plan.fits:
        return (f"{text}: it would have fitted. Either other processes held {'more' if others else 'some'} of the GPU "
                f"(give it with --others=…), or the program that ran out of memory {larger}")
    hint = "" if others else "; give --others=…"
    return f"{text}. The message does not say how much other processes held{hint}."
