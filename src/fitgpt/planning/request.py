"""Assignments from argv and config files → the run they describe, with the vocabulary of its data.

`plan`, `fit`, `explain` and `train` all read their run here, so that they mean the same run by the same command line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..config.argv import walk
from ..config.command_options import PlanOptions
from ..config.fields import Assignment, Options, build, nearest, option_specs
from ..config.run_config import (
    DEFAULT_VOCAB,
    GPT2_VOCAB,
    NOT_NANOGPTS,
    RunConfig,
    check_resume,
    config_from,
    gpt2_shapes,
)
from ..core.errors import CheckpointError, DataError, UsageError
from ..data.shards import DataSummary, block_too_long, check_vocab, padded_vocab, summarise
from ..runs.folder import can_resume, recorded_config, runs_near
from ..runs.model_shape import shape_in
from .plan_file import with_plan

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
TEXTS = ("gpu", "budget", "others", "leave", "tokens")  # options that take a number as well as a text


def assignments_from(config: Any, options: Mapping[str, Any], command: type[Options],
                     not_taken: Collection[str] = ()) -> list[Assignment]:
    """The arguments of `fitgpt.plan`, `fit` or `train` as assignments. `config`: a config file, a dict of options or a
    RunConfig; `not_taken`: options of the command that the function does not take."""
    found: list[Assignment] = []
    given = dict(options)
    if isinstance(config, RunConfig):
        defaults = option_specs(RunConfig)
        given = {key: value for key, value in config.to_dict().items() if value != defaults[key].default} | given
    elif isinstance(config, Mapping):
        given = {**config, **given}
    elif isinstance(config, str | os.PathLike) and isinstance(path := os.fspath(config), str):
        found = walk([path], command)
    else:
        raise UsageError(f"fitgpt.{command.command} takes a config file, a dict of options or a RunConfig, and this is "
                         f"{config!r:.60}.", f'fitgpt.{command.command}("config/train_fineweb.py", batch_size=8)')
    known = [name for name in option_specs(command) if name not in not_taken]
    for key, value in given.items():
        if key not in known:
            near = nearest(str(key), known)
            raise UsageError(f"{key!r} is not an option of `fitgpt train`, and `fitgpt.{command.command}` has no such "
                             "argument.", f"Did you mean {' or '.join(near)}?" if near else
                             "fitgpt train --help-all")
        text = key in TEXTS and isinstance(value, int)
        found.append(Assignment(key, str(value) if text else value, f"{key}={value!r}"))
    return found


# ---- assignments to a request


class PlanRequest(NamedTuple):
    """What to plan. `config` may still contain `auto`; `missing` says why there is no data."""

    options: PlanOptions
    config: RunConfig
    data: DataSummary | None
    missing: str
    notes: tuple[str, ...]
    vocab_assumed: bool = False  # neither the options nor the data say how large the vocabulary is


def plan_request(assignments: Sequence[Assignment]) -> PlanRequest:
    own = option_specs(PlanOptions)
    options = build(PlanOptions, [each for each in assignments if each.key in own])
    of_run = [each for each in assignments if each.key not in own or each.key == "budget"]  # budget is train's, too
    max_iters = next((each.source for each in of_run if each.key == "max_iters" and each.source.startswith("--")), "")
    if max_iters and (options.tokens or options.epochs or options.hours):
        raise UsageError(f"{max_iters} and --tokens, --epochs or --hours all set the length of the run.",
                         max_iters)
    config, notes = run_config_from(of_run)
    given_vocab = config.vocab_size
    config, data, missing, more = with_data(config)
    vocab_assumed = data is None and not given_vocab and config.init_from == "scratch"
    if options.trainer == "fitgpt":
        check_vocab_matches_data(config, data)
    if config.fit:
        more.append("--fit: `train` will choose other settings if they are faster. This plan is of the settings as "
                    "given; `fitgpt fit` with the same options shows what it would choose.")
    if options.gpu and config.device in ("cpu", "mps"):
        more.append(f"With --device={config.device} no GPU is used: the plan is for the GPU named.")
    if options.trainer == "nanogpt":
        more += _options_nanogpt_lacks(config, given_vocab, data)
    return PlanRequest(options, config, data, missing, (*notes, *more), vocab_assumed)


def _options_nanogpt_lacks(config: RunConfig, given_vocab: int, data: DataSummary | None) -> list[str]:
    """Notes on where nanoGPT's train.py differs from the options given. `given_vocab`: 0 if none was given."""
    options = option_specs(RunConfig)
    ignored = ", ".join(f"{name}={getattr(config, name)}" for name in NOT_NANOGPTS
                        if getattr(config, name) != options[name].default)
    notes = [f"nanoGPT's train.py ignores {ignored}: it has no such option."] if ignored else []
    used = data.vocab_size if data and data.vocab_size and data.vocab_size != GPT2_VOCAB else DEFAULT_VOCAB
    if given_vocab and given_vocab != used and config.init_from == "scratch":
        here = f", here {used}" if data else ""
        notes.append("nanoGPT's train.py has no vocab_size: it uses the one in the data's meta.pkl, or "
                     f"{DEFAULT_VOCAB}{here}. This plan is for {given_vocab}.")
    return notes


def run_config_from(assignments: Sequence[Assignment]) -> tuple[RunConfig, list[str]]:
    """The config that `train` would have, and notes. Its data may not be here yet."""
    if {each.key: each.value for each in assignments}.get("init_from") == "resume":
        return training_config(assignments)
    return config_from(with_plan(assignments))


def training_config(assignments: Sequence[Assignment]) -> tuple[RunConfig, list[str]]:
    """The config of a run that is about to start: from its options and files and, on a resume, from its record."""
    assignments = with_plan(assignments)
    given = {each.key: each.value for each in assignments}
    recorded, out_dir = None, str(given.get("out_dir", RunConfig.out_dir))
    if given.get("init_from") == "resume":
        recorded = recorded_config(out_dir)
        if not can_resume(out_dir):
            why = ("it holds neither a run of fitgpt nor nanoGPT's ckpt.pt" if recorded is None
                   else "its run has no checkpoint")
            near = [shlex.quote(f"--out_dir={folder}") for folder in runs_near(Path()) if can_resume(folder)]
            raise CheckpointError(f"There is nothing to resume in {out_dir}: {why}.",
                                  f"fitgpt train --resume {near[0]}" if near
                                  else "Start a run: leave out --resume. No run is in this folder or in runs/.")
    config, notes = config_from(assignments, recorded)
    if recorded is not None:
        check_resume(recorded, config.to_dict(), given)
    try:
        summarise(config.dataset)  # report a missing dataset now, not after torch has loaded
    except DataError as error:
        if recorded is None and given.get("init_from") == "resume" and "dataset" not in given:
            resumed = shlex.join(["--resume", f"--out_dir={out_dir}"])
            raise DataError(error.what, "nanoGPT's ckpt.pt is resumed with the config file and options that it was "
                            f"trained with, and {resumed}") from None
        raise
    return config, notes


def with_data(config: RunConfig) -> tuple[RunConfig, DataSummary | None, str, list[str]]:
    """The config with the vocabulary of its data or weights; the data, or why there is none; and notes."""
    data, missing, notes = None, f"There is no dataset {config.dataset!r} here.", list[str]()
    if os.path.isdir(os.path.join("data", config.dataset)) or os.path.isdir(config.dataset):
        try:
            data, missing = summarise(config.dataset), ""
        except DataError as error:
            missing = error.what
    if config.init_from not in ("scratch", "resume", *gpt2_shapes):
        config, notes = _with_shape_of(Path(config.init_from), config)
    if data:  # what `train` will reject, as far as headers tell: of a split in several shards the longest counts
        notes += [f"{block_too_long(block, split, tokens)} The run would not start: --block_size={max(tokens - 1, 1)}"
                  for block, split, tokens in ((config.block_size, "train", data.train_tokens),
                                               (config.eval_block, "val", data.val_tokens)) if tokens <= block]
    if config.vocab_size:
        return config, data, missing, notes
    if data:
        return replace(config, vocab_size=padded_vocab(data.tokenizer, data.vocab_size)), data, missing, notes
    note = f"{missing} The vocabulary is taken to be {DEFAULT_VOCAB:,}."
    if config.dataset.endswith("_char"):
        note += " A character vocabulary is far smaller: --vocab_size=65 for Shakespeare."
    return replace(config, vocab_size=DEFAULT_VOCAB), None, missing, [*notes, note]


def _with_shape_of(folder: Path, config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The shape of the weights in a folder, cropped to a shorter block if one is given: as training/run.py does."""
    shape = shape_in(folder)
    if not shape:
        file = folder if folder.is_file() else folder / "ckpt.pt"
        return config, [f"The model's shape is in {file}, which only `train` can read: the plan takes the shape from "
                        "the options."]
    shape["block_size"] = min(shape["block_size"], config.block_size)
    changed = ", ".join(f"{name}={value}" for name, value in shape.items() if getattr(config, name) not in (value, 0))
    return replace(config, **shape), [f"As in {folder}: {changed}."] if changed else []


def check_vocab_matches_data(config: RunConfig, data: DataSummary | None) -> None:
    """UsageError, as in `train`, where the model's vocabulary is not the data's. Only `train` can read a ckpt.pt."""
    if data is None or config.init_from == "resume":
        return
    if config.init_from in ("scratch", *gpt2_shapes) or shape_in(Path(config.init_from)):
        try:
            check_vocab(None, config.vocab_size, data.vocab_size)
        except DataError as error:
            raise UsageError(error.what, error.fix) from None
