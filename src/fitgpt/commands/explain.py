"""`fitgpt explain`: takes a message, a reading, a plan or a run from wherever it is, and prints what it means."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from ..config.command_options import ExplainQuestions
from ..config.fields import Assignment, build, knobs_of, walk
from ..config.run_config import RunConfig
from ..core.errors import DeviceError, UsageError
from ..core.units import MiB, show_bytes
from ..explain.about import Run
from ..explain.message import COUNTED, from_excerpt, is_message
from ..explain.oom import diagnose
from ..explain.pasted import Excerpt, excerpt
from ..explain.planned import explain_plan
from ..explain.reading import Reading, card_of, explain_reading, from_screen, outside_on
from ..explain.screen import parse_screen
from ..explain.unsaid import OTHER_TRAINER
from ..hardware.gpus import Card, find, match_device
from ..hardware.nvidia import gpus
from ..memory.setting import Setting, setting_for
from ..nouns import MemoryPlan
from ..planning import budget, forecast
from ..planning.plan_file import plan_from
from ..planning.resolve import run_of as config_of_words
from ..planning.resolve import size, with_data
from ..runs.folder import recorded_config
from ..runs.metrics import read_metrics
from ..runs.rows import last_of, owners_in, phases_in, whole
from ..show.diagnosis import diagnosis_text
from ..sights import Diagnosis, OutOfMemory

NOT_RECOGNISED = 1
WANTED = ("the whole message, from `CUDA out of memory` to its last figure, with the traceback above it",
          "or nvidia-smi's screen, a plan in JSON, or a run folder",
          "or two figures: fitgpt explain --reading 6582MiB --process 4464MiB config.py")
RESUMED = ("init_from", "resume")  # holds what a run from scratch does, as far as a tape goes
NARROWEST, WIDEST = 40, 80


def explain(assignments: Sequence[Assignment]) -> int:
    own = knobs_of(ExplainQuestions)
    asked = build(ExplainQuestions, [each for each in assignments if each.key in own])
    said = [each for each in assignments if each.key not in own]
    told = answer(asked, said)
    if asked.json:
        print(json.dumps(asdict(told), ensure_ascii=False, indent=1))
    else:
        columns = shutil.get_terminal_size((WIDEST, 24)).columns
        print(diagnosis_text(told, min(max(columns, NARROWEST), WIDEST)))
    return NOT_RECOGNISED if told.subject == "unknown" else 0


def answer(asked: ExplainQuestions, said: Sequence[Assignment]) -> Diagnosis:
    folder = Path(asked.target) if asked.target and os.path.isdir(asked.target) else None
    config, name, notes = config_of(asked, said, folder)
    if asked.reading or (asked.process and not asked.target):
        card = find(asked.gpu) if asked.gpu else card_here()
        return explain_read(Reading(size(asked.reading), size(asked.process), notes=notes), asked, config, name, card)
    seen = look(asked, folder)
    if seen is not None and seen.text.strip():
        found = explain_text(seen, asked, config, name)
        if found is not None:
            return replace(found, notes=(*found.notes, *notes))
        if folder is None:
            return Diagnosis("unknown", f"Nothing in {_source(asked)} is a message about memory, a reading or a plan "
                             "that fitgpt knows, and it does not guess.", needed=WANTED)
    if config is None and seen is not None and asked.target:
        raise UsageError(f"There is nothing in {_source(asked)}.",
                         "fitgpt explain oom.txt config.py, or paste it: fitgpt explain - < oom.txt")
    if config is None:
        raise UsageError("`fitgpt explain` needs something to explain: a file, a run folder, a config or piped text.",
                         "fitgpt explain oom.txt config.py, or paste it: fitgpt explain - < oom.txt")
    if asked.target and folder is None:
        notes = (f"There is nothing in {_source(asked)}: this is of the config alone.", *notes)
    return explain_run(asked, config, name, notes, folder)


# ---- where it comes from


def look(asked: ExplainQuestions, folder: Path | None) -> Excerpt | None:
    """The text to explain: the file, or what is piped; None where there is none."""
    if asked.target and folder is None and asked.target != "-":
        if _is_pasted(asked.target):
            return skim(BytesIO(asked.target.encode()))
        try:
            with open(asked.target, "rb") as file:
                return skim(file)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                raise
            raise UsageError(f"There is no file or folder {asked.target!r:.200}.",
                             "fitgpt explain - < oom.txt reads what is piped.") from None
    piped = sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()
    if asked.target == "-" or piped:
        return skim(getattr(sys.stdin, "buffer", None) or BytesIO(sys.stdin.read().encode()))
    return None


def _is_pasted(target: str) -> bool:
    """Whether it is the message itself, and not where one is."""
    return not os.path.exists(target) and is_message(target)


def skim(stream: BinaryIO) -> Excerpt:
    """What of a text of any size is to be explained: its first message or nvidia-smi screen, and what is around it."""
    return excerpt(stream, lambda text: is_message(text) or bool(parse_screen(text)), set(COUNTED.values()))


def config_of(asked: ExplainQuestions, said: Sequence[Assignment],
              folder: Path | None) -> tuple[RunConfig | None, str, tuple[str, ...]]:
    """The run's config, the words that name it, and notes: flags over files over what a run folder recorded."""
    assignments, base, name = list(said), None, ""
    if asked.config and Path(asked.config).is_dir():
        folder = Path(asked.config)
    elif asked.config:
        assignments = [*walk([asked.config], RunConfig, config_files=True), *assignments]
    if folder is None and asked.target not in ("", "-") and not assignments and not _is_pasted(asked.target):
        folder = Path(asked.target).parent  # a log that lies in its run's folder
        folder = folder if (folder / "run.json").is_file() else None
    if folder is not None:
        base, name = recorded_config(folder), f"--out_dir={folder} --init_from=resume"
        if base is None and not assignments:
            raise UsageError(f"{folder} holds no run of fitgpt: no run.json, which has its config.",
                             f"fitgpt explain {folder} --config=config.py")
    if not assignments and base is None:
        return None, "", ()
    words = dict.fromkeys(each.source if each.source.startswith("-") else each.source.rpartition(":")[0]
                          for each in assignments)
    known = RunConfig.from_dict(base).to_dict() if base else {}
    recorded = [Assignment(key, value, str(folder)) for key, value in known.items()]
    config, _ = config_of_words([each for each in (*recorded, *assignments) if (each.key, each.value) != RESUMED])
    config, _, _, notes = with_data(config)
    return config, name if base else " ".join(words), tuple(notes)


def run_of(config: RunConfig | None, name: str, trainer: str, card: Card | None) -> Run | None:
    if config is None:
        return None
    return Run(config, "fitgpt" if trainer == "auto" else trainer, setting_for(card) if card else Setting((8, 6)), name)


# ---- what it is


def explain_text(seen: Excerpt, asked: ExplainQuestions, config: RunConfig | None, name: str) -> Diagnosis | None:
    """A message, a screen or a plan; None: none of them."""
    card = find(asked.gpu) if asked.gpu else None
    message = from_excerpt(seen)
    if message is not None:
        run, others = run_of(config, name, asked.trainer, card), size(asked.others) or 0
        if card is not None and card.vendor == "nvidia":
            budget.on_card(card, others=others)  # refuses more than the card has
        return diagnose(with_others(message, asked), run, card, asked.trainer, others)
    screen = parse_screen(seen.text)
    if screen:
        gpu = max(screen, key=lambda each: (any(process.computes for process in each.processes), each.used or 0))
        card = card or card_of(gpu)
        foreseen = _foreseen(run_of(config, name, asked.trainer, card), asked.trainer, card)
        return explain_read(from_screen(gpu, size(asked.process), foreseen), asked, config, name, card)
    return explain_document(_json(seen.text), asked, config, name) if seen.text.lstrip().startswith("{") else None


def _foreseen(run: Run | None, trainer: str, card: Card | None) -> list[int]:
    """What the process would hold under the trainer that was said, or under either."""
    outside = outside_on(card)
    if run is None or outside is None:
        return []
    others = [replace(run, trainer=OTHER_TRAINER[run.trainer])] if trainer == "auto" else []
    return [each.forecast.reserved + outside.nbytes for each in (run, *others)]


def explain_read(reading: Reading, asked: ExplainQuestions, config: RunConfig | None, name: str,
                 card: Card | None) -> Diagnosis:
    """With a config and no card that is known, the card is taken to be what `plan --budget` takes it to be."""
    run, taken = run_of(config, name, asked.trainer, card), reading.total or reading.used or reading.process
    if run is None or taken is None or outside_on(card) is not None:
        return explain_reading(reading, run, card, asked.trainer)
    anywhere = budget.unnamed(others=None, budget=taken)
    told = explain_reading(reading, replace(run, setting=anywhere.setting), card, asked.trainer,
                           anywhere.budget.outside)
    why = anywhere.budget.sources if card is None else (
        f"{card.name}: what a process holds outside PyTorch's allocator there has not been measured. It is taken to be "
        f"{show_bytes(anywhere.budget.outside)}, as much as on any NVIDIA card of that size.",)
    return replace(told, notes=(*told.notes, *why))


def explain_document(document: Any, asked: ExplainQuestions, config: RunConfig | None, name: str) -> Diagnosis | None:
    """A plan as `plan --json` prints it, or the file of a run's plan, which has its config; None: neither."""
    plan = plan_from(document)
    told = document.get("config") if isinstance(document, dict) else None
    planned = RunConfig.from_dict(told) if isinstance(told, dict) and set(told) <= set(knobs_of(RunConfig)) else None
    if plan is not None:
        card = find(asked.gpu) if asked.gpu else match_device(plan.budget.card)  # None: a plan for a budget alone
        if config is None and planned is not None:
            config = with_data(planned)[0]
        return explain_plan(plan, run_of(config, name, asked.trainer, card))
    if planned is None:
        return None
    named = asked.gpu or str(document.get("card") or "")
    return explain_run(replace(asked, gpu=named), planned, name, (), None)


def with_others(message: OutOfMemory, asked: ExplainQuestions) -> OutOfMemory:
    """What the user knows of other processes and the message does not say."""
    others = size(asked.others)
    if others is None or message.others or message.process is not None or message.total is None or message.free is None:
        return message
    return replace(message, process=max(message.total - message.free - others, 0))


def explain_run(asked: ExplainQuestions, config: RunConfig, name: str, notes: tuple[str, ...],
                folder: Path | None) -> Diagnosis:
    """What a config holds on a card, or a run: by the plan that it made itself, where its record has one."""
    rows: list[dict[str, Any]] = read_metrics(folder / "metrics.jsonl") if folder else []
    where = place_of(asked, config, rows, folder)
    run = Run(config, "fitgpt" if asked.trainer == "auto" else asked.trainer, where.setting, name)
    plan = forecast.plan(config, where.setting, where.budget, run.trainer)
    if folder and not asked.gpu and run.trainer == "fitgpt" and is_as_recorded(config, folder):
        plan = as_planned(plan, rows)
    told = explain_plan(plan, run, rows)
    return replace(told, notes=(*told.notes, *notes, *where.notes))


def is_as_recorded(config: RunConfig, folder: Path) -> bool:
    """Whether it is the run of that folder, and no flag makes it another."""
    recorded = recorded_config(folder)
    if recorded is None:
        return False
    told = RunConfig.from_dict(recorded)
    return replace(config, init_from=told.init_from) == replace(told, vocab_size=told.vocab_size or config.vocab_size)


def as_planned(plan: MemoryPlan, rows: Sequence[dict[str, Any]]) -> MemoryPlan:
    """The plan with what the run itself wrote into its record when it began last; as it is, where there is nothing."""
    row = last_of(rows, "plan")
    phases, owners, peak = phases_in(row), owners_in(row), row.get("peak_phase")
    needs, limit = whole(row.get("needs_bytes")), whole(row.get("reserve_limit_bytes"))
    if not phases or not owners or needs is None or limit is None or not isinstance(peak, str):
        return plan
    return MemoryPlan(plan.forecast._replace(phases=phases, owners_at_peak=owners, needs=needs, peak_phase=peak),
                      plan.budget._replace(budget=limit + plan.budget.outside))


def place_of(asked: ExplainQuestions, config: RunConfig, rows: Sequence[dict[str, Any]],
             folder: Path | None) -> budget.Place:
    """The card named, the one the run was on, or the one that is here."""
    facts = next((row for row in rows if row.get("kind") == "run"), {})
    others = size(asked.others)
    if asked.gpu:
        return budget.named(asked.gpu, others=others, budget=None)
    if str(facts.get("device", "")).startswith("cpu"):
        raise UsageError(f"The run in {folder} trained on the CPU: it held no GPU memory to explain.",
                         "--gpu=4070 explains what it would hold there.")
    card = match_device(str(facts.get("device_name", "")))
    if card is not None and card.vendor == "nvidia":
        return budget.on_card(card, others=others or 0)
    return budget.here(config.device, others=others, budget=None)


def card_here() -> Card | None:
    try:
        found = [match_device(gpu.name, round((gpu.total_bytes or 0) / MiB)) for gpu in gpus()]
    except DeviceError:
        return None
    return found[0] if found else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _source(asked: ExplainQuestions) -> str:
    return asked.target if asked.target not in ("", "-") else "what was piped"
