"""`fitgpt rehearse`: the GPU memory that a run really uses, phase by phase, against its forecast, without training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config.command_options import RehearseOptions
from ..config.fields import Assignment, option_specs
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.files import check_overwrite, disk_faults, is_own_json
from ..hardware.allocator_env import check_allocator_env
from ..planning.request import training_config, with_data
from ..training import memory_check
from ..training.supervisor import WorkerConfig, conclude, require_packages, run_worker


def rehearse(assignments: Sequence[Assignment]) -> int:
    """Checks what can be checked without torch; the worker does the rest: training/run.rehearse_only."""
    require_packages()
    check_allocator_env(os.environ)
    config, notes = training_config([each for each in assignments if each.key in option_specs(RunConfig)])
    if config.gpus:
        raise UsageError(f"--gpus={config.gpus}: `fitgpt rehearse` rehearses on one GPU. On several, `train` rehearses "
                         "before its first step.", "fitgpt train --gpus=all --rehearse=True …")
    out = Path(str({each.key: each.value for each in assignments}.get("out", RehearseOptions.out)))
    check_overwrite(out, lambda text: is_own_json(text, "forecast", "measured"), "rehearse", "-o")
    with disk_faults("make the folder of", out):  # before minutes of work whose result could not be written
        out.parent.mkdir(parents=True, exist_ok=True)
    others = memory_check.check(config)
    config = replace(with_data(config)[0], init_from="scratch", plan="")  # only the shape of the weights matters
    code, report = run_worker(WorkerConfig(config.to_dict(), notes, others=others, rehearsal=str(out)))
    return conclude(code, report, config)
