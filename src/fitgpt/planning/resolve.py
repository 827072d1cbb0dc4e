"""Which run is meant: the one that `train` would make of the same words, with the vocabulary of its data.

Standard library only, and most of it only where it is needed: a config without data costs milliseconds.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..config.command_options import PlanQuestions
from ..config.fields import Assignment, build, knobs_of
from ..config.run_config import DEFAULT_VOCAB, RunConfig, check_resume, gpt2_shapes, resolve
from ..core.errors import CheckpointError, DataError, UsageError
from ..core.units import parse_bytes
from ..nanonotes import of_the_run
from ..nouns import DataSummary
from . import budget as place
from .budget import Place


class Question(NamedTuple):
    """What is to be planned, and of what."""

    asked: PlanQuestions
    config: RunConfig
    data: DataSummary | None
    missing: str             # why there is no data
    notes: tuple[str, ...]


def question_of(assignments: Sequence[Assignment]) -> Question:
    own = knobs_of(PlanQuestions)
    asked = build(PlanQuestions, [each for each in assignments if each.key in own])
    told = [each for each in assignments if each.key not in own or each.key == "budget"]  # a knob of the run, too
    counted = next((each.source for each in told if each.key == "max_iters" and each.source.startswith("--")), "")
    if counted and (asked.tokens or asked.epochs or asked.hours):
        raise UsageError(f"{counted}, and --tokens, --epochs or --hours: both say how long the run is.",
                         "Give one of them.")
    config, notes = run_of(told)
    said_vocab = config.vocab_size
    config, data, missing, more = with_data(config)
    if asked.trainer == "fitgpt":
        refuse_other_vocab(config, data)
    if config.fit:
        more.append("--fit: `train` will choose other settings if that is faster. Planned is what is asked for; "
                    "`fitgpt fit` with the same words shows what it would choose.")
    if asked.gpu and config.device in ("cpu", "mps"):
        more.append(f"With --device={config.device} no card is used: planned is what one would hold.")
    if asked.trainer == "nanogpt":
        more += of_the_run(config, said_vocab, data)
    return Question(asked, config, data, missing, (*notes, *more))


def run_of(assignments: Sequence[Assignment]) -> tuple[RunConfig, list[str]]:
    """The config that `train` would have, though its data may not be here yet."""
    if {each.key: each.value for each in assignments}.get("init_from") == "resume":
        return settle(assignments)
    from .plan_file import with_plan

    return resolve(with_plan(assignments))


def settle(assignments: Sequence[Assignment]) -> tuple[RunConfig, list[str]]:
    """The config this run will have, from its flags and files and, on a resume, from what the run recorded."""
    from ..data.header import summarise
    from ..runs.folder import can_resume, recorded_config
    from .plan_file import with_plan

    assignments = with_plan(assignments)
    said = {each.key: each.value for each in assignments}
    recorded, out_dir = None, str(said.get("out_dir", RunConfig.out_dir))
    if said.get("init_from") == "resume":
        recorded = recorded_config(out_dir)
        if not can_resume(out_dir):
            why = ("it holds neither a run of fitgpt nor nanoGPT's ckpt.pt" if recorded is None
                   else "its run has no checkpoint")
            raise CheckpointError(f"There is nothing to resume in {out_dir}: {why}.",
                                  "Name the run's folder with --out_dir=…, or start one: leave --init_from=resume out.")
    config, notes = resolve(assignments, recorded)
    if recorded is not None:
        check_resume(recorded, config.to_dict(), said)
    try:
        summarise(config.dataset)  # a missing dataset is said now, not after torch has loaded
    except DataError as error:
        if recorded is None and said.get("init_from") == "resume" and "dataset" not in said:
            resumed = shlex.join(["--init_from=resume", f"--out_dir={out_dir}"])
            raise DataError(error.what, "nanoGPT's ckpt.pt is gone on with as there: with the config file and flags "
                            f"that it was trained with, then {resumed}") from None
        raise
    return config, notes


def with_data(config: RunConfig) -> tuple[RunConfig, DataSummary | None, str, list[str]]:
    """The config with the vocabulary that its data or its weights have; the data; or why there is none; and notes."""
    data, missing = _data_of(config.dataset)
    notes: list[str] = []
    if config.init_from not in ("scratch", "resume", *gpt2_shapes):
        config, notes = _with_shape_of(Path(config.init_from), config)
    notes += _too_few_tokens(config, data) if data else []
    if config.vocab_size:
        return config, data, missing, notes
    if data is None:
        told = f"{missing} The vocabulary is taken to be {DEFAULT_VOCAB:,}."
        if config.dataset.endswith("_char"):
            told += " Characters are far fewer: --vocab_size=65 for Shakespeare's."
        return replace(config, vocab_size=DEFAULT_VOCAB), None, missing, [*notes, told]
    from ..data.header import padded_vocab

    return replace(config, vocab_size=padded_vocab(data.tokenizer, data.vocab_size)), data, missing, notes


def _too_few_tokens(config: RunConfig, data: DataSummary) -> list[str]:
    """What `train` will refuse, as far as the headers tell: of a split in several shards the longest counts."""
    from ..data.header import too_long

    return [f"{too_long(block, split, tokens)} The run would not start: --block_size={max(tokens - 1, 1)}"
            for block, split, tokens in ((config.block_size, "train", data.train_tokens),
                                         (config.eval_block, "val", data.val_tokens)) if tokens <= block]


def refuse_other_vocab(config: RunConfig, data: DataSummary | None) -> None:
    """As `train` does: where the model's vocabulary is not the data's. Of a ckpt.pt only `train` can tell."""
    if data is None or config.init_from == "resume":
        return
    from ..data.header import check_vocab
    from ..runs.model_shape import shape_in

    if config.init_from in ("scratch", *gpt2_shapes) or shape_in(Path(config.init_from)):
        try:
            check_vocab(None, config.vocab_size, data.vocab_size)
        except DataError as error:
            raise UsageError(error.what, error.fix) from None


def _data_of(dataset: str) -> tuple[DataSummary | None, str]:
    if not os.path.isdir(os.path.join("data", dataset)) and not os.path.isdir(dataset):
        return None, f"There is no dataset {dataset!r} here."
    from ..data.header import summarise

    try:
        return summarise(dataset), ""
    except DataError as error:
        return None, error.what


def _with_shape_of(folder: Path, config: RunConfig) -> tuple[RunConfig, list[str]]:
    """As run.py takes it: the model's own shape, cropped to a shorter block if that is asked for."""
    from ..runs.model_shape import shape_in

    shape = shape_in(folder)
    if not shape:
        file = folder if folder.is_file() else folder / "ckpt.pt"
        return config, [f"The model's shape is in {file}, which only `train` can read: planned is what "
                        "the flags say."]
    shape["block_size"] = min(shape["block_size"], config.block_size)
    told = ", ".join(f"{knob}={value}" for knob, value in shape.items() if getattr(config, knob) not in (value, 0))
    return replace(config, **shape), [f"As in {folder}: {told}."] if told else []


def place_of(asked: PlanQuestions, device: str) -> Place:
    others, budget = size(asked.others), size(asked.budget)
    if asked.gpu:
        return place.named(asked.gpu, others=others, budget=budget, torch=asked.torch)
    return place.here(device, others=others, budget=budget, torch=asked.torch)


def size(text: str) -> int | None:
    return parse_bytes(text) if text else None
