"""How a run that ran out was run, where the user did not say: which trainer, compiled or eager. The message tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..sights import OutOfMemory
from .about import Run
from .frames import compiled_of, trainer_of
from .match import Match, match

FAR_OFF = 0.1  # of what is allocated: beyond that, tape and message are not of the same run
OTHER_TRAINER = {"fitgpt": "nanogpt", "nanogpt": "fitgpt"}


class Tried(NamedTuple):
    run: Run
    found: Match | None


def ways(message: OutOfMemory, run: Run, trainer: str) -> list[Run]:
    """The run as it may have been, the likeliest before it is compared first. What was said, or shows in the traceback,
    stays as it is."""
    shown = trainer_of(message.frames)
    trainers = [run.trainer, OTHER_TRAINER[run.trainer]] if trainer == "auto" and not shown else [
        shown if trainer == "auto" else trainer]
    usual = bool(run.settled.compile)
    seen = compiled_of(message.frames)
    settings = [usual, not usual] if seen is None and run.config.compile == "auto" else [
        usual if run.config.compile != "auto" or seen is None else seen]
    return [_as(run, each, compiled, usual) for each in trainers for compiled in settings]


def _as(run: Run, trainer: str, compiled: bool, usual: bool) -> Run:
    if compiled == usual:
        return replace(run, trainer=trainer)
    return replace(run, trainer=trainer, config=replace(run.config, compile=compiled), guessed=True)


def likeliest(message: OutOfMemory, runs: Sequence[Run], phase: str, limit: int | None) -> tuple[Tried, list[Tried]]:
    """The run whose tape explains the message best, with the allocation that does; and all that were tried."""
    tried = [Tried(run, match(message, run, phase, limit)) for run in runs]
    return min(tried, key=lambda each: _distance(each.found, message)), tried


def _distance(found: Match | None, message: OutOfMemory) -> tuple[int, float]:
    """Least where that very allocation is refused; then one of that size, with as much allocated before it."""
    if found is None:
        return 3, 0.0
    off = abs(found.allocated - message.allocated) / max(message.allocated, 1) if message.allocated else 0.0
    return 0 if found.refused else 1 if off <= FAR_OFF else 2, off


def how(run: Run) -> str:
    return f"{'compiled' if run.settled.compile else 'eager'} {'nanoGPT' if run.trainer == 'nanogpt' else 'fitgpt'}"


def which(chosen: Tried, tried: Sequence[Tried]) -> str:
    """How it was settled what was not said; nothing where there was nothing to settle."""
    if len(tried) < 2 and chosen.run.guessed:
        compiled = bool(chosen.run.settled.compile)
        return f"By its traceback it ran {'compiled' if compiled else 'eager'}: --compile={compiled}."
    if len(tried) < 2 or chosen.found is None:
        return ""
    flags = f"--trainer={chosen.run.trainer} --compile={bool(chosen.run.settled.compile)}"
    told = f"How it ran was not said: {how(chosen.run)} ({flags}) explains the message"
    also = [how(each.run) for each in tried if each.found is not None and each is not chosen]
    without = [how(each.run) for each in tried if each.found is None]
    told += f" best; {_listed(also)} could have asked for that size, too" if also else ""
    told += f"; {_listed(without)} never ask{'s' if len(without) == 1 else ''} for that size" if without else ""
    return f"{told}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
