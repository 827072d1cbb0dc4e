"""Pasted text → what it is, and the settings it contains: a config file, a command line, output of nvidia-smi, an
out-of-memory message or a training script. Nothing that is pasted is executed, and no file that it names is read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from .. import diagnosis
from ..config.argv import walk
from ..config.command_options import PlanArguments
from ..config.config_file import parse_config
from ..config.fields import checked, option_specs
from ..config.run_config import NOT_NANOGPTS, RunConfig, gpt2_shapes, resolve_run
from ..config.training_script import imports_torch
from ..core.errors import UsageError
from ..core.units import MiB, optional_bytes, show_bytes
from ..diagnosis.case import card_with, usage_in
from ..diagnosis.nvidia_smi import SmiGpu, parse_nvidia_smi
from ..diagnosis.oom_message import OomMessage, parse_oom_message
from ..diagnosis.reading import card_of
from ..show.plan_text import run_title
from .form import SETTINGS, PageQuery, presets, read, settings_in

Answer = dict[str, Any]

PASTED = "pasted text"  # the name of a pasted config file in errors
VOCABULARIES = {"shakespeare_char": 65}  # of datasets in nanoGPT's config files, which leave it to meta.pkl
_ASSIGNMENT = re.compile(r"^(\w+)\s*(?::\s*\w+\s*)?=(?!=)", re.MULTILINE)
_PROMPT = re.compile(r"^\s*(?:[\w.@:~/-]*[$#%>]\s+)?")
_SEVERAL = re.compile(r"--(?:nproc[-_]per[-_]node|num_processes)=(?!1$)")  # GPUs: the page plans for one
_PROGRAM = re.compile(r"(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|fitgpt|train\.py)$")


def paste(text: str, query: str | None) -> Answer:
    """`query`: the settings of the run that a message or reading is about; None: not known."""
    names = set(_ASSIGNMENT.findall(text)) & set(option_specs(RunConfig))
    if names:
        try:
            return _config(text)
        except UsageError:
            pass  # a message, or a config file with a mistake
    message, gpus = parse_oom_message(text), parse_nvidia_smi(text)
    if message is None and not gpus:
        if imports_torch(text):
            return {"kind": "script", "command": ""}
        if arguments := _command_line(text):
            return _command(arguments)
        if names:
            return _config(text)  # raises the error
    return {"kind": "message" if message else "reading" if gpus else "other",
            "offers": _of_message(message) if message else [_of_gpu(gpu) for gpu in gpus], **_explained(text, query)}


# ---- a config file or a command line: settings


def _config(text: str) -> Answer:
    specs = option_specs(RunConfig)
    assigned, helpers = parse_config(text, PASTED, {name: spec.default for name, spec in specs.items()})
    found = {each.key: checked(specs[each.key], each.value, f"{each.source}: {each.key} = {each.value!r}")
             for each in assigned if each.key in specs}
    unknown = [each.key for each in assigned if each.key not in specs and each.key not in helpers]
    return {"kind": "config", "replaces": True, **_settings(found), "unknown": sorted(set(unknown))}


def _command_line(text: str) -> list[str]:
    """The words of a command that trains or plans; empty if the text is none."""
    line = _PROMPT.sub("", re.sub(r"[\\^`]\s*\n", " ", text.strip()).partition("\n")[0])
    try:
        words = shlex.split(line)
    except ValueError:
        return []
    while words and re.fullmatch(r"\w+=\S*", words[0]):  # CUDA_VISIBLE_DEVICES=0
        words.pop(0)
    return words if words and (_PROGRAM.match(words[0]) or words[0].startswith("--")) else []


def _command(words: list[str]) -> Answer:
    script = next((at for at, word in enumerate(words) if word.endswith("train.py") or word == "fitgpt"), -1)
    trainer = "" if script < 0 else "fitgpt" if words[script] == "fitgpt" else "nanogpt"
    launcher, words = words[:max(script, 0)], words[script + 1:]
    if trainer == "fitgpt" and words[:1] == ["trace"]:
        return {"kind": "script", "command": shlex.join(["fitgpt", *words])}
    files = [word for word in words if word.endswith(".py")]
    known = {each["name"].partition(":")[0]: each["settings"] for each in presets()}
    known["train_shakespeare_char"] = known["shakespeare_char"]  # its name in nanoGPT, with the same values
    found: dict[str, Any] = {"trainer": trainer} if trainer else {}
    unknown = [word for word in launcher if _SEVERAL.match(word)]
    for file in files:
        found |= known.get(re.split(r"[\\/]", file)[-1].removesuffix(".py"), {})
    for flag in _flags([word for word in words if word not in files]):
        name = flag[0].lstrip("-").partition("=")[0].replace("-", "_")
        try:
            found |= {each.key: each.value for each in walk(flag, PlanArguments)}
        except UsageError:
            if {name, name.removeprefix("no_")} & set(option_specs(PlanArguments)):
                raise  # its value is wrong
            unknown.append(flag[0])
    unread = [file for file in files if re.split(r"[\\/]", file)[-1].removesuffix(".py") not in known]
    # Flags of a config file that is not known change what the form has: its text may have been pasted before.
    return {"kind": "command", "replaces": not unread, **_settings(found), "unknown": unknown, "unread": unread}


def _flags(words: Iterable[str]) -> list[list[str]]:
    """Each flag with the word after it, if that is its value."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("-"):
            found.append([word])
        elif found and len(found[-1]) == 1 and "=" not in found[-1][0]:
            found[-1].append(word)
    return found


def _settings(found: dict[str, Any]) -> Answer:
    """The settings of the page among some options, and the names of those that it does not need."""
    settings = {**gpt2_shapes.get(str(found.get("init_from")), {}), **found}
    vocab = VOCABULARIES.get(str(found.get("dataset")))
    if vocab and "vocab_size" not in settings:
        settings["vocab_size"] = vocab
    default = option_specs(RunConfig)
    if "trainer" not in settings and any(settings.get(name, default[name].default) != default[name].default
                                         for name in NOT_NANOGPTS):
        settings["trainer"] = "fitgpt"
    used = {*SETTINGS, "dataset" if vocab else "", "init_from" if found.get("init_from") in gpt2_shapes else ""}
    return {"settings": {name: str(value) for name, value in settings.items() if name in SETTINGS},
            "ignored": sorted(name for name in found if name not in used)}


# ---- nvidia-smi and messages: a diagnosis, the GPU and its other programs


def _of_gpu(gpu: SmiGpu) -> Answer:
    """A GPU, with what programs other than a training run hold of it."""
    own = [each for each in gpu.processes if each.computes and each.nbytes]
    others = None if gpu.used is None else max(gpu.used - sum(each.nbytes or 0 for each in own), 0)
    card = card_of(gpu)
    return _offer(card.name if card else "", others, [f"{each.name} ({each.pid})" for each in own])


def _of_message(message: OomMessage) -> list[Answer]:
    usage = usage_in(message)
    if usage is None:
        return []
    card = card_with(usage.total)
    offer = _offer(card.name if card else "", usage.others, [])
    return [offer] if offer["settings"] else []


def _offer(gpu: str, others: int | None, own: list[str]) -> Answer:
    settings = {"gpu": gpu} if gpu else {}
    if others is not None:
        settings["others"] = f"{round(others / MiB)}MiB"
    return {"settings": settings, "gpu": gpu, "others": "" if others is None else show_bytes(others), "own": own}


def _explained(text: str, query: str | None) -> Answer:
    """The diagnosis, with the settings of each remedy, and those in which the explained run differs from the plan."""
    planned = read(query) if query is not None else None
    found = diagnosis.explain(text, planned.config if planned else None, trainer=planned.trainer if planned else "auto",
                              others=optional_bytes(planned.questions.others, "MiB") if planned else None,
                              torch=planned.questions.torch if planned else "")
    inferred = {name: str(value) for name, value in found.inferred.items()} if planned else {}
    document = asdict(found) | {"inferred": inferred, "run": _title(planned, found.inferred) if planned else ""}
    for remedy in document["remedies"]:
        settings = (settings_in(remedy["todo"]) or [{}])[0]
        to_fitgpt = planned and planned.trainer == "nanogpt" and remedy["todo"].startswith("fitgpt train")
        remedy["settings"] = {"trainer": "fitgpt", **settings} if to_fitgpt else settings and {**inferred, **settings}
    # Flags cannot be added on the page: there the run on the Plan tab is the config.
    document["needed"] = [each for each in found.needed if "--" not in each and "config" not in each]
    document["wants_plan"] = planned is None and any("config" in each for each in found.needed)
    return {"diagnosis": document}


def _title(planned: PageQuery, inferred: dict[str, Any]) -> str:
    config = resolve_run(replace(planned.config, **inferred), planned.target.platform, planned.trainer)
    return run_title(config, planned.trainer, config.gpt_config().count_params(), "")
