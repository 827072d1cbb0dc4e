"""`fitgpt report`: run folders in, one HTML page out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.command_options import ReportOptions
from ..config.fields import option_specs
from ..config.run_config import RunConfig, resolve_run
from ..core.errors import FitError, UsageError
from ..core.files import check_overwrite, disk_faults, is_own_page, write_atomically
from ..core.units import show_bytes
from ..hardware import gpus
from ..memory.platform import DEFAULT_TORCH
from ..memory.timeline import OwnerTimeline
from ..planning.budget import platform_for
from ..planning.forecast import one_step, replay_run
from ..runs.metrics import RunFacts
from ..runs.record import RunRecord, read_run
from ..show.report_page import MAX_RUNS, report_page


def report(options: ReportOptions) -> int:
    if len(options.runs) > MAX_RUNS:
        raise UsageError(f"`fitgpt report` shows at most {MAX_RUNS} runs together, and got {len(options.runs)}.",
                         f"fitgpt report {' '.join(options.runs[:MAX_RUNS])}")
    target = Path(options.out)
    with disk_faults("look at", target):
        if not target.parent.is_dir():
            raise UsageError(f"-o {target}: the folder {target.parent} does not exist.", "-o report.html")
    check_overwrite(target, is_own_page, "report", "-o")
    records = [with_timeline(read_run(folder, name))
               for folder, name in zip(options.runs, run_names(options.runs), strict=True)]
    page = report_page(records, f"fitgpt {__version__}")
    write_atomically(target, page)
    print(f"{target}: {show_bytes(len(page.encode()))}, one file that opens in any browser.")
    return 0


def run_names(folders: Sequence[str]) -> list[str]:
    """The folders' own names, with as many parents as make them different."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UsageError("The same run folder is named twice.", f"fitgpt report {folders[0]}")
    lengths = range(1, max((len(path.parts) for path in paths), default=1) + 1)
    names = ([str(Path(*path.parts[-length:])) for path in paths] for length in lengths)
    return next(each for each in names if len(set(each)) == len(each))


def with_timeline(record: RunRecord) -> RunRecord:
    return replace(record, timeline=planned_step(record.facts, record.config) if record.facts else None)


def planned_step(facts: RunFacts, config: Mapping[str, Any]) -> OwnerTimeline | None:
    """One step of the config's tape on the run's GPU; None where that GPU is not in the table."""
    card = gpus.match_device(facts.device_name) if facts.device.startswith("cuda") else None
    if card is None or card.vendor != "nvidia":
        return None
    try:
        run = RunConfig.from_dict({key: value for key, value in config.items() if key in option_specs(RunConfig)})
    except FitError:
        return None
    version = re.match(r"\d{1,3}\.\d{1,3}", facts.versions.get("torch", ""))
    platform = platform_for(card, torch=version[0] if version else DEFAULT_TORCH)
    return one_step(replay_run(resolve_run(run, platform), platform))
