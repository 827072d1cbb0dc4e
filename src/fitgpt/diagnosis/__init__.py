"""Why GPU memory ran out, or what it is used for: a message, nvidia-smi's output, figures, a plan or a run → Diagnosis.

In order: input (bytes → text); oom_message, stack_frames, nvidia_smi (text → figures); gpu_usage, tensor_match, case
(figures and config → what is known); rules (causes); diagnose, reading, plan_or_run (→ Diagnosis).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from ..config.command_options import ExplainOptions
from ..config.fields import Assignment
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import optional_bytes
from ..hardware.gpus import find
from ..planning import budget
from .case import ExplainRequest, find_config
from .diagnose import Diagnosis, diagnose
from .input import MessageContext, read_context
from .nvidia_smi import parse_nvidia_smi
from .oom_message import COUNTED, OomMessage, is_oom_message, message_in
from .plan_or_run import explain_document, explain_run
from .reading import explain_figures, explain_nvidia_smi

INPUTS = ("the whole message, from `CUDA out of memory` to its last figure, with the traceback above it",
          "or the output of nvidia-smi, a plan in JSON, or a run folder",
          "or two figures: fitgpt explain --reading 6582MiB --process 4464MiB config.py")
EXAMPLE = "fitgpt explain oom.txt config.py, or pipe it: fitgpt explain - < oom.txt"


def explain(text: str, config: RunConfig | None = None, *, gpu: str = "", trainer: str = "auto",
            others: int | None = None) -> Diagnosis:
    """An out-of-memory message, output of nvidia-smi or a plan in JSON, and the run's config if known → Diagnosis.

    Its subject is "unknown" if the text is none of these. `others`: bytes that other processes hold of the GPU.
    """
    context = context_in(BytesIO(text.encode("utf-8", "replace")))
    request = ExplainRequest(config, gpu=gpu, trainer=trainer, others=others)
    return _explain_context(context, request) or _unknown("the text", INPUTS[:2])


def explain_options(options: ExplainOptions, assignments: Sequence[Assignment],
                    stdin: BinaryIO | None) -> Diagnosis:
    """The options of `fitgpt explain`, the assignments of the run's config, and piped input if any → Diagnosis."""
    folder = Path(options.target) if options.target and os.path.isdir(options.target) else None
    is_file = folder is None and options.target not in ("", "-") and not _is_text(options.target)
    config, name, notes = find_config(assignments, options.config, folder, options.target if is_file else "")
    request = ExplainRequest(config, name, options.gpu, options.trainer, optional_bytes(options.others),
                             optional_bytes(options.process))
    diagnosis = _explain_input(options, request, folder, stdin)
    return diagnosis if diagnosis.subject == "unknown" else replace(diagnosis, notes=(*diagnosis.notes, *notes))


def _explain_input(options: ExplainOptions, request: ExplainRequest, folder: Path | None,
                   stdin: BinaryIO | None) -> Diagnosis:
    if options.reading or (options.process and not options.target):
        return explain_figures(optional_bytes(options.reading), request)
    context = _open_context(options.target, folder, stdin)
    source = options.target if options.target not in ("", "-") else "the piped input"
    if context is not None and context.text.strip():
        diagnosis = _explain_context(context, request)
        if diagnosis is not None or folder is None:
            return diagnosis or _unknown(source, INPUTS)
    if request.config is None and options.target and context is not None:
        raise UsageError(f"{source} is empty.", EXAMPLE)
    if request.config is None:
        raise UsageError("`fitgpt explain` needs something to explain: a file, a run folder, a config or piped text.",
                         EXAMPLE)
    diagnosis = explain_run(request, folder)
    if options.target and folder is None:
        return replace(diagnosis, notes=(*diagnosis.notes, f"{source} is empty: only the config is explained."))
    return diagnosis


# ---- where the text is


def context_in(stream: BinaryIO) -> MessageContext:
    """The text around the first message or nvidia-smi output of an input of any size."""
    return read_context(stream, lambda text: is_oom_message(text) or bool(parse_nvidia_smi(text)),
                        set(COUNTED.values()))


def _open_context(target: str, folder: Path | None, stdin: BinaryIO | None) -> MessageContext | None:
    """The text of a file, of the target itself or of standard input; None if there is no text."""
    if folder is not None or target in ("", "-"):
        return context_in(stdin) if stdin is not None else None
    if _is_text(target):
        return context_in(BytesIO(target.encode()))
    try:
        with open(target, "rb") as file:
            return context_in(file)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise
        raise UsageError(f"There is no file or folder {target!r:.200}.",
                         "fitgpt explain - < oom.txt reads piped input.") from None


def _is_text(target: str) -> bool:
    """Whether the target is the message itself, not the path of a file."""
    return not os.path.exists(target) and is_oom_message(target)


# ---- what the text is


def _explain_context(context: MessageContext, request: ExplainRequest) -> Diagnosis | None:
    """None if the text is neither a message nor nvidia-smi's output nor a plan."""
    message = message_in(context)
    if message is not None:
        return _explain_message(message, request)
    gpus = parse_nvidia_smi(context.text)
    if gpus:
        return explain_nvidia_smi(gpus, request)
    return explain_document(_json(context.text), request) if context.text.lstrip().startswith("{") else None


def _explain_message(message: OomMessage, request: ExplainRequest) -> Diagnosis:
    card, others = find(request.gpu) if request.gpu else None, request.others
    if card is not None and card.vendor == "nvidia":
        budget.on_card(card, others=others or 0)  # raises an error if the card has less than `others`
    unknown = message.process is None and not message.others
    if others is not None and unknown and message.total is not None and message.free is not None:
        message = replace(message, process=max(message.total - message.free - others, 0))
    return diagnose(message, request.run_on(card), card, request.trainer, others or 0)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _unknown(source: str, inputs: tuple[str, ...]) -> Diagnosis:
    return Diagnosis("unknown", f"{source[0].upper()}{source[1:]} contains no message about memory, no output of "
                     "nvidia-smi and no plan that fitgpt knows. It does not guess.", needed=inputs)
