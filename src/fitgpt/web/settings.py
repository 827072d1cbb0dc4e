"""The page's settings: a query string becomes a run on a card, and a run becomes a command, a config file, a query.

Only knobs that move memory are taken, and none that names a file: an address from a stranger reads nothing here.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from ..config.command_options import PlanOptions, PlanQuestions
from ..config.fields import Assignment, build, knobs_of, parse_value, shown
from ..config.memory_savers import loss_piece_tokens
from ..config.run_config import DEFAULT_VOCAB, RunConfig, diff, resolve
from ..core.errors import UsageError
from ..planning import budget as place
from ..planning.budget import Place
from ..planning.forecast import NOT_NANOGPTS
from ..planning.resolve import size

KNOBS = ("batch_size", "block_size", "n_layer", "n_embd", "n_head", "gradient_accumulation_steps",
         "recompute", "loss_chunk", "optimizer", "adam8bit", "offload", "weights", "residual",
         "step_in_backward", "grad_checkpoint", "casts", "gradients", "states", "eval_batch_size", "eval_block_size",
         "dtype", "compile", "cuda_graphs", "dropout", "bias", "vocab_size", "grad_clip")
CARRIED = ("eval_iters",)  # moves no memory, and belongs to a smaller batch: the same windows are evaluated
QUESTIONS = ("gpu", "others", "budget", "trainer", "torch")
UNKNOWN_TO_NANOGPT = {*NOT_NANOGPTS, "cuda_graphs"}  # its command line refuses them …
OF_ITS_DATA = "vocab_size"                           # … and this one, which a plan needs to be told

MOST_FIELDS, LONGEST_VALUE = 60, 200
MOST_LAYERS, MOST_PIECES = 200, 2048  # beyond them a tape takes seconds to write; `fitgpt plan` has no such limit
DRIVER_SECONDS = 3                    # how long an answer of the driver's is good for


class Asked(NamedTuple):
    """What the page asks about."""

    config: RunConfig
    trainer: str
    place: Place
    questions: PlanQuestions
    passed_over: tuple[str, ...]  # of the query, each a sentence


def read(query: str) -> Asked:
    """Raises UsageError for a value that no run could have, or no card."""
    said, passed_over = _said(query)
    questions = build(PlanQuestions, [each for each in said if each.key in QUESTIONS])
    config, _ = resolve([each for each in said if each.key not in QUESTIONS])
    _check_size(config, questions.trainer)
    found = _place(questions)
    place.check_runs(config, found, questions.trainer)
    return Asked(config, questions.trainer, found, questions, passed_over)


def _said(query: str) -> tuple[list[Assignment], tuple[str, ...]]:
    try:
        pairs = parse_qsl(query, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise UsageError(f"The address has more than {MOST_FIELDS} settings.", "Begin with an empty one.") from None
    said, passed_over = [], []
    for key, text in pairs:
        if key not in (*KNOBS, *CARRIED, *QUESTIONS):
            passed_over.append(f"{key[:LONGEST_VALUE]!r} is not a setting of this page, and was passed over.")
        elif len(text) > LONGEST_VALUE:
            raise UsageError(f"{key}: its value is {len(text):,} characters long.", f"--{key}=… takes a short one.")
        else:
            said.append(Assignment(key, parse_value(PlanOptions, key, text), f"--{key}={text}"))
    return said, tuple(passed_over)


def _check_size(config: RunConfig, trainer: str) -> None:
    if config.n_layer > MOST_LAYERS:
        raise UsageError(f"n_layer={config.n_layer}: the page answers at once, and takes at most {MOST_LAYERS} layers.",
                         f"--n_layer={MOST_LAYERS}, or fitgpt plan in a terminal, which takes more.")
    tokens = max(config.batch_size * config.block_size, config.eval_batch * config.eval_block)
    pieces = tokens / loss_piece_tokens(tokens, config.vocab_size or DEFAULT_VOCAB, config.loss_chunk)
    if trainer == "fitgpt" and pieces > MOST_PIECES:
        raise UsageError(f"{tokens:,} tokens at once have their loss in {pieces:,.0f} pieces; the page answers at "
                         f"once, and takes at most {MOST_PIECES:,}.", "--loss_chunk=0, or a smaller batch.")


def _place(questions: PlanQuestions) -> Place:
    others, budget = size(questions.others), size(questions.budget)
    if questions.gpu:
        return _named(questions.gpu, others, budget, questions.torch)
    return _here(others, budget, questions.torch, int(time.monotonic() / DRIVER_SECONDS))


@lru_cache(maxsize=256)
def _named(gpu: str, others: int | None, budget: int | None, torch: str) -> Place:
    return place.named(gpu, others=others, budget=budget, torch=torch)


@lru_cache(maxsize=8)
def _here(others: int | None, budget: int | None, torch: str, moment: int) -> Place:
    """`moment`: so that the driver is asked again when its answer is old."""
    return place.here("auto", others=others, budget=budget, torch=torch)


# ---- and back


def as_settings(before: RunConfig, after: RunConfig) -> dict[str, str]:
    """What to set on the page to come from one config to the other."""
    return {key: str(now) for key, _, now in diff(before, after) if key in (*KNOBS, *CARRIED)}


def flags_in(words: str) -> dict[str, str]:
    """The settings that a fix such as '--dtype=float16, or …' spells out, if its first words are flags."""
    found: dict[str, str] = {}
    for word in words.split():
        name, _, text = word.rstrip(".,").removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (*KNOBS, *CARRIED, *QUESTIONS) or not text:
            break
        found[name] = text.strip("'\"")
    return found


def command(asked: Asked) -> str:
    """What to type to train just this."""
    verb = "fitgpt train" if asked.trainer == "fitgpt" else "python train.py"
    return " ".join([verb, *(f"--{key}={shown(value)}" for key, value in _for_training(asked).items())])


def plan_command(asked: Asked) -> str:
    own = knobs_of(PlanQuestions)
    questions = {key: getattr(asked.questions, key) for key in QUESTIONS}
    flags = {key: value for key, value in questions.items() if value != own[key].default} | _unusual(asked)
    return " ".join(["fitgpt plan", *(f"--{key}={shown(value)}" for key, value in flags.items())])


def config_file(asked: Asked, comment: str) -> str:
    """In nanoGPT's own format: assignments of plain values."""
    lines = [f"{key} = {value!r}" for key, value in _for_training(asked).items()]
    vocab = asked.config.vocab_size if asked.trainer == "nanogpt" else 0
    taken = [f"# train.py takes the vocabulary from the data's meta.pkl: {vocab} there."] if vocab else []
    return "\n".join([f"# {comment}", "# What is not set here has its default; the dataset is yours to name.", *taken,
                      "", *(lines or ["# All of it is at its default."])]) + "\n"


def _for_training(asked: Asked) -> dict[str, Any]:
    """A budget is the trainer's to keep, too."""
    budget = asked.questions.budget if asked.trainer == "fitgpt" else ""
    told = _unusual(asked)
    if asked.trainer == "nanogpt":
        told.pop(OF_ITS_DATA, None)
    return told | ({"budget": budget} if budget else {})


def _unusual(asked: Asked) -> dict[str, Any]:
    unheard = UNKNOWN_TO_NANOGPT if asked.trainer == "nanogpt" else ()
    return {key: now for key, _, now in diff(RunConfig(), asked.config) if key not in unheard}
