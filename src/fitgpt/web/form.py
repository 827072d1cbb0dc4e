"""The page's form: what it offers; the query string that it sends → PageQuery, a run on a GPU; and a PageQuery as a
command, a config file, settings.

Only options that affect memory are read, and none that names a file: a shared link cannot make the server read one.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from .. import __version__
from ..config.argv import walk
from ..config.command_options import PlanArguments, PlanOptions
from ..config.fields import Assignment, build, option_specs, parse_value, shown
from ..config.memory_savers import POLICIES
from ..config.run_config import (
    DEFAULT_VOCAB,
    NOT_NANOGPTS,
    PAGE_OPTIONS,
    RunConfig,
    config_from,
    diff,
    gpt2_shapes,
    shorter_warmup,
)
from ..core.errors import DeviceError, UsageError
from ..core.units import show_count
from ..hardware import gpus, nvidia
from ..memory.platform import TORCH_VERSIONS
from ..planning.budget import Target, check_supported, target_for

RUN_OPTIONS = tuple(name for names in PAGE_OPTIONS.values() for name in names)
# Affect no memory: a smaller evaluation batch needs more iterations; the length of the run decides how long it takes.
CARRIED = ("eval_iters", "max_iters")
QUESTIONS = ("gpu", "others", "budget", "trainer", "torch")
SETTINGS = (*RUN_OPTIONS, *CARRIED, *QUESTIONS)
ARGUMENTS = ("family", "goal", "allow", "within")  # of an API request, beside the settings

EXAMPLE = "RTX 4070"  # selected at first if this machine has no GPU
CONFIGS = Path(__file__).parents[1] / "example_configs"
DOCS = Path(__file__).parents[3] / "docs"  # where fitgpt runs from its repository
GROUPS = {"size": (*PAGE_OPTIONS["size"], "max_iters"), "savers": PAGE_OPTIONS["less"], "more": PAGE_OPTIONS["more"]}
# The stops of each slider. Any other number can be typed beside it.
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
STOPS: dict[str, tuple[int, ...]] = {
    "batch_size": _COUNTS, "gradient_accumulation_steps": _COUNTS, "n_layer": (*range(1, 37), 40, 42, 44, 48, 56, 64),
    "block_size": (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    "n_embd": (), "n_head": (),  # each depends on the other: they come with the plan
    "eval_batch_size": (0, *_COUNTS), "loss_chunk": (0, 128, 256, 512, 1024, 2048, 4096, 8192),
}
OTHERS_MIB = (0, 128, 256, 512, 768, 1024, 1536, 2118, 2560, 3072, 4096, 5120, 6144, 8192)

MAX_FIELDS, MAX_VALUE_LENGTH = 60, 200
MAX_LAYERS = 200                    # with more, a tape takes seconds to write
DRIVER_SECONDS = 3                  # how long a reading of this machine's GPU is reused while a slider moves


# ---- what the form offers


def form() -> dict[str, Any]:
    """GPUs, presets, and every option that affects memory, each with its help."""
    try:
        here = max(nvidia.survey().gpus, key=lambda gpu: gpu.free_bytes or 0, default=None)
    except DeviceError:
        here = None
    own = option_specs(PlanOptions)
    return {
        "version": __version__, "example": EXAMPLE, "here": here.name if here else "",
        "gpus": [{"name": gpu.name, "memory": f"{gpu.memory_gb} GB", "group": _gpu_group(gpu)}
                 for gpu in gpus.load() if gpu.vendor in ("nvidia", "amd")],
        "presets": presets(),
        "groups": {group: [_control(name) for name in names] for group, names in GROUPS.items()},
        "trainers": list(own["trainer"].choices), "torch": list(TORCH_VERSIONS), "others": OTHERS_MIB,
        "help": {name: own[name].help for name in QUESTIONS}, "has_docs": DOCS.is_dir(),
        "default_vocab": str(DEFAULT_VOCAB),
    }


def presets() -> list[dict[str, Any]]:
    """The config files of this project, smallest model first, and nanoGPT's own that differ from them. Each has the
    options that are not at their default: choosing a preset resets all others."""
    own = []
    for file in sorted(CONFIGS.glob("*.py")):
        assignments = [each for each in walk([str(file)], RunConfig) if each.key in (*RUN_OPTIONS, *CARRIED)]
        config, _ = config_from(assignments)
        own.append((config.gpt_config().count_params(), file.stem, config))
    own.sort(key=lambda each: each[0])
    named = [("config/", f"{name}: {show_count(params)}", config) for params, name, config in own]
    named += [("nanoGPT", "train_gpt2", RunConfig()), ("nanoGPT", "finetune_shakespeare", RunConfig(
        **gpt2_shapes["gpt2-xl"], batch_size=1, gradient_accumulation_steps=32, max_iters=20))]
    for size, shape in gpt2_shapes.items():
        config = RunConfig(**shape, batch_size=8)
        named.append(("GPT-2", f"{size}: {show_count(config.gpt_config().count_params())}", config))
    return [{"group": group, "name": name,
             "settings": {key: str(value) for key, _, value in diff(RunConfig(), config)}}
            for group, name, config in named]


def _control(name: str) -> dict[str, Any]:
    """An option as its dataclass field declares it."""
    option = option_specs(RunConfig)[name]
    choices = list(POLICIES if name == "saved_activations" else option.choices)
    if option.kind == "auto":
        choices = ["auto", "True", "False"]
    kind = "switch" if option.kind == "bool" else "choice" if choices else "slider" if name in STOPS else "number"
    return {"name": name, "kind": kind, "default": str(option.default), "help": option.help, "choices": choices,
            "stops": list(STOPS.get(name, ())), "integer": option.kind == "int", "fitgpt_only": name in NOT_NANOGPTS}


def _gpu_group(gpu: gpus.GpuModel) -> str:
    """The group of a GPU in the list: RTX 40, RTX 30 …, or one that the page's catalogue names."""
    words = gpu.name.split()
    if gpu.vendor == "amd":
        return "amd"
    if words[0] in ("RTX", "GTX") and words[1].isdecimal() and len(words[1]) == 4 and words[1] != "6000":
        return f"{words[0]} {words[1][:2]}"
    return "workstation" if words[0] in ("RTX", "TITAN") else "data_centre"


# ---- what the form sends


class PageQuery(NamedTuple):
    """A run, and the GPU to plan it for."""

    config: RunConfig
    trainer: str
    target: Target
    questions: PlanOptions
    ignored: tuple[str, ...]  # parts of the query string, each as a sentence


def read(query: str) -> PageQuery:
    """Raises UsageError for a value that is not valid, and for an unknown GPU."""
    try:
        pairs = parse_qsl(query, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise UsageError(f"The address has more than {MAX_FIELDS} settings.", "Remove some of them.") from None
    assignments, ignored = [], []
    for key, text in pairs:
        if key in ARGUMENTS:
            continue
        if key not in SETTINGS:
            ignored.append(f"{key[:MAX_VALUE_LENGTH]!r} is not a setting of this page and is ignored")
        elif len(text) > MAX_VALUE_LENGTH:
            raise UsageError(f"{key}: its value is {len(text):,} characters long.",
                             f"A value has at most {MAX_VALUE_LENGTH} characters.")
        else:
            assignments.append(Assignment(key, parse_value(PlanArguments, key, text), f"--{key}={text}"))
    questions = build(PlanOptions, [each for each in assignments if each.key in QUESTIONS])
    config, _ = config_from([each for each in assignments if each.key not in QUESTIONS])
    if config.n_layer > MAX_LAYERS:
        raise UsageError(f"n_layer={config.n_layer}: the page plans at most {MAX_LAYERS} layers.",
                         f"--n_layer={MAX_LAYERS}, or fitgpt plan in a terminal.")
    moment = 0 if questions.gpu else int(time.monotonic() / DRIVER_SECONDS)
    target = _target(questions.gpu, questions.others, questions.budget, questions.torch, moment)
    check_supported(config, target, questions.trainer)
    return PageQuery(config, questions.trainer, target, questions, tuple(ignored))


@lru_cache(maxsize=8)
def _target(gpu: str, others: str, budget: str, torch: str, moment: int) -> Target:
    """`moment` changes every DRIVER_SECONDS, so that an old reading of the driver is not reused."""
    return target_for(gpu, "auto", others=others, budget=budget, torch=torch)


# ---- back to settings, a command, a config file


def as_settings(before: RunConfig, after: RunConfig) -> dict[str, str]:
    """The settings of the page that turn one config into the other."""
    return {key: str(now) for key, _, now in diff(before, after) if key in (*RUN_OPTIONS, *CARRIED)}


_FLAG = re.compile(r"""--(\w[\w-]*)[= ]('[^']*'|"[^"]*"|[^\s,;?…]+)""")


def settings_in(fix: str) -> list[dict[str, str]]:
    """The settings in the flags of a fix, one dict per alternative: '--n_head=7 or --n_head=14' → two."""
    found: list[dict[str, str]] = []
    end = -1
    for flag in _FLAG.finditer(fix):
        name, text = flag[1].replace("-", "_"), flag[2].strip("'\"").rstrip(".")
        if name not in SETTINGS or text == "NAME":
            continue
        if end > 0 and fix[end:flag.start()].isspace():
            found[-1][name] = text
        else:
            found.append({name: text})
        end = flag.end()
    return found


def without_dashes(text: str) -> str:
    """A sentence that names flags, as the page says it: --batch_size=12 and --others 2GiB are settings there."""
    return re.sub(r"--(\w[\w-]*)(?:=| (?=[\w'\"]))", r"\1=", text)


def command(query: PageQuery) -> str:
    """The command that trains this run."""
    program = "fitgpt train" if query.trainer == "fitgpt" else "python train.py"
    return " ".join([program, *(f"--{key}={shown(value)}" for key, value in _training_options(query).items())])


def plan_command(query: PageQuery) -> str:
    """The command that prints this plan."""
    own = option_specs(PlanOptions)
    questions = {key: getattr(query.questions, key) for key in QUESTIONS}
    flags = {key: value for key, value in questions.items() if value != own[key].default} | _not_default(query)
    return " ".join(["fitgpt plan", *(f"--{key}={shown(value)}" for key, value in flags.items())])


def config_file(query: PageQuery, comment: str) -> str:
    """A config file in nanoGPT's format: assignments of literals."""
    lines = [f"# {comment}", "# Options that are not set here have their defaults; set `dataset` to yours."]
    if query.trainer == "nanogpt" and query.config.vocab_size:
        lines.append(f"# train.py reads vocab_size from the dataset's meta.pkl: {query.config.vocab_size} in this "
                     "plan.")
    options = [f"{key} = {value!r}" for key, value in _training_options(query).items()]
    return "\n".join([*lines, "", *(options or ["# All options have their defaults."])]) + "\n"


def _training_options(query: PageQuery) -> dict[str, Any]:
    """The options that are not at their default, for the trainer's command line."""
    options = _not_default(query)
    if "max_iters" in options:
        steps = query.config.max_iters
        options["lr_decay_iters"] = steps  # else a short run would keep its highest learning rate
        if (warmup := shorter_warmup(steps, RunConfig.warmup_iters)) != RunConfig.warmup_iters:
            options["warmup_iters"] = warmup
    if query.trainer == "nanogpt":
        options.pop("vocab_size", None)  # train.py reads it from the dataset
    elif query.questions.budget:
        options["budget"] = query.questions.budget
    return options


def _not_default(query: PageQuery) -> dict[str, Any]:
    unknown = NOT_NANOGPTS if query.trainer == "nanogpt" else ()  # its command line rejects them
    return {key: now for key, _, now in diff(RunConfig(), query.config) if key not in unknown}
