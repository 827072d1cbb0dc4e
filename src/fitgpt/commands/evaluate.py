"""`fitgpt eval`: measures the loss of a checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from ..config.command_options import EvalOptions
from ..hardware.allocator_env import child_environment
from .sample import warn


def evaluate(options: EvalOptions) -> int:
    os.environ.update(child_environment(os.environ))  # the allocator's settings, before torch is imported
    from ..show.progress import eval_line
    from ..training.trained_model import evaluate_checkpoint, open_checkpoint

    source = open_checkpoint(options.run, options.which)
    warn(*source.notes)
    result, choice = evaluate_checkpoint(source, options, warn)
    if choice.mismatch:
        warn(f"{choice.mismatch.why} {choice.mismatch.fix}")
    if options.json:
        print(json.dumps({"schema": 1, "checkpoint": source.place, "dtype": choice.dtype, **asdict(result)}))
    else:
        print(eval_line(result))
    return 0
