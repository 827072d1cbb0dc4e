"""`fitgpt explain`: options → a Diagnosis on the terminal or in JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from typing import BinaryIO

from ..config.command_options import ExplainOptions
from ..config.fields import Assignment, build, option_specs
from ..diagnosis.input import explain_options
from ..show.diagnosis_text import diagnosis_text
from ..show.terminal import columns

NOT_RECOGNISED = 1
MAX_WIDTH = 80


def explain(assignments: Sequence[Assignment]) -> int:
    own = option_specs(ExplainOptions)
    options = build(ExplainOptions, [each for each in assignments if each.key in own])
    diagnosis = explain_options(options, [each for each in assignments if each.key not in own], _stdin(options.target))
    if options.json:
        print(json.dumps(asdict(diagnosis), ensure_ascii=False, indent=1))
    else:
        print(diagnosis_text(diagnosis, min(columns(), MAX_WIDTH)))
    return NOT_RECOGNISED if diagnosis.subject == "unknown" else 0


def _stdin(target: str) -> BinaryIO | None:
    """Standard input if it is piped, or if the target is -."""
    piped = sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()
    if target == "-" or piped:
        return getattr(sys.stdin, "buffer", None) or BytesIO(sys.stdin.read().encode())
    return None
