"""`fitgpt rehearse`: what a run really holds of the card, phase by phase, beside what was foreseen, without training.

`rehearse` settles what can be settled without torch; `rehearse_here` runs in a process of its own, as training does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..config.fields import Assignment, knob, knobs_of, path_like
from ..config.run_config import RunConfig
from ..core.errors import DoesNotFit
from ..core.files import disk_faults, is_own_json, refuse_foreign, write_over
from ..hardware.nvidia import check_allocator_env
from ..planning.plan_file import in_bytes
from ..planning.resolve import settle, with_data
from ..runs.plan_vs_measured import exceeding, phases_of, since_the_start
from ..training import memory_check
from ..training.supervisor import Orders, conclude, run_child

SCHEMA = 1
NO_COUNTERS = ("There is no plan to compare with: what is planned is the memory of an NVIDIA GPU, and only there does "
               "PyTorch count it.")


@dataclass(frozen=True)
class RehearseOptions(RunConfig):
    """Everything that `train` takes, and where the result goes."""

    verb: ClassVar[str] = "rehearse"

    out: str = knob("rehearsal.json", "the file to write", group="the rehearsal", short="o", rule=path_like)


def rehearse(assignments: Sequence[Assignment]) -> int:
    check_allocator_env(os.environ)
    config, notes = settle([each for each in assignments if each.key in knobs_of(RunConfig)])
    out = {each.key: each.value for each in assignments}.get("out", RehearseOptions.out)
    refuse_foreign(Path(str(out)), lambda text: is_own_json(text, "foreseen", "measured"), "rehearse", "-o")
    with disk_faults("make the folder of", Path(str(out))):  # before minutes of work that would have nowhere to go
        Path(str(out)).parent.mkdir(parents=True, exist_ok=True)
    checked = memory_check.check(config)
    config = replace(with_data(config)[0], init_from="scratch", plan="")  # of the weights only the shape matters
    code, words = run_child(Orders(config.to_dict(), notes, others=checked.others, rehearsal=str(out)))
    return conclude(code, words, config)


def rehearse_here(config_dict: Mapping[str, Any], notes: Sequence[str], others: Mapping[str, int], out: str) -> None:
    """Prints what was measured and writes it down. DoesNotFit where a phase held more than was foreseen."""
    from ..core.units import show_seconds
    from ..data.shards import open_dataset
    from ..engine import oom
    from ..engine.device import read_memory, resolve_device
    from ..show.live import say
    from ..show.text import memory_plan, plan_beside_measured
    from ..training import dry_run
    from ..training import run as parts
    from ..training.device_plan import board
    from ..training.ranks import Ranks
    from ..training.reporter import glance

    config = RunConfig.from_dict(config_dict)
    dataset = open_dataset(config.dataset)
    choice = resolve_device(config.device, config.dtype, config.compile)
    config = replace(parts.take_shape(config, None, dataset)[0], dtype=choice.dtype)
    parts.check_data(config, dataset, None)
    onboard = board(config, choice, others)
    for note in (*notes, *choice.notes):
        say(f"note    {note}")
    if onboard.plan:
        say(memory_plan(onboard.plan))

    started, refused = time.perf_counter(), list[str]()
    training = parts.build_training(config, choice)
    peaks = dry_run.Peaks(training.device)
    peaks.seen("load", read_memory(choice.device))
    splits = parts.evaluation_splits(dataset, ("train", "val"), windows=config.eval_iters * config.batch_size,
                                     block=config.eval_block, seed=config.seed)
    done = oom.attempt(lambda: dry_run.rehearse(
        training, config, lambda short: parts.training_feed(short, dataset, training.device, Ranks()),
        lambda: glance(training, splits, config.eval_batch, config.eval_block,
                       lambda batch, why: refused.append(f"evaluation: {why.short}.")), peaks))
    if isinstance(done, oom.Refusal):
        refused.append(f"training: {done.short}.")
    seconds, measured = time.perf_counter() - started, since_the_start(peaks.of)
    foreseen = phases_of(onboard.plan.forecast) if onboard.plan else {}
    beyond = exceeding(foreseen, measured)
    wrote = write_over(Path(out), json.dumps({
        "schema": SCHEMA, "versions": parts.versions(), "device": choice.device, "device_name": choice.name,
        "seconds": seconds, "config": config.to_dict(), "foreseen": in_bytes(foreseen),
        "measured": in_bytes(measured), "exceeding": beyond, "out_of_memory": refused,
    }, indent=1, ensure_ascii=False) + "\n")
    say(plan_beside_measured(foreseen, measured) if onboard.plan else NO_COUNTERS)
    say(f"rehearsed in {show_seconds(seconds)}: evaluation, two iterations and a checkpoint's copy, at full size. "
        f"The figures are in {wrote}.")
    _judge(refused, beyond)


def _judge(refused: Sequence[str], beyond: Sequence[str]) -> None:
    if refused:
        raise DoesNotFit(f"Memory ran out in the rehearsal. {' '.join(refused)}",
                         "`fitgpt plan` with the same words and --options shows what each change would save.")
    if beyond:
        raise DoesNotFit(f"More was held than was foreseen. {' '.join(beyond)}",
                         "Please report it, with the file: forecasts are meant to hold to 1 %.")
