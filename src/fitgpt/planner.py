"""`fitgpt plan`, `fitgpt cards` and `fitgpt.plan(...)`: what a run will hold in GPU memory, and whether it fits.

Neither torch nor numpy is loaded, and what only some answers need is imported where they are given.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from . import cards, place
from .aside import aside
from .asked import Question, place_of, question_of, refuse_other_vocab, run_of, size, with_data
from .atomic import is_own_page, refuse_foreign, write_over
from .config import RunConfig
from .errors import UsageError
from .knobs import Assignment, knobs_of, nearest, walk
from .memory import forecast, gpt
from .memory.basis import basis_of
from .memory.changes import Option, holdings, priced, single_changes, smallest_that_fit
from .memory.setting import Setting
from .nouns import CardVerdict, Change, MemoryPlan, Outlook, PricedChange
from .options import CardsOptions, PlanQuestions
from .outlook import likely_speed, of_length, outlook, tokens_per_s
from .place import Place, beside
from .planfile import document
from .show import planning as show
from .show.terminal import can_redraw, columns
from .units import MiB, show_bytes

Fields = tuple[tuple[Any, ...], ...]  # of some changes: what one process can tell another

SCHEMA = 1  # of lists of cards; of a plan, see planfile.py


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
    found = _found(question.asked, question.config)
    place.check_runs(question.config, found, question.asked.trainer)
    config, length = of_length(question.config, question.asked, question.data, question.missing, found.card)
    question = question._replace(config=config, notes=(*question.notes, *found.notes, *length,
                                                       *_replays(config, found.setting, question.asked.trainer)))
    if question.asked.timeline:
        refuse_foreign(Path(question.asked.timeline), is_own_page, "plan", "--timeline")
    trainer = question.asked.trainer
    find_changes: Callable[[], Fields] = partial(_changes, config, found, trainer)
    if _cannot_fit(config, found, trainer):
        find_changes = aside(find_changes)
    plan = forecast.plan(config, found.setting, found.budget, trainer, aside)
    _print_plan(question, found, plan, find_changes)
    if question.asked.timeline:
        _write_timeline(Path(question.asked.timeline), question, found, plan)
    return 0 if plan.fits else 1


def _found(asked: PlanQuestions, config: RunConfig) -> Place:
    found = place_of(asked, config.device)
    return found._replace(budget=beside(config, found.budget)) if config.leave else found


def _print_plan(question: Question, found: Place, plan: MemoryPlan, find_changes: Callable[[], Fields]) -> None:
    asked, config = question.asked, question.config
    changes = () if plan.fits else tuple(Change(*fields) for fields in find_changes())
    options = _priced(config, found, asked.trainer) if asked.options else None
    run, basis = outlook(config, plan.forecast, question.data, found.card), basis_of(plan)
    if asked.json:
        print(json.dumps({**document(plan, found.setting.torch, basis), "run": _run_document(run),
                          "formulas": {share.owner: share.formula for share in plan.forecast.owners_at_peak},
                          "changes": [change._asdict() for change in changes],
                          "options": options and [{**each._asdict(), "change": each.change._asdict()}
                                                  for each in options],
                          "notes": list(question.notes), "sources": list(found.budget.sources)}, indent=1,
                         ensure_ascii=False))
        return
    width = columns()
    model = _in_words(forecast.settled(config, found.setting))
    print(show.plan_text(plan, run, basis, model=model, suggestions=changes,
                         neighbours=found.neighbours, notes=question.notes, width=width, colour=_colours()), end="")
    if options is not None:
        print("\n" + show.option_table(options, plan.forecast.needs, plan.budget.reserve_limit, width), end="")


def _cannot_fit(config: RunConfig, found: Place, trainer: str) -> bool:
    """Whether that is plain already; if not, the plan will tell."""
    least = forecast.held_at_least(forecast.settled(config, found.setting), found.setting, trainer)
    return least > found.budget.reserve_limit


def _changes(config: RunConfig, found: Place, trainer: str) -> Fields:
    """That make it fit. Most are settled without a tape: by what a run must map at least, or by what none exceeds."""
    from .fit.closed import mix_of
    from .fit.folded import Folded

    folded, limit = Folded(found.setting), found.budget.reserve_limit

    def known(option: Option) -> bool | None:
        if option.change.trainer != "fitgpt" or option.config.eval_only:
            return None
        shape, mix = folded.shape(option.config), mix_of(option.config.levels)
        return shape.could_fit(mix, limit) and (shape.needs(mix) <= limit or None)

    changes = smallest_that_fit(forecast.settled(config, found.setting), found.setting, found.budget, trainer,
                                known=known)
    return tuple(tuple(change) for change in changes)


def _priced(config: RunConfig, found: Place, trainer: str) -> list[PricedChange]:
    config = forecast.settled(config, found.setting)
    before = holdings(config, found.setting, trainer)
    now = likely_speed(config, found.card, trainer)

    def speed(option: Option) -> float | None:
        after = likely_speed(option.config, found.card, option.change.trainer)
        return after / now if after and now else None

    return [priced(option, before, found.setting, found.budget)._replace(speed=speed(option))
            for option in single_changes(config, trainer)]


def _write_timeline(path: Path, question: Question, found: Place, plan: MemoryPlan) -> None:
    from .memory.thinned import one_step

    drawn = one_step(forecast.timeline_of(question.config, found.setting, question.asked.trainer))
    wrote = write_over(path, show.timeline_page(plan, drawn))
    print(f"The step is drawn in {wrote}.", file=sys.stderr if question.asked.json else sys.stdout)


def _all_cards(question: Question) -> int:
    asked = question.asked
    clashes = [flag for flag, said in (("--gpu", asked.gpu), ("--budget", asked.budget), ("--options", asked.options),
                                       ("--timeline", asked.timeline)) if said]
    if clashes:
        raise UsageError(f"--all-cards plans for every card, and {' and '.join(clashes)} for one.",
                         "Leave one of them out.")
    config, _ = of_length(question.config, asked, question.data, question.missing, None)
    kept_free = (size(asked.others) or 0) + (size(config.leave) or 0)
    rows = card_verdicts(config, asked.trainer, kept_free, asked.torch)
    planned = {each.name for each in rows if not each.problem}
    speeds = {card.name: speed for card in cards.load() if card.name in planned
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
    for card in cards.load():
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
        kind = same_tape(config, found.setting)
        if kind not in known:
            known[kind] = forecast.needs_by_limit(config, found.setting, trainer)
        needs = known[kind](found.budget.reserve_limit)
        rows.append(CardVerdict(card.name, usable, needs, found.budget.reserve_limit - needs))
    return rows


def same_tape(config: RunConfig, setting: Setting) -> tuple[Any, ...]:
    """What a tape depends on: where two settings agree in it, so do their tapes, but for a norm's partial sums, a few
    MiB that grow with the number of multiprocessors."""
    settled = forecast.settled(config, setting)
    return (settled.dtype, settled.compile, setting.workspace, setting.attention(settled), setting.torch,
            setting.expandable, setting.cache)


def _replays(config: RunConfig, setting: Setting, trainer: str) -> list[str]:
    if trainer != "fitgpt" or config.eval_only or not gpt.records(forecast.settled(config, setting)):
        return []
    return ["The GPU's work is recorded in the first step and replayed in memory that stays reserved: from then on "
            "next to nothing is allocated."]


def _run_document(run: Outlook) -> dict[str, Any]:
    return {**run._asdict(), "tokens_per_param": run.tokens / run.params}


def _in_words(config: RunConfig) -> str:
    layers = f"{config.n_layer} layer{'s' if config.n_layer > 1 else ''}"
    return (f"{layers} of width {config.n_embd:,}, batch {config.batch_size:,} × {config.block_size:,}, "
            f"{config.dtype}, {'compiled' if config.compile else 'eager'}")


def _colours() -> bool:
    return can_redraw() and not os.environ.get("NO_COLOR")


# ---- for other programs


def plan(config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig, gpu: str = "", *,
         budget: int | str | None = None, others: int | str | None = None, trainer: str = "fitgpt",
         torch: str = "") -> MemoryPlan:
    """What a run will hold, and whether it fits. `config`: a config file, a dict of knobs, or a RunConfig.

    `gpu` is a name such as "4070"; without one, the card that is here. Sizes are bytes, or "11.5GiB".
    """
    if isinstance(config, Mapping):
        config = run_of([Assignment(key, value, f"{key}={value!r}") for key, value in _known(config).items()])[0]
    elif not isinstance(config, RunConfig):
        config = run_of(walk([os.fspath(config)], RunConfig))[0]
    config, data, _, _ = with_data(config)
    if trainer == "fitgpt":
        refuse_other_vocab(config, data)
    asked = PlanQuestions(gpu=gpu, budget=config.budget if budget is None else str(budget), trainer=trainer,
                          torch=torch, others="" if others is None else str(others))
    found = _found(asked, config)
    place.check_runs(config, found, trainer)
    return forecast.plan(config, found.setting, found.budget, trainer)


def _known(told: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = [key for key in told if key not in knobs_of(RunConfig)]
    if unknown:
        near = nearest(str(unknown[0]), knobs_of(RunConfig))
        raise UsageError(f"{unknown[0]!r} is not a knob of `fitgpt train`.",
                         f"Did you mean {near[0]}?" if near else "fitgpt train --help lists them all.")
    return told


# ---- fitgpt cards


def list_cards(options: CardsOptions) -> int:
    found = cards.named_like(options.filter) or [cards.find(options.filter)]  # another spelling; or the nearest names
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
