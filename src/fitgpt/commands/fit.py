"""`fitgpt fit`: the fastest settings that fit a card, and why; or the largest model, the longest block, the least.

Neither torch nor numpy is loaded; with --measure, child processes load them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..aside import aside
from ..config.command_options import FitQuestions, PlanQuestions
from ..config.fields import Assignment, build, knobs_of, shown
from ..config.run_config import RunConfig
from ..core.errors import DeviceError, DoesNotFit, SystemFault, UsageError
from ..core.files import disk_faults, is_own_page, refuse_foreign, write_over
from ..core.units import GiB, show_bytes
from ..hardware.host import SHARE, spare_memory
from ..memory import gpt
from ..nouns import Budget, Fitted
from ..planning import budget as place
from ..planning import forecast, plan_file, timing, write_config
from ..planning.budget import Place, beside
from ..planning.choose import UNSURE, Here, because, too_small, ways_out_in_words
from ..planning.choose import fit as fit_there
from ..planning.duration import of_length
from ..planning.fallback_ladder import ladder
from ..planning.goals import reach
from ..planning.measure import SECONDS_EACH, measured
from ..planning.permission import parse_allow
from ..planning.resolve import place_of, refuse_other_vocab, run_of, with_data
from ..planning.track_record import basis_of
from ..show import fitting as show

ASSUMED_HOST = 32 * GiB  # of a machine that is not here


class Question(NamedTuple):
    """What is to be fitted, and where."""

    asked: FitQuestions
    said: RunConfig           # as the user has it
    config: RunConfig         # with the vocabulary of its data
    found: Place
    notes: tuple[str, ...]


def fit(assignments: Sequence[Assignment]) -> int:
    question = question_of(assignments)
    asked = question.asked
    refuse_foreign_files(asked)
    here = here_for(question.found, question.config, is_here=not asked.gpu)._replace(aside=aside)
    notes = [*question.notes, *crowded(here)]
    fitted = reach(asked.goal, question.config, here, parse_allow(asked.allow))
    if asked.gpu and fitted.chosen is not None and fitted.chosen.config.offload != "none":
        notes.append(f"The host is taken to have {show_bytes(ASSUMED_HOST)} of memory, {SHARE:.0%} of it for "
                     "this.")
    if asked.measure and fitted.chosen is not None:
        fitted = by_the_clock(fitted, question.config, here)
    run = name_of(assignments)
    files, fault = list[str](), None
    try:
        files = write_files(fitted, question, here, run, notes) if fitted.chosen is not None else []
    except SystemFault as error:  # what was found is said all the same
        fault = error
    if asked.json:
        print(json.dumps({**show.document(fitted, asked.goal), "notes": [*fitted.notes, *notes], "wrote": files},
                         indent=1, ensure_ascii=False))
    else:
        width = min(max(shutil.get_terminal_size().columns, 40), 100)
        print(show.fit_text(fitted, run, width=width, notes=notes, todo=next_step(fitted, asked, assignments, files)),
              end="")
    if fault is not None:
        raise fault
    return 0 if fitted.chosen is not None else 1


def question_of(assignments: Sequence[Assignment]) -> Question:
    own = knobs_of(FitQuestions)
    asked = build(FitQuestions, [each for each in assignments if each.key in own])
    said, notes = run_of([each for each in assignments if each.key not in own or each.key == "budget"])
    if said.eval_only:
        raise UsageError("With eval_only nothing is trained, and `fitgpt fit` looks for the fastest training.",
                         "fitgpt plan, with the same words, says whether the evaluation fits and what would make it; "
                         "or --eval_only=False")
    config, data, missing, more = with_data(said)
    refuse_other_vocab(config, data)
    where = PlanQuestions(gpu=asked.gpu, budget=asked.budget, others=asked.others, torch=asked.torch,
                          tokens=asked.tokens, epochs=asked.epochs, hours=asked.hours)
    _check_measure(asked)
    found = place_of(where, config.device)
    found = found._replace(budget=beside(config, found.budget))
    place.check_runs(config, found, "fitgpt")
    longer, length = of_length(config, where, data, missing, found.card)
    said = replace(said, max_iters=longer.max_iters, lr_decay_iters=longer.lr_decay_iters)
    return Question(asked, said, longer, found, (*notes, *more, *found.notes, *length))


def _check_measure(asked: FitQuestions) -> None:
    if not asked.measure:
        return
    if asked.gpu:
        raise UsageError(f"--measure times candidates on the GPU that is here, and --gpu {asked.gpu} names a card that "
                         "need not be.", "Leave out one of them.")
    from ..hardware.nvidia import survey

    seen = survey()
    if not seen.gpus:
        raise DeviceError(f"There is no GPU here to measure on: {seen.reason or 'the driver shows none'}.",
                          "Leave out --measure: without it the speed is estimated.")


# ---- where


def here_for(found: Place, config: RunConfig, *, is_here: bool) -> Here:
    """A place and its limits: `fit`, `train --fit` and the page have the same. `is_here`: no card was named."""
    keep_small = is_here and not config.budget and someone_computes(config.device)
    budget = found.budget if config.budget or config.leave else with_a_margin(found)
    return Here(found.setting, budget, found.card, config.batch_size if keep_small else None,
                spare_memory() if is_here else int(SHARE * ASSUMED_HOST))


def crowded(here: Here) -> list[str]:
    """A note, where the micro-batch is kept small."""
    if here.most_batch is None:
        return []
    return [f"Somebody else computes on this card: the micro-batch stays at {here.most_batch} or below. --budget says "
            "what this run may hold instead."]


def with_a_margin(found: Place) -> Budget:
    """What a plan may fill where nobody said. What a process holds outside the allocator is known by rule for most
    cards, not to the MiB: filled to the brim, such a card would run out."""
    if found.card is not None and found.card.outside_src == "seen":
        return found.budget
    return found.budget._replace(margin=UNSURE)


def for_train(said: RunConfig) -> tuple[RunConfig, list[str]]:
    """`train --fit`: the run as it will go on the card that is here, and why; as asked where there is no card."""
    from ..hardware.nvidia import survey

    said = replace(said, fit=False)
    if said.eval_only:
        return said, ["fit: nothing to choose, because nothing is trained."]
    if said.device in ("cpu", "mps") or not survey().gpus:
        return said, ["fit: nothing to choose, because there is no NVIDIA GPU here."]
    config = with_data(said)[0]
    found = place.here(config.device, others=None, budget=None)
    found = found._replace(budget=beside(config, found.budget))
    fitted = fit_there(config, here_for(found, config, is_here=True)._replace(aside=aside))
    if fitted.chosen is None:
        raise DoesNotFit(too_small(fitted), f"{ways_out_in_words(fitted)} `fitgpt fit` with the same words, that flag "
                         "and -o config/my_run.py writes a config that trains so.")
    chosen = replace(fitted.chosen.config, vocab_size=said.vocab_size)
    notes = [f"fit: {', '.join(f'{knob}={shown(now)}' for knob, (_, now) in each.knobs.items())}, {each.why}"
             for each in fitted.decisions]
    return chosen, notes or ["fit: the settings asked for are the fastest that fit."]


def someone_computes(device: str) -> bool:
    """Whether another user's program, other than the screen's, is on the card that a run would take."""
    from ..hardware.gpu_stats import programs
    from ..hardware.nvidia import survey

    seen = survey()
    if not seen.gpus:
        return False
    reading = place.chosen(seen, device)
    return any(each.kind == "other" and not is_own(each.pid) for each in programs(reading.processes,
                                                                                  reading.total_bytes))


def is_own(pid: int) -> bool:
    """Whether a process is this user's; one that cannot be seen from here is not."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except (OSError, AttributeError):  # gone, in another container, or no such thing on this system
        return False


# ---- by the clock


def by_the_clock(fitted: Fitted, config: RunConfig, here: Here) -> Fitted:
    with timing.Clock(SECONDS_EACH) as clock:
        found = measured(fitted, clock.time, lambda words: print(f"fitgpt: {words}", file=sys.stderr, flush=True))
    if found.chosen is None or fitted.chosen is None or found.chosen.config == fitted.chosen.config:
        return found
    exact = found.chosen._replace(exact=True)
    if not found.chosen.exact:
        needs = forecast.forecast(found.chosen.config, here.setting, limit=here.budget.reserve_limit).needs
        exact = exact._replace(needs=needs, headroom=here.budget.reserve_limit - needs)
    return found._replace(chosen=exact, decisions=because(config, found.chosen.config, here))


# ---- files


class Files(NamedTuple):
    """Where things go; None: nowhere."""

    config: Path | None
    plan: Path | None
    page: Path | None


def files_of(asked: FitQuestions) -> Files:
    """The plan has its config's name, so that two of them can lie in one folder."""
    out, page = Path(asked.out), Path(asked.html) if asked.html else None
    if not asked.out:
        return Files(None, None, page)
    if out.suffix not in (".py", ".json"):
        raise UsageError(f"-o {asked.out}: a config that `train` takes ends in .py, a plan alone in .json.",
                         f"-o {shlex.quote(str(out / 'my_run.py' if out.is_dir() else out.with_suffix('.py')))}")
    return Files(None, out, page) if out.suffix == ".json" else Files(out, out.with_suffix(".plan.json"), page)


def refuse_foreign_files(asked: FitQuestions) -> None:
    """Before anything is looked for: what somebody wrote by hand is not replaced."""
    config, plan, page = files_of(asked)
    if page is not None and page.absolute() in {each.absolute() for each in (config, plan) if each is not None}:
        raise UsageError(f"-o and --html both write {page}.", "--html page.html")
    if config:
        refuse_foreign(config, write_config.is_ours, "fit", "-o")
    if plan:
        refuse_foreign(plan, plan_file.is_of_fit, "fit", "-o", config)
    if page:
        refuse_foreign(page, is_own_page, "fit", "--html")


def write_files(fitted: Fitted, question: Question, here: Here, run: str, notes: Sequence[str]) -> list[str]:
    """What was written, each with whether it replaced something."""
    config, plan, page = files_of(question.asked)
    files = []
    assert fitted.chosen is not None  # only a plan that exists is written
    as_said = fitted.chosen._replace(config=replace(fitted.chosen.config, vocab_size=question.said.vocab_size))
    told = fitted._replace(chosen=as_said)
    if config:
        files.append(_write(config, write_config.config_text(told, run)))
    if plan:
        files.append(_write(plan, plan_text(told, question, here)))
    if page:
        files.append(_write(page, show.page(fitted, run, notes)))
    return files


def plan_text(fitted: Fitted, question: Question, here: Here) -> str:
    assert fitted.chosen is not None
    setting, budget = question.found.setting, fitted.budget
    config = replace(fitted.chosen.config, vocab_size=question.config.vocab_size)
    plan = forecast.plan(config, setting, budget)
    on_host = None if here.host_bytes is None else max(here.host_bytes - gpt.host_bytes(config), 0)
    rungs = ladder(config, setting, host_bytes=on_host)
    return plan_file.text_of_fit(plan_file.document(plan, setting.torch, basis_of(plan)), fitted.chosen.config, budget,
                                rungs, show.speed_document(fitted.chosen))


def _write(path: Path, text: str) -> str:
    with disk_faults("make the folder of", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return write_over(path, text)


# ---- words


def name_of(assignments: Sequence[Assignment]) -> str:
    """The config files that were named, or the run."""
    return ", ".join(_files(assignments)) or "the run"


def _files(assignments: Sequence[Assignment]) -> list[str]:
    named = (each.source.rpartition(":")[0] for each in assignments if not each.source.startswith("-"))
    return list(dict.fromkeys(file for file in named if file))


def next_step(fitted: Fitted, asked: FitQuestions, assignments: Sequence[Assignment], files: Sequence[str]) -> str:
    if fitted.chosen is None:
        lines = ["Nothing fits, so nothing was written."] if asked.out or asked.html else []
        lines += [f"This fits: {command_with(fitted.ways_out[0].flags, assignments)}"] if fitted.ways_out else []
        return "\n".join(lines)
    lines = [f"Wrote {file}." for file in files]
    if asked.out and not files:
        return ""
    if asked.out.endswith(".py"):
        return "\n".join([*lines, f"To train it: fitgpt train {shlex.quote(asked.out)}"])
    if asked.out:
        return "\n".join([*lines, f"To train it: fitgpt train --plan {shlex.quote(asked.out)}"])
    return "\n".join([*lines, f"To write a config that trains so: {command_with((), assignments)}"])


def command_with(more: Sequence[str], assignments: Sequence[Assignment]) -> str:
    """What was typed, with more flags; of a flag that is there already, the new one counts."""
    told = [f"--{each.key}={each.value if isinstance(each.value, str) else shown(each.value)}" for each in assignments
            if each.source.startswith("-") and each.key not in ("out", "html", "json")]
    names = [flag.partition("=")[0] for flag in more]
    kept = [flag for flag in told if flag.partition("=")[0] not in names]
    return shlex.join(["fitgpt", "fit", *_files(assignments), *kept, *more, "-o", "config/my_run.py"])
