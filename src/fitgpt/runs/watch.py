"""Watcher: reads a run's folder and the GPU driver again and again. → WatchFrame, what both show at one moment."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import DeviceError, UsageError
from ..hardware.nvidia import GpuProcess, GpuState, read_gpus
from .lock import LockOwner, is_running, lock_owner
from .metrics import RunFacts, spell_nonfinite
from .record import (
    MAX_SPIKES,
    FollowedRun,
    MemoryHistory,
    RunState,
    Spike,
    has_ended,
    is_run,
    is_spike,
    runs_near,
)

SCHEMA = 1
MAX_SAMPLES = 600  # of a GPU's memory: ten minutes at one per second


@dataclass(frozen=True)
class WatchFrame:
    """What `fitgpt watch` shows at one moment."""

    at: float                        # seconds since 1970
    cards: tuple[GpuState, ...]
    no_card: str                     # why there is none
    run: RunState | None
    history: MemoryHistory           # of the GPU's memory since watching began, or of what the run reserved

    def to_json(self) -> dict[str, Any]:
        """For scripts, without the curves. NaN and infinity are strings, as in metrics.jsonl: JSON has neither."""
        document = {"schema": SCHEMA, **asdict(self)}
        del document["history"]
        if document["run"] is not None:
            del document["run"]["losses"]
            document["run"] = spell_nonfinite(document["run"])
        return document


class Watcher:
    """Watches one run, or the GPUs. Without a target: the newest run that is running, as soon as there is one."""

    def __init__(self, target: str) -> None:
        self._gpu = gpu_number(target)
        self._run = FollowedRun(named_run(target)) if target and self._gpu is None else None
        self._finds_run = not target
        self._samples: deque[GpuSample] = deque(maxlen=MAX_SAMPLES)

    def read(self) -> WatchFrame:
        gpus, reason = read_gpus()
        if self._finds_run and self._run is None:
            self._run = find_run(gpus, reason)
        if self._run is not None:
            return self._read_run(self._run, gpus, reason)
        if self._gpu is not None:
            gpus = (numbered(gpus, self._gpu, reason),)
        self._add_sample(gpus, None, None)
        return WatchFrame(time.time(), gpus, reason, None, self._history())

    def _read_run(self, run: FollowedRun, gpus: tuple[GpuState, ...], reason: str) -> WatchFrame:
        now, owner = time.time(), lock_owner(run.folder)
        state = run.state(owner, now)
        gpu, no_gpu = gpu_of_run(run.progress.facts, owner, gpus, reason)
        if gpu is not None and owner is not None and is_running(owner):
            gpu = _with_run_marked(gpu, owner.pid)
        shown = (gpu,) if gpu else ()
        self._add_sample(shown, state, owner)
        state = replace(state, headroom_bytes=None if has_ended(state) else headroom(gpu, run),
                        spikes=(*state.spikes, *spikes_of_others(self._samples))[-MAX_SPIKES:])
        return WatchFrame(now, shown, no_gpu, state, self._history())

    def _add_sample(self, gpus: tuple[GpuState, ...], state: RunState | None, owner: LockOwner | None) -> None:
        if gpus and gpus[0].used_bytes is not None:
            self._samples.append(GpuSample(gpus[0].used_bytes, (state and state.phase) or "",
                                           state.step if state else 0, owner.pid if owner else 0, gpus[0].programs))

    def _history(self) -> MemoryHistory:
        """The GPU's memory since watching began; in the first frame, what the run has reserved so far."""
        if len(self._samples) < 2 and self._run is not None:
            return self._run.progress.memory_history()
        used = [sample.used for sample in self._samples]
        marks = tuple((index, sample.phase) for index, sample in enumerate(self._samples)
                      if index and is_spike(used[index - 1], used[index]))
        return MemoryHistory(tuple(used), marks)


# ---- which run, which GPU

def gpu_number(target: str) -> int | None:
    """'0' or 'cuda:0', unless a folder has that name."""
    found = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})", target)
    return int(found[1]) if found and not Path(target).is_dir() else None


def numbered(gpus: tuple[GpuState, ...], number: int, reason: str) -> GpuState:
    for gpu in gpus:
        if gpu.index == number:
            return gpu
    listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus) or f"none, because {reason}"
    raise DeviceError(f"GPU {number} does not exist. GPUs that the driver lists: {listed}.",
                      "fitgpt watch RUN reads a run's folder, and needs no GPU.")


def named_run(target: str) -> Path:
    folder = Path(target)
    if is_run(folder):
        return folder
    near = ", ".join(str(found) for found in runs_near(Path())[:5])
    what = ("contains no run of fitgpt" if folder.is_dir() else "is not a folder" if folder.exists()
            else "does not exist")
    raise UsageError(f"{target} {what}." + (f" Runs near here: {near}." if near else ""),
                     "fitgpt watch RUN, where RUN is the --out_dir of a run; or fitgpt watch 0, for GPU 0")


def find_run(gpus: tuple[GpuState, ...], reason: str) -> FollowedRun | None:
    """The newest run that is running; where there is no GPU to watch either, the newest of all."""
    folders = runs_near(Path())
    running = [folder for folder in folders if is_running(lock_owner(folder))]
    if not (running or gpus or folders):
        raise UsageError(f"There is nothing to watch: no run is in this folder or in runs/, and {reason}.",
                         "Name the run's folder: fitgpt watch RUN")
    found = running or ([] if gpus else folders)
    return FollowedRun(found[0]) if found else None


def gpu_of_run(facts: RunFacts | None, owner: LockOwner | None, gpus: tuple[GpuState, ...],
               reason: str) -> tuple[GpuState | None, str]:
    """The GPU of the run: by its process, else by the name and number that it recorded; or why there is none."""
    if owner is not None and not owner.here:
        return None, f"the run is on {owner.host}, not on this machine"
    device, name = (facts.device, facts.device_name) if facts else ("", "")
    if device in ("cpu", "mps"):
        return None, f"the run trains on {'the CPU' if device == 'cpu' else 'the GPU of a Mac'}"
    if not gpus:
        return None, reason
    number = int(device[5:]) if re.fullmatch(r"cuda:[0-9]{1,4}", device) else 0
    by_process = [gpu for gpu in gpus if owner and any(one.pid == owner.pid for one in gpu.programs)]
    by_name = [gpu for gpu in gpus if name in (gpu.name, "")]
    found = by_process or sorted(by_name, key=lambda gpu: gpu.index != number)
    return (found[0], "") if found else (None, f"the run was on {name}, which is not in this machine")


def _with_run_marked(gpu: GpuState, pid: int) -> GpuState:
    return replace(gpu, programs=tuple(replace(one, kind="run") if one.pid == pid else one for one in gpu.programs))


def headroom(gpu: GpuState | None, run: FollowedRun) -> int | None:
    """What the run can still allocate: free memory of its GPU, else what the plan leaves above its highest so far."""
    if gpu is not None and gpu.free_bytes is not None:
        return gpu.free_bytes
    limit, highest = run.progress.reserve_limit, run.progress.highest_reserved
    return None if limit is None or highest is None else limit - highest


# ---- spikes of other programs

@dataclass(frozen=True)
class GpuSample:
    """A GPU's memory at one moment, and the phase of the run."""

    used: int
    phase: str
    step: int
    run_pid: int
    programs: tuple[GpuProcess, ...]


def spikes_of_others(samples: Iterable[GpuSample]) -> tuple[Spike, ...]:
    """Rises of programs other than the run, as the driver lists them; the run's own are in its metrics."""
    found: list[Spike] = []
    before: dict[int, int] | None = None
    for sample in samples:
        sizes = {program.pid: program.nbytes or 0 for program in sample.programs}
        for program in sample.programs if before is not None else ():
            earlier = before.get(program.pid, 0) if before else 0
            if program.pid != sample.run_pid and is_spike(earlier, sizes[program.pid]):
                found.append(Spike(sample.phase, sample.step, sizes[program.pid] - earlier, sizes[program.pid],
                                   program.name))
        before = sizes
    return tuple(found[-MAX_SPIKES:])
