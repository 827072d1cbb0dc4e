"""An out-of-memory message, and the run's config where it is known → why it ran out, and what would fit."""

from __future__ import annotations

from ..core.units import show_bytes, show_count
from ..hardware.gpus import Card
from ..nouns import MemoryPlan
from ..planning.formulas import tensor_formula
from ..sights import Cause, Diagnosis, OutOfMemory, Remedy
from .about import Run, card_with
from .facts import Facts
from .filling import budget_of, budget_on, filling, shares_of
from .frames import phase_of, users_line
from .match import guess, says_nothing
from .names import PHASES, name_in_words
from .remedies import remedies, savings
from .rules import WATCHERS, Rule, applying, had_room
from .unsaid import FAR_OFF, how, likeliest, ways, which

NO_CARD = ("killed", "host", "mps")


def diagnose(message: OutOfMemory, run: Run | None = None, card: Card | None = None,
             trainer: str = "", others: int = 0) -> Diagnosis:
    """`trainer`: the one that was said, or auto; by default the run's. `others`: what other processes are said to
    hold."""
    facts = gather(message, run, card, trainer, others)
    rules = applying(facts)
    return Diagnosis(
        subject="message", title=title(message), what=asked(facts), phase=facts.in_phase,
        shares=shares_of(facts.fill, message) if facts.fill else (), shares_of=_whose(facts),
        causes=tuple(Cause(rule.code, rule.cause(facts)) for rule in rules),
        remedies=ranked(facts, rules), needed=needed(facts), notes=notes(facts))


def gather(message: OutOfMemory, run: Run | None, card: Card | None, trainer: str = "", others: int = 0) -> Facts:
    fill, phase = filling(message), phase_of(message.frames)
    if message.kind in NO_CARD or run is None:
        return Facts(message, phase, fill, run=run)
    card = card or (card_with(fill.total) if fill else None)
    budget = (budget_of(fill, card, message.allowed) if fill else None) or budget_on(
        card, fill, others, message.allowed)
    best, tried = likeliest(message, ways(message, run, trainer or run.trainer), phase,
                            budget.reserve_limit if budget else None)
    return Facts(message, phase, fill, best.found, best.run, best.run.plan(budget) if budget else None, tuple(tried))


# ---- in words


def title(message: OutOfMemory) -> str:
    if message.kind == "killed":
        return "The process was ended, most likely because the machine's RAM ran out, not the card's memory."
    if message.kind == "host":
        return "The machine's RAM ran out, not the card's memory."
    if message.asked is None:
        return "Most likely the card's memory ran out." if "NOT_INITIALIZED" in message.words else (
            "The card's memory ran out.")
    free = "" if message.free is None else f"; {show_bytes(message.free)} were free"
    where = "" if message.gpu is None else f" on GPU {message.gpu}"
    return f"{show_bytes(message.asked)} were asked for{where}{free}."


def asked(facts: Facts) -> str:
    """What was asked for, by what and in which phase, as surely as it is known."""
    message = facts.message
    parts = []
    if message.shape:
        shape = " × ".join(f"{side:,}" for side in message.shape)
        parts.append(f"Compiled code asked for a {message.dtype} tensor of {shape}.")
    if facts.match is not None:
        parts.append(_matched(facts))
    elif message.asked is not None and says_nothing(message):
        parts.append(f"{show_bytes(message.asked)} is the segment PyTorch asks for whenever a tensor of "
                     f"{'1 to 10 MiB' if message.asked > 2 * 2**20 else 'up to 1 MiB'} finds no room: the size says "
                     f"nothing of the tensor.{'' if had_room(facts) else ' The card was full before it.'}")
    elif facts.run is not None and message.asked is not None:
        makers = " or ".join(how(each.run) for each in facts.tried)
        parts.append(f"No allocation of this config, as {makers} makes them, has that size: it is not the run the "
                     "message comes from, or not the same version.")
    elif not message.shape:
        parts.append(guess(message))
    line = users_line(message.frames)
    if line is not None and facts.match is None:
        at = f"{line.file}, line {line.line}" if line.line else line.file
        parts.append(f"The program was at {at}{f': {line.code}' if line.code else ''}")
    return " ".join(part for part in parts if part)


def _matched(facts: Facts) -> str:
    found, run, message = facts.match, facts.run, facts.message
    assert found is not None
    assert run is not None
    half = ", backward" if found.backward else ", forward" if found.phase in ("first_train", "train") else ""
    sized = tensor_formula(found.event, run.settled, run.trainer, found.phase)
    if says_nothing(message):
        sized = f"{sized}, out of a new segment of {show_bytes(message.asked or 0)}"
    what = f"{sized}: {name_in_words(found.event)}, {PHASES[found.phase]}{half}."
    if found.refused:
        limit = "what such a card has" if facts.by_the_card else "the same limit"
        return f"{what} Replayed within {limit}, this config's tape is refused at that very allocation."
    if message.allocated is None:
        return what
    off = abs(found.allocated - message.allocated)
    if off <= FAR_OFF * message.allocated:
        return (f"{what} {show_bytes(found.allocated)} are allocated then on the tape, "
                f"{show_bytes(message.allocated)} by the message.")
    return (f"{what} But {show_bytes(found.allocated)} are allocated then on the tape and "
            f"{show_bytes(message.allocated)} by the message: the run was not quite this config, or another version "
            "of the trainer.")


def _whose(facts: Facts) -> str:
    if facts.fill is None:
        return ""
    gpu = "the card" if facts.message.gpu is None else f"GPU {facts.message.gpu}"
    if facts.fill.spilled:
        return f"held, where {gpu} has {show_bytes(facts.fill.total)}"
    return f"{show_bytes(facts.fill.total)} of {gpu}"


def _forecast(facts: Facts, run: Run, plan: MemoryPlan) -> str:
    told = (f"By its forecast this run ({show_count(run.forecast.params)} parameters, {_whose_run(run)}) needs "
            f"{show_bytes(run.forecast.needs)}, and PyTorch could reserve {show_bytes(plan.budget.reserve_limit)}")
    more = "holds more than this config does here, so the figures after a change are not its own."
    if not facts.by_the_card:
        return f"{told}: it would have fitted. The program that ran out {more}" if plan.fits else f"{told}."
    others = plan.budget.others
    beside = f"beside {show_bytes(others)} of other processes" if others else "with nothing else on it"
    told = f"{told} on the {plan.budget.card} {beside}"
    if plan.fits:
        return (f"{told}: it would have fitted. Either other processes held {'more' if others else 'some'} of the card "
                f"(--others=… tells how much), or the program that ran out {more}")
    return f"{told}. The message does not say how the card was filled{'' if others else '; --others=… tells'}."


def _whose_run(run: Run) -> str:
    return "nanoGPT's train.py" if run.trainer == "nanogpt" else "fitgpt"


def ranked(facts: Facts, rules: tuple[Rule, ...]) -> tuple[Remedy, ...]:
    """What the causes that decide call for, then what the forecast says of changes, then the rest."""
    found = [remedy for rule in rules if rule.decides(facts) for remedy in rule.remedies(facts)]
    if facts.plan is not None and facts.run is not None:
        found += savings(facts.run) if facts.plan.fits else remedies(facts.run, facts.plan.budget)
    found += [remedy for rule in rules if not rule.decides(facts) for remedy in rule.remedies(facts)]
    return tuple({remedy.todo: remedy for remedy in reversed(found)}.values())[::-1]


def needed(facts: Facts) -> tuple[str, ...]:
    """What would tell more."""
    message = facts.message
    if message.kind in NO_CARD:
        return ()
    wanted = []
    if facts.run is None and message.kind in ("cuda", "hip"):
        wanted.append("the run's config, fitgpt explain FILE config.py: which tensor it was, what each change saves")
    if not message.frames and facts.match is None:
        wanted.append("the traceback above the message: in which phase it happened")
    if message.kind in ("library", "driver") or (facts.fill is not None and facts.fill.others is None):
        wanted.append(_who_holds_it(facts))
    return tuple(wanted)


def _who_holds_it(facts: Facts) -> str:
    watcher = WATCHERS[facts.vendor]
    if facts.fill is None or facts.vendor == "nvidia":
        screen = f"{watcher}'s screen" if facts.vendor == "nvidia" else f"`{watcher}`"
        return f"{screen} at that moment: who holds the card"
    return f"--others=…, as `{watcher}` shows it: what other processes hold of the card"


def notes(facts: Facts) -> tuple[str, ...]:
    message = facts.message
    found = []
    if message.more:
        found.append(f"More messages like it follow: {message.more}. The first is the one that counts.")
    if facts.run is not None and facts.plan is not None:
        found.append(_forecast(facts, facts.run, facts.plan))
    if settled := next((which(each, facts.tried) for each in facts.tried if each.run is facts.run), ""):
        found.append(settled)
    return tuple(found)
