"""`fitgpt plan`, `fitgpt cards` and `fitgpt.plan(...)`: what a run will hold in GPU memory, and whether it fits.

Neither torch nor numpy is loaded, and what only some answers need is imported where they are given.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..aside import aside
from ..config.command_options import CardsOptions, PlanOptions, PlanQuestions
from ..config.fields import Assignment, knobs_of, nearest, walk
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.files import is_own_page, refuse_foreign, write_over
from ..core.units import MiB, show_bytes
from ..hardware import gpus
from ..memory import gpt
from ..memory.forwardgraph import few_rows
from ..memory.setting import Setting
from ..nanonotes import on_the_card
from ..nouns import CardVerdict, MemoryPlan
from ..planning import budget as place
from ..planning import forecast
from ..planning.budget import Place, beside
from ..planning.duration import of_length, tokens_per_s
from ..planning.plan import Fields, Plan, changes_of
from ..planning.resolve import Question, place_of, question_of, size
from ..show import planning as show
from ..show.terminal import can_redraw, columns

SCHEMA = 1  # of lists of cards; of a plan, see planfile.py
OF_THE_COMMAND = ("all_cards", "timeline", "json")  # of no use to the call
NOTHING: Mapping[str, Any] = MappingProxyType({})
AS_TEXT = ("gpu", "budget", "others", "leave", "tokens")  # numbers are as good


# ---- the verb


def verb(assignments: Sequence[Assignment]) -> int:
    with _without_collecting():
        return _verb(assignments)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """A plan makes hundreds of thousands of small tuples and no cycles: looking through them takes a fifth of it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _verb(assignments: Sequence[Assignment]) -> int:
    question = question_of(assignments)
    if question.asked.all_cards:
        return _all_cards(question)
    question, found = _placed(question)
    asked = question.asked
    if asked.timeline:
        _check_page(Path(asked.timeline))
    find_changes: Callable[[], Fields] = partial(changes_of, question.config, found, asked.trainer)
    if _cannot_fit(question.config, found, asked.trainer):
        find_changes = aside(find_changes)
    memory = forecast.plan(question.config, found.setting, found.budget, asked.trainer, aside)
    answer = Plan(question, found, memory, find_changes)
    if asked.json:
        print(json.dumps(answer.to_dict(), indent=1, ensure_ascii=False))
    else:
        print(answer.text(columns(), _colours()), end="")
    if asked.timeline:
        _write_timeline(Path(asked.timeline), question, found, memory)
    return 0 if answer.fits else 1


def _placed(question: Question) -> tuple[Question, Place]:
    """Where it runs, and the question as it is there: as long as asked for, with what is to be said of both."""
    asked, found = question.asked, _found(question.asked, question.config)
    place.check_runs(question.config, found, asked.trainer)
    config, length = of_length(question.config, asked, question.data, question.missing, found.card)
    more = _replays(config, found.setting) if asked.trainer == "fitgpt" else on_the_card(config, found.setting)
    notes = (*question.notes, *found.notes, *length, *more, *place.left_out_of_the_forecast())
    return question._replace(config=config, notes=notes), found


def _found(asked: PlanQuestions, config: RunConfig) -> Place:
    found = place_of(asked, config.device)
    return found._replace(budget=beside(config, found.budget)) if config.leave else found


def _cannot_fit(config: RunConfig, found: Place, trainer: str) -> bool:
    """Whether that is plain already; if not, the plan will tell."""
    least = forecast.held_at_least(forecast.settled(config, found.setting, trainer), found.setting, trainer)
    return least > found.budget.reserve_limit


def _check_page(path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"--timeline {path}: there is no folder {path.parent}.",
                         f"--timeline {shlex.quote(path.name)}")
    refuse_foreign(path, is_own_page, "plan", "--timeline")


def _write_timeline(path: Path, question: Question, found: Place, plan: MemoryPlan) -> None:
    from ..memory.thinned import one_step

    drawn = one_step(forecast.timeline_of(question.config, found.setting, question.asked.trainer))
    wrote = write_over(path, show.timeline_page(plan, drawn))
    print(f"The step is drawn in {wrote}.", file=sys.stderr if question.asked.json else sys.stdout)


def _all_cards(question: Question) -> int:
    asked = question.asked
    clashes = [flag for flag, said in (("--gpu", asked.gpu), ("--budget", asked.budget), ("--options", asked.options),
                                       ("--timeline", asked.timeline), ("--hours", asked.hours)) if said]
    if clashes:
        raise UsageError(f"--all-cards plans for every card, and {' and '.join(clashes)} for one.",
                         "Leave one of them out.")
    config, _ = of_length(question.config, asked, question.data, question.missing, None)
    kept_free = (size(asked.others) or 0) + (size(config.leave) or 0)
    rows = card_verdicts(config, asked.trainer, kept_free, asked.torch)
    planned = {each.name for each in rows if not each.problem}
    speeds = {card.name: speed for card in gpus.load() if card.name in planned
              and (speed := tokens_per_s(config, card, asked.trainer)) is not None}
    if asked.json:
        print(json.dumps({"schema": SCHEMA, "trainer": asked.trainer, "cards": [
            {"card": each.name, "tokens_per_s": speeds.get(each.name), "usable_bytes": each.usable,
             "needs_bytes": None if each.problem else each.needs,
             "headroom_bytes": None if each.problem else each.headroom, "fits": each.fits, "problem": each.problem}
            for each in rows]}, indent=1, ensure_ascii=False))
    else:
        print(show.all_cards_table(rows, {each.name: speeds[each.name] for each in rows
                                          if each.fits and each.name in speeds}, columns()), end="")
    return 0 if any(each.fits for each in rows) else 1


def card_verdicts(config: RunConfig, trainer: str = "fitgpt", others: int = 0, torch: str = "") -> list[CardVerdict]:
    """One verdict a card. Cards on which the tape is the same are replayed once."""
    known: dict[tuple[Any, ...], Callable[[int], int]] = {}
    rows = []
    for card in gpus.load():
        usable = card.usable_mib * MiB if card.usable_mib else None
        if card.vendor != "nvidia" or usable is None:
            rows.append(CardVerdict(card.name, usable, problem="not known"))
            continue
        if others >= usable:
            rows.append(CardVerdict(card.name, usable, problem="nothing left by others"))
            continue
        found = place.on_card(card, others=others, torch=torch)
        try:
            place.check_runs(config, found, trainer)
        except UsageError as error:
            rows.append(CardVerdict(card.name, usable, problem=f"needs {error.fix}"))
            continue
        kind = same_tape(config, found.setting, trainer)
        if kind not in known:
            known[kind] = forecast.needs_by_limit(config, found.setting, trainer)
        needs = known[kind](found.budget.reserve_limit)
        rows.append(CardVerdict(card.name, usable, needs, found.budget.reserve_limit - needs))
    return rows


def same_tape(config: RunConfig, setting: Setting, trainer: str) -> tuple[Any, ...]:
    """What a tape depends on: where two settings agree in it, so do their tapes, but for a norm's partial sums, a few
    MiB that grow with the number of multiprocessors."""
    settled = forecast.settled(config, setting, trainer)
    return (settled.dtype, settled.compile, setting.workspace, setting.attention(settled), setting.torch,
            setting.expandable, setting.cache, few_rows(config.batch_size * config.block_size, setting.sms))


def _replays(config: RunConfig, setting: Setting) -> list[str]:
    if config.eval_only or not gpt.records(forecast.settled(config, setting)):
        return []
    return ["The GPU's work is recorded in the first step and replayed in memory that stays reserved: from then on "
            "next to nothing is allocated."]


def _colours() -> bool:
    return can_redraw() and not os.environ.get("NO_COLOR")


# ---- for other programs


def plan(config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig = NOTHING, gpu: str | int = "", *,
         budget: int | str | None = None, others: int | str | None = None, trainer: str = "fitgpt",
         torch: str = "", **knobs: Any) -> Plan:
    """What a run will hold, and whether it fits. `config`: a config file, a dict of knobs, a RunConfig, or nothing.

    `gpu` is a name such as "4070"; without one, the card that is here. Sizes are bytes, or "11.5GiB". What is said of
    `knobs`, such as batch_size=8, counts more than what the config says; tokens, epochs, hours and options=True, too.
    """
    own, own_knobs = dict(gpu=gpu, budget=budget, others=others, trainer=trainer, torch=torch), knobs_of(PlanQuestions)
    said = {key: value for key, value in own.items() if value not in (None, own_knobs[key].default)}
    question, found = _placed(question_of([*_assigned(config), *_of_dict(said | knobs)]))
    memory = forecast.plan(question.config, found.setting, found.budget, question.asked.trainer)
    return Plan(question, found, memory)


def _assigned(config: Any) -> list[Assignment]:
    """What a config of any kind says."""
    if isinstance(config, RunConfig):
        knobs = knobs_of(RunConfig)
        return _of_dict({key: value for key, value in config.to_dict().items() if value != knobs[key].default})
    if isinstance(config, Mapping):
        return _of_dict(config)
    if isinstance(config, str | os.PathLike) and isinstance(path := os.fspath(config), str):
        return walk([path], PlanOptions)
    raise UsageError(f"fitgpt.plan takes a config file, a dict of knobs or a RunConfig, and this is {config!r:.60}.",
                     'fitgpt.plan("config/train_fineweb.py", gpu="4070")')


def _of_dict(told: Mapping[str, Any]) -> list[Assignment]:
    known = [name for name in knobs_of(PlanOptions) if name not in OF_THE_COMMAND]
    for key in told:
        if key not in known:
            near = nearest(str(key), known)
            raise UsageError(f"{key!r} is not a knob of `fitgpt train`, and `fitgpt.plan` has no such argument.",
                             f"Did you mean {' or '.join(near)}?" if near else "fitgpt train --help lists them all.")
    return [Assignment(key, str(value) if key in AS_TEXT and isinstance(value, int) else value, f"{key}={value!r}")
            for key, value in told.items()]


# ---- fitgpt cards


def list_cards(options: CardsOptions) -> int:
    found = gpus.named_like(options.filter) or [gpus.find(options.filter)]  # another spelling; or the nearest names
    if options.json:
        print(json.dumps({"schema": SCHEMA, "cards": [asdict(card) for card in found]}, indent=1, ensure_ascii=False))
        return 0
    known = {True: "yes", False: "no", None: "?"}
    rows = [(card.name, f"{card.memory_gb} GB" if card.memory_gb else "shared",
             show_bytes(card.usable_mib * MiB) if card.usable_mib else "?", known[card.bf16],
             f"{card.tflops:g}" if card.tflops else "?", f"{card.usable_src or '–'}, {card.tflops_src or '–'}")
            for card in found]
    print(show.card_table(rows, columns()), end="")
    return 0
