"""`fitgpt rehearse`, in the worker: rehearses a run without training it, and compares its memory with the forecast."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.run_config import RunConfig
from ..core.errors import DoesNotFit
from ..core.files import write_over
from ..core.units import show_seconds
from ..data.dataset import open_dataset
from ..engine.device import read_memory, resolve_device
from ..engine.oom import OutOfMemory, attempt
from ..planning.plan_file import phases_to_json
from ..show.progress import memory_plan, plan_vs_measured, say
from .device_memory import plan_on_device
from .dry_run import Peaks, rehearse
from .plan_vs_measured import cumulative_reserved, over_forecast, phases_of
from .reporter import short_eval
from .run import build_training, check_data, evaluation_splits, take_shape, training_feed, versions

SCHEMA = 1
NO_COUNTERS = ("There is no plan to compare with: only the memory of an NVIDIA GPU is planned, and only there does "
               "PyTorch count it.")


def rehearse_and_report(config_dict: Mapping[str, Any], notes: Sequence[str], others: Mapping[str, int],
                        out: str) -> None:
    """Prints the measured memory and writes it to `out`. DoesNotFit if it exceeds the forecast or runs out."""
    config = RunConfig.from_dict(config_dict)
    dataset = open_dataset(config.dataset)
    choice = resolve_device(config.device, config.dtype, config.compile)
    config = replace(take_shape(config, None, dataset)[0], dtype=choice.dtype)
    check_data(config, dataset, None)
    device_memory = plan_on_device(config, choice, others)
    for note in (*notes, *choice.notes):
        say(f"note      {note}")
    if device_memory.plan:
        say(memory_plan(device_memory.plan))

    started, failures = time.perf_counter(), list[str]()
    training = build_training(config, choice)
    peaks = Peaks(training.device)
    peaks.seen("load", read_memory(choice.device))
    splits = evaluation_splits(dataset, ("train", "val"), windows=config.eval_iters * config.batch_size,
                               block=config.eval_block, seed=config.seed)
    done = attempt(lambda: rehearse(
        training, config, lambda short: training_feed(short, dataset, training.device),
        lambda: short_eval(training, splits, config.eval_batch, config.eval_block,
                           lambda batch, why: failures.append(f"evaluation: {why.short}.")), peaks))
    if isinstance(done, OutOfMemory):
        failures.append(f"training: {done.short}.")
    seconds, measured = time.perf_counter() - started, cumulative_reserved(peaks.of)
    forecast = phases_of(device_memory.plan.forecast) if device_memory.plan else {}
    exceeded = over_forecast(forecast, measured)
    wrote = write_over(Path(out), json.dumps({
        "schema": SCHEMA, "versions": versions(), "device": choice.device, "device_name": choice.name,
        "seconds": seconds, "config": config.to_dict(), "forecast": phases_to_json(forecast),
        "measured": phases_to_json(measured), "over_forecast": exceeded, "out_of_memory": failures,
    }, indent=1, ensure_ascii=False) + "\n")
    say(plan_vs_measured(forecast, measured) if device_memory.plan else NO_COUNTERS)
    say(f"rehearsed in {show_seconds(seconds)}: evaluation, two iterations and a checkpoint's copies, at full size. "
        f"The measurements are in {wrote}.")
    if failures:
        raise DoesNotFit(f"Out of memory in the rehearsal. {' '.join(failures)}",
                         "`fitgpt plan` with the same options and --options shows what each change would save.")
    if exceeded:
        raise DoesNotFit(f"More memory was used than forecast. {' '.join(exceeded)}",
                         "Please report it, with the file: forecasts are meant to be exact to 1 %.")
