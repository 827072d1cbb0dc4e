"""Rows and folders of runs, and a frame with everything that watch can show."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fitgpt.core.units import GiB, MiB
from fitgpt.hardware.nvidia import GpuProcess, GpuState
from fitgpt.runs.folder import lock_owner
from fitgpt.runs.metrics import MemoryReading
from fitgpt.runs.watch import FollowedRun, MemoryHistory, PhaseRow, RunProgress, RunState, Spike, WatchFrame
from fitgpt.show.watch_text import frame_lines

FACTS = {"kind": "run", "config": {"eval_interval": 100, "always_save_checkpoint": True}, "device": "cuda:0",
         "device_name": "NVIDIA H200", "start_step": 0, "max_iters": 1000}
CARD = GpuState(0, "NVIDIA GeForce RTX 4070", 9 * GiB, 2 * GiB, 12 * GiB, 97, 187.4, 200.0, 71, 2475, 2550,
                ("power limit",), (GpuProcess(7, "python", 8 * GiB, "run"),
                                   GpuProcess(5, "Xorg", 300 * MiB, "desktop"),
                                   GpuProcess(6, "chrome", 200 * MiB, "app"), GpuProcess(9, "ollama", None)))
RUN = RunState("runs/a", "running", "process 7", 3.0, "NVIDIA GeForce RTX 4070", "eval", 1240, 9536, 3.8123, 3.9,
               41234.0, 0.412, 18720.0, MemoryReading(7 * GiB, 8 * GiB, 7 * GiB, 8 * GiB), 9 * GiB, 2 * GiB,
               (Spike("eval", 1000, 3 * GiB, 8 * GiB), Spike("train", 1100, GiB, 2 * GiB, "chrome")), "a warning", "",
               tuple((step, 4 - step / 100) for step in range(50)), 8 * GiB,
               (PhaseRow("load", GiB, GiB, GiB, GiB), PhaseRow("train", 7 * GiB, 8 * GiB, 7 * GiB, 9 * GiB),
                PhaseRow("eval", None, None, 6 * GiB, 9 * GiB)))
FRAME = WatchFrame(0.0, (CARD,), "", RUN, MemoryHistory(tuple([5 * GiB] * 20 + [8 * GiB] * 20), ((20, "eval"),)))


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 3.5, "seconds": 0.5, "tokens_per_s": 1000.0, "mfu": 0.4,
            "seconds_left": 60.0, **changes}


def memory(reserved: int) -> dict[str, int]:
    return {"allocated": reserved, "reserved": reserved, "peak_allocated": reserved, "peak_reserved": reserved}


def evaluation(number: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "losses": [{"split": "train", "mean": 3.0}, {"split": "val", "mean": 3.25}],
            **changes}


def write_run(folder: Path, *rows: Any, lock: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    if lock is not None:
        (folder / "lock").write_text(json.dumps(lock), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def state_of(folder: Path) -> RunState:
    return FollowedRun(folder).state(lock_owner(folder), time.time())


def text_of(frame: WatchFrame, width: int = 200) -> str:
    return "\n".join(line.text for line in frame_lines(frame, width))


def progress_after(*rows: dict[str, Any]) -> RunProgress:
    progress = RunProgress()
    for row in (FACTS, *rows):
        progress.add(row)
    return progress
