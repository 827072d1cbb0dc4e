"""The page's query string → PageQuery: a run on a GPU. And back: PageQuery → command, config file, settings.

Only options that affect memory are read, and none that names a file: a shared link cannot make the server read one.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from ..config.command_options import PlanArguments, PlanOptions
from ..config.fields import Assignment, build, option_specs, parse_value, shown
from ..config.memory_savers import loss_chunk_tokens
from ..config.run_config import DEFAULT_VOCAB, NOT_NANOGPTS, PAGE_OPTIONS, RunConfig, diff, resolve
from ..core.errors import UsageError
from ..planning.budget import Target, check_supported, target_for

RUN_OPTIONS = tuple(name for names in PAGE_OPTIONS.values() for name in names)
CARRIED = ("eval_iters",)  # affects no memory, but a smaller evaluation batch needs more iterations
QUESTIONS = ("gpu", "others", "budget", "trainer", "torch")
SETTINGS = (*RUN_OPTIONS, *CARRIED, *QUESTIONS)

MOST_FIELDS, LONGEST_VALUE = 60, 200
MOST_LAYERS, MOST_CHUNKS = 200, 2048  # with more, a tape takes seconds to write; `fitgpt plan` has no such limit
DRIVER_SECONDS = 3                    # how long a reading of this machine's GPU is reused while a slider moves


class PageQuery(NamedTuple):
    """A run, and the GPU to plan it for."""

    config: RunConfig
    trainer: str
    target: Target
    questions: PlanOptions
    ignored: tuple[str, ...]  # parts of the query string, each as a sentence


def read(query: str) -> PageQuery:
    """Raises UsageError for a value that is not valid, and for an unknown GPU."""
    assignments, ignored = _assignments(query)
    questions = build(PlanOptions, [each for each in assignments if each.key in QUESTIONS])
    config, _ = resolve([each for each in assignments if each.key not in QUESTIONS])
    _check_size(config, questions.trainer)
    target = _target(questions)
    check_supported(config, target, questions.trainer)
    return PageQuery(config, questions.trainer, target, questions, ignored)


def _assignments(query: str) -> tuple[list[Assignment], tuple[str, ...]]:
    try:
        pairs = parse_qsl(query, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise UsageError(f"The address has more than {MOST_FIELDS} settings.", "Remove some of them.") from None
    found, ignored = [], []
    for key, text in pairs:
        if key not in SETTINGS:
            ignored.append(f"{key[:LONGEST_VALUE]!r} is not a setting of this page and is ignored")
        elif len(text) > LONGEST_VALUE:
            raise UsageError(f"{key}: its value is {len(text):,} characters long.",
                             f"A value has at most {LONGEST_VALUE} characters.")
        else:
            found.append(Assignment(key, parse_value(PlanArguments, key, text), f"--{key}={text}"))
    return found, tuple(ignored)


def _check_size(config: RunConfig, trainer: str) -> None:
    if config.n_layer > MOST_LAYERS:
        raise UsageError(f"n_layer={config.n_layer}: the page plans at most {MOST_LAYERS} layers.",
                         f"--n_layer={MOST_LAYERS}, or fitgpt plan in a terminal, which has no limit.")
    tokens = max(config.batch_size * config.block_size, config.eval_batch * config.eval_block)
    chunks = tokens / loss_chunk_tokens(tokens, config.vocab_size or DEFAULT_VOCAB, config.loss_chunk)
    if trainer == "fitgpt" and chunks > MOST_CHUNKS:
        raise UsageError(f"The loss of {tokens:,} tokens would be computed in {chunks:,.0f} chunks; the page plans at "
                         f"most {MOST_CHUNKS:,}.", "--loss_chunk=0, or a smaller batch.")


def _target(questions: PlanOptions) -> Target:
    moment = 0 if questions.gpu else int(time.monotonic() / DRIVER_SECONDS)
    return _cached_target(questions.gpu, questions.others, questions.budget, questions.torch, moment)


@lru_cache(maxsize=8)
def _cached_target(gpu: str, others: str, budget: str, torch: str, moment: int) -> Target:
    """`moment` changes every DRIVER_SECONDS, so that an old reading of the driver is not reused."""
    return target_for(gpu, "auto", others=others, budget=budget, torch=torch)


# ---- back to settings, a command, a config file


def as_settings(before: RunConfig, after: RunConfig) -> dict[str, str]:
    """The settings of the page that turn one config into the other."""
    return {key: str(now) for key, _, now in diff(before, after) if key in (*RUN_OPTIONS, *CARRIED)}


def flags_in(fix: str) -> dict[str, str]:
    """The settings in the flags that a fix begins with: '--dtype=float16, or …' → {"dtype": "float16"}."""
    found: dict[str, str] = {}
    for word in fix.split():
        name, _, text = word.rstrip(".,").removeprefix("--").partition("=")
        if not word.startswith("--") or name not in SETTINGS or not text:
            break
        found[name] = text.strip("'\"")
    return found


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
    lines = [f"{key} = {value!r}" for key, value in _training_options(query).items()]
    vocab = query.config.vocab_size if query.trainer == "nanogpt" else 0
    vocab_note = [f"# train.py reads vocab_size from the dataset's meta.pkl: {vocab} in this plan."] if vocab else []
    return "\n".join([f"# {comment}", "# Options that are not set here have their defaults; set `dataset` to yours.",
                      *vocab_note, "", *(lines or ["# All options have their defaults."])]) + "\n"


def _training_options(query: PageQuery) -> dict[str, Any]:
    """The options that are not at their default, for the trainer's command line."""
    options = _not_default(query)
    if query.trainer == "nanogpt":
        options.pop("vocab_size", None)  # train.py reads it from the dataset
    elif query.questions.budget:
        options["budget"] = query.questions.budget
    return options


def _not_default(query: PageQuery) -> dict[str, Any]:
    unknown = NOT_NANOGPTS if query.trainer == "nanogpt" else ()  # its command line rejects them
    return {key: now for key, _, now in diff(RunConfig(), query.config) if key not in unknown}
