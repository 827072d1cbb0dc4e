"""One training run, in the worker, in order: data, device, folder, weights, memory plan, rehearsal, loop, closing."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config.optimizers import checkpoint_bytes
from ..config.run_config import RunConfig
from ..core.errors import DeviceError, DoesNotFit, Interrupted, SystemFault
from ..core.files import write_over
from ..core.units import show_seconds
from ..data.dataset import Dataset, open_dataset
from ..engine.batches import evaluation_splits, training_batches
from ..engine.device import DeviceChoice, read_memory, resolve_device
from ..engine.oom import OutOfMemory, attempt
from ..engine.ranks import Ranks, UnwrittenRunFolder, check_alike, connect_gpus, is_restarted, join
from ..hardware.gpus import peak_flops
from ..planning import measured_speeds
from ..planning.plan_file import FallbackPlan, phases_to_json
from ..runs.folder import RunFolder, can_resume, holds_run, need_disk, open_run
from ..runs.metrics import RankFacts, RunFacts
from ..show.progress import Display, closing, memory_plan, open_display, plan_vs_measured, say
from . import checkpoint
from .build import build_training, check_data, find_source, start_from, take_shape
from .device_memory import (
    DeviceMemoryPlan,
    Peaks,
    over_forecast,
    phases_of,
    plan_on_device,
    plan_row,
)
from .liveness import Heartbeat
from .loop import Training, is_evaluation_due, train
from .oom_recovery import Guard
from .rehearsal import rehearse
from .reporter import TrainingReporter, short_eval
from .trackers import Tracker, open_trackers

REHEARSAL_SCHEMA = 1
NOT_PLANNED = "memory: not planned, because the run is not on an NVIDIA GPU."
NOT_COMPARED = ("There is no plan to compare with: only the memory of an NVIDIA GPU is planned, and only there does "
                "PyTorch count it.")


def run(config_dict: Mapping[str, Any], notes: Sequence[str], stop_requested: Callable[[], bool], *,
        others: Mapping[str, int] | None = None, fallbacks: Sequence[FallbackPlan] | None = None,
        heartbeat: Heartbeat | None = None) -> None:
    """Trains one run. `others`: bytes that others used of each GPU, by uuid, before this process started; `fallbacks`:
    smaller plans from a plan.json; `heartbeat`: where progress is written."""
    config = RunConfig.from_dict(config_dict)
    ranks, device = join(config, stop_requested)
    dataset = open_dataset(config.dataset)
    choice = resolve_device(device, config.dtype, config.compile)
    check_alike(ranks, config, choice.device, choice.dtype, dataset.summary.fingerprint)
    connect_gpus(ranks, config, choice.device)
    if is_restarted(ranks) and ranks.broadcast_object(can_resume(config.out_dir)):
        config = replace(config, init_from="resume")
    resuming = config.init_from == "resume"
    with (open_run(config.out_dir, config.to_dict(), resume=resuming) if ranks.is_first
          else UnwrittenRunFolder(config.out_dir)) as folder:
        source, leftovers, shape_notes = None, list[str](), list[str]()
        if ranks.is_first:
            leftovers = checkpoint.clean_leftovers(folder.checkpoints)
            source = find_source(config, folder)
            config, shape_notes = take_shape(config, source, dataset)
            need_disk(config.out_dir, checkpoint_bytes(config) * 2)
        config = replace(RunConfig.from_dict(ranks.broadcast_object(config.to_dict())), dtype=choice.dtype)
        check_data(config, dataset, source, partial(_verifying, stop_requested, heartbeat or Heartbeat()))
        device_memory = plan_on_device(config, choice, others, fallbacks)
        if not (resuming and config.eval_only):  # else a later resume would only evaluate
            folder.record(config.to_dict())

        training = build_training(config, choice, ranks)
        start_from(training, source, everything=resuming)
        trackers, tracker_notes = open_trackers(config, folder.path) if ranks.is_first else ([], [])
        facts = gather_facts(config, choice, dataset, training.step, ranks, [
            *notes, *choice.notes, *([] if device_memory.plan else [NOT_PLANNED]), *tracker_notes, *shape_notes,
            *leftovers, *folder.notes, *dataset.notes, *(source.notes if source else ())])
        if resuming and training.step >= config.max_iters:
            facts = replace(facts, notes=(*facts.notes, f"The run is at step {training.step} already, and max_iters is "
                                          f"{config.max_iters}: a higher --max_iters trains it further."))
        source = None  # frees its copies of the weights and optimizer state
        started = time.perf_counter()
        run_loop(config, facts, choice, dataset, folder, training, device_memory, trackers, stop_requested,
                 heartbeat)
        ranks.leave()
        seconds, hints = time.perf_counter() - started, []
        if training.saved_at != training.step and not config.eval_only and training.step > 0:
            hints.append("The last steps are not saved: always_save_checkpoint=False saves improvements only.")
        if holds_run(Path(config.out_dir)):
            hints.append(f"Generate text: fitgpt sample {shlex.quote(config.out_dir)}")
        say(closing(config.out_dir, training.step - facts.start_step, seconds, training.best, hints))
    if choice.mismatch:
        say(f"fitgpt: {choice.mismatch.why} {choice.mismatch.fix}", warning=True)


def _verifying(stop_requested: Callable[[], bool], heartbeat: Heartbeat) -> None:
    """Called while the data is verified, which may take minutes."""
    heartbeat.begin("verifying the data")
    if stop_requested():
        raise Interrupted("Stopped before training began, as requested.")


def run_loop(config: RunConfig, facts: RunFacts, choice: DeviceChoice, dataset: Dataset, folder: RunFolder,
             training: Training, device_memory: DeviceMemoryPlan, trackers: Sequence[Tracker],
             stop_requested: Callable[[], bool], heartbeat: Heartbeat | None = None) -> None:
    """Rehearses if that is due, then trains; reports forecast against measured memory however it ends."""
    if training.ranks.must_stop():  # while torch was loading
        raise Interrupted("Stopped before training began, as requested.")
    peaks = Peaks(training.device)
    started = {"kind": "run", **asdict(facts), "memory": asdict(read_memory(facts.device))}
    peaks.add(started)
    splits = evaluation_splits(dataset, ("train", "val"), windows=config.eval_iters * config.batch_size,
                               block=config.eval_block, seed=config.seed)
    display = open_display(facts, terminal=sys.stdout.isatty())
    reporter = TrainingReporter(config, facts, splits, dataset.summary, folder, training, display, trackers,
                                stop_requested, peaks, device_memory.plan.budget.usable if device_memory.plan else 0,
                                heartbeat)
    guard = Guard(training, config, choice, dataset, folder, reporter, device_memory)
    try:
        folder.append_metrics(started)
        if device_memory.plan:
            folder.append_metrics(plan_row(device_memory.plan, device_memory.ladder()))
            display.note(memory_plan(device_memory.plan))
        guard.fit_free_memory()
        rehearses = config.rehearse if config.rehearse != "auto" else device_memory.plan is not None
        if rehearses and (training.step < config.max_iters or config.eval_only):
            rehearse_under_guard(guard, reporter, training, display, device_memory)
            if training.ranks.must_stop():
                raise Interrupted("Stopped before training began, as requested.")
        if device_memory.plan and training.step < config.max_iters and not is_evaluation_due(training, config):
            # The forecast assumes that an evaluation runs first: in another order of allocations a run that just fits
            # may need some MiB more. So a resumed run begins with a short one.
            evaluation = reporter.short_eval()
            if evaluation is not None:
                peaks.seen("first_eval", evaluation.memory)
        train(training, config, facts, guard, reporter, stop_requested)
        if choice.card and guard.config == config and config.ranks == 1 and (speed := reporter.tokens_per_s()):
            measured_speeds.add(choice.card.name, replace(config, compile=choice.compile), speed,
                                facts.versions["torch"], "train")
    finally:
        guard.close()
        for tracker in trackers:
            tracker.close()
            if problem := tracker.problem():
                display.note(problem)
        display.close()
        if device_memory.plan and "train" in peaks.of:
            measured = peaks.since_start()
            say(plan_vs_measured(phases_of(device_memory.plan.forecast), measured))
            with suppress(SystemFault):  # such as a full disk: it must not hide why the run ended
                folder.append_metrics({"kind": "plan_measured", "phases": phases_to_json(measured)})


def rehearse_under_guard(guard: Guard, reporter: TrainingReporter, training: Training, display: Display,
                         device_memory: DeviceMemoryPlan) -> None:
    """Rehearses before the first step: what would be out of memory hours later is out of memory now."""
    started, requested = time.perf_counter(), guard.config
    reporter.heartbeat.begin("the rehearsal")
    done = guard.protected(
        lambda: rehearse(training, guard.config, guard.batches, reporter.short_eval, reporter.peaks))
    if isinstance(done, DeviceError):
        raise done
    seconds, measured = show_seconds(time.perf_counter() - started), reporter.peaks.since_start()
    reporter.tell({"kind": "rehearsal", "step": training.step, "phases": phases_to_json(measured),
                   "outside_bytes": device_memory.outside(), "text":
                   f"rehearsed in {seconds}: evaluation, two iterations and a checkpoint's copies, at full size."})
    if device_memory.plan and guard.config == requested:
        display.note(plan_vs_measured(phases_of(device_memory.plan.forecast), measured))


def rehearse_only(config_dict: Mapping[str, Any], notes: Sequence[str], others: Mapping[str, int], out: str) -> None:
    """`fitgpt rehearse`: rehearses a run without training it, and compares its memory with the forecast.

    Prints the measured memory and writes it to `out`. DoesNotFit if it exceeds the forecast or runs out.
    """
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
        training, config, lambda short: training_batches(short, dataset, training.device),
        lambda: short_eval(training, splits, config.eval_batch, config.eval_block,
                           lambda batch, why: failures.append(f"evaluation: {why.short}.")), peaks))
    if isinstance(done, OutOfMemory):
        failures.append(f"training: {done.short}.")
    seconds, measured = time.perf_counter() - started, peaks.since_start()
    forecast = phases_of(device_memory.plan.forecast) if device_memory.plan else {}
    exceeded = over_forecast(forecast, measured)
    where = "Nothing was measured, so no file was written."
    if measured or failures:
        wrote = write_over(Path(out), json.dumps({
            "schema": REHEARSAL_SCHEMA, "versions": versions(), "device": choice.device, "device_name": choice.name,
            "seconds": seconds, "config": config.to_dict(), "forecast": phases_to_json(forecast),
            "measured": phases_to_json(measured), "over_forecast": exceeded, "out_of_memory": failures,
        }, indent=1, ensure_ascii=False) + "\n")
        where = f"The measurements are in {wrote}."
    say(plan_vs_measured(forecast, measured) if device_memory.plan else NOT_COMPARED)
    say(f"rehearsed in {show_seconds(seconds)}: evaluation, two iterations and a checkpoint's copies, at full size. "
        f"{where}")
    if failures:
        raise DoesNotFit(f"Out of memory in the rehearsal. {' '.join(failures)}",
                         "`fitgpt plan` with the same options and --options shows what each change would save.")
    if exceeded:
        raise DoesNotFit(f"More memory was used than forecast. {' '.join(exceeded)}",
                         "Please report it, with the file: forecasts are meant to be exact to 1 %.")


def gather_facts(config: RunConfig, choice: DeviceChoice, dataset: Dataset, start_step: int, ranks: Ranks,
                 notes: Sequence[str]) -> RunFacts:
    flops, source = peak_flops(choice.card, choice.dtype)
    of_ranks = ranks.all_gather_object({"host": platform.node(), "pid": os.getpid(), "device": choice.device,
                               "device_name": choice.name})
    return RunFacts(
        config=config.to_dict(), params=config.gpt_config().count_params(), device=choice.device,
        device_name=choice.name, dtype=choice.dtype, compiled=choice.compile,
        peak_flops=flops * ranks.world if flops else flops, peak_source=source,
        ranks=tuple(RankFacts(**each) for each in of_ranks) if ranks.world > 1 else (),
        tokens_per_step=config.tokens_per_step, train_tokens=dataset.summary.train_tokens,
        val_tokens=dataset.summary.val_tokens, start_step=start_step, max_iters=config.max_iters,
        versions=versions(), notes=tuple(notes), tokenizer=dataset.summary.tokenizer)


def versions() -> dict[str, str]:
    return {"fitgpt": __version__, "torch": torch.__version__, "python": platform.python_version(),
            "cuda": torch.version.cuda or "none"}
