"""Every allocation of a run on the CPU fails once, in every phase: loading, evaluation, steps, saving, resuming.

The run must continue to the same weights, bit for bit; or end with a clear error and reach them when it is
started again.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import FitError
from fitgpt.runs.folder import can_resume
from fitgpt.training import checkpoint
from fitgpt.training.run import run as train
from fitgpt.training.worker import as_fit_error
from tests.failing_allocations import FALLBACKS, SMALL, Ended, FailingAllocations
from tests.helpers import tiny_config

from .outcome import Campaign, Outcome, failed
from .processes import DOCUMENTED, isolated

REQUIRED = "0 wrong weights"
VARIANTS: dict[str, Mapping[str, Any]] = {
    "adamw": {}, "dropout": dict(dropout=0.2), "float16": dict(dtype="float16"), "muon": dict(optimizer="muon"),
    "adam8bit": dict(optimizer="adam8bit"), "bfloat16": dict(weights="bfloat16", dtype="bfloat16"),
    "offload_optimizer": dict(offload="optimizer"), "offload_gradients": dict(offload="gradients"),
    "step_in_backward": dict(step_in_backward=True, batch_size=4, gradient_accumulation_steps=1, grad_clip=0.0),
    "saved_activations": dict(saved_activations="input"),
}
RESUMED = ("adamw", "dropout", "float16")  # also with a run of which half is done


def campaign(folder: Path) -> Campaign:
    os.fsync = lambda file: None  # thousands of runs are written, and none must survive a power cut
    gc.freeze()  # the guard collects garbage; this makes that fast
    checkpoint._read_tensors = in_cpu_ram(checkpoint._read_tensors)
    cases, expected = list[str](), dict[str, tuple[bytes, bytes]]()
    for name, changes in VARIANTS.items():
        config = tiny_config(folder / name, **{**SMALL, **changes})
        counts = {"whole": count_allocations(config, folder / "count")}
        expected[name] = Ended(config, []).bits()
        if name in RESUMED:
            half = replace(config, max_iters=1, out_dir=str(folder / name / "half"))
            count_allocations(half, folder / "count")
            counts["resumed"] = count_allocations(
                prepared(replace(config, out_dir=str(folder / "counted")), "resumed", half), folder / "count")
        cases += [f"{name}/{start}/{number:04d}" for start, count in counts.items() for number in range(1, count + 1)]

    def run(case: str) -> Outcome:
        name, start, number = case.split("/")
        here = folder / name
        config = tiny_config(here, **{**SMALL, **VARIANTS[name]})
        half = replace(config, out_dir=str(here / "half"))
        config = prepared(replace(config, out_dir=str(here / "case")), start, half)

        def outcome() -> Outcome:
            ended = attempt(config, int(number))
            if ended is not None and (ended.exit_code not in DOCUMENTED or "Traceback" in ended.what):
                return failed("crashed", ended.what)
            if ended is not None:
                rest = replace(config, init_from="resume" if can_resume(config.out_dir) else config.init_from)
                again = attempt(rest, None)
                if again is not None:
                    return failed("stuck", f"{ended.what}\n--- and then:\n{again.what}")
            if Ended(config, []).bits() != expected[name]:
                return failed("wrong weights", ended.what if ended else "")
            return Outcome("refused, resumed byte-identical" if ended else "went on, byte-identical")

        return isolated(outcome)

    return Campaign(cases, run)


def prepared(config: RunConfig, start: str, half: RunConfig) -> RunConfig:
    """The config, in a folder as it must be at the start: without a run, or with one of which half is done."""
    shutil.rmtree(config.out_dir, ignore_errors=True)
    if start == "whole":
        return config
    shutil.copytree(half.out_dir, config.out_dir)
    return replace(config, init_from="resume")


def attempt(config: RunConfig, failing: int | None) -> FitError | None:
    """Trains; one allocation fails, by number. → the error that the user would get."""
    try:
        with FailingAllocations([] if failing is None else [failing]):
            train(config.to_dict(), [], lambda: False, fallbacks=FALLBACKS)
    except FitError as error:
        return error
    except Exception as error:
        return as_fit_error(error)[0]
    return None


def count_allocations(config: RunConfig, result: Path) -> int:
    """Trains in a process of its own. → how many allocations it made."""
    def counted() -> Outcome:
        with FailingAllocations() as mode:
            train(config.to_dict(), [], lambda: False, fallbacks=FALLBACKS)
        result.write_text(str(mode.count))
        return Outcome("done")

    ended = isolated(counted)
    if not ended.ok:
        raise RuntimeError(ended.note)
    return int(result.read_text())


def in_cpu_ram(read: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose allocations are not counted: a file is read into CPU RAM."""
    def uncounted(*given: Any) -> Any:
        with _disable_current_modes():
            return read(*given)
    return uncounted
