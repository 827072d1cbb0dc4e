"""`fitgpt export`: writes a checkpoint as a folder that transformers opens."""

from __future__ import annotations

import os

from ..config.command_options import ExportOptions
from ..hardware.allocator_env import child_environment
from .sample import warn


def export(options: ExportOptions) -> int:
    os.environ.update(child_environment(os.environ))  # the allocator's settings, before torch is imported
    from ..training.trained_model import export_checkpoint, open_checkpoint

    source = open_checkpoint(options.run, options.which)
    warn(*source.notes)
    if problem := export_checkpoint(source, options.out, options.dtype):
        warn(problem)
    print(f"{options.out}: opens with transformers.GPT2LMHeadModel.from_pretrained({options.out!r})")
    return 0
