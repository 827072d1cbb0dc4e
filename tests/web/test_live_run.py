"""The live tab: the run, its GPU, its memory, the other programs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fitgpt.core.units import GiB
from fitgpt.hardware.nvidia import GpuProcess, GpuState
from fitgpt.runs.metrics import MemoryReading
from fitgpt.runs.watch import MemoryHistory, RunState, WatchFrame
from fitgpt.web.live_run import LiveRun, live_document


def test_a_run_is_shown_with_its_gpu_memory_and_programs() -> None:
    run = RunState("runs/x", "running", "process 5", 1.0, "RTX 4070", "train", 10, 100, math.nan, 2.5, 5e4, 0.41, 60.0,
                   MemoryReading(GiB, 2 * GiB, GiB, 2 * GiB), 3 * GiB, GiB,
                   losses=((0, 3.0), (5, math.nan), (9, 2.0)))
    card = GpuState(0, "RTX 4070", 9 * GiB, 2 * GiB, 11 * GiB, 97, 180.0, 200.0, 71,
                    programs=(GpuProcess(5, "python", 8 * GiB, "run"), GpuProcess(6, "Xorg", GiB)))
    document = live_document(WatchFrame(0.0, (card,), "", run, MemoryHistory((GiB, 8 * GiB), ((1, "train"),))))
    tiles = {name: (figure, detail) for name, figure, detail in document["tiles"]}
    assert tiles["loss"] == ("nan", "validation 2.5000")
    assert tiles["reserved"] == ("2.00 GiB", "planned 3.00 GiB")
    assert tiles["RTX 4070"] == ("9.00 GiB of 11.00 GiB", "97 % busy, 71 °C, 180 W")
    assert [each["name"] for each in document["programs"]] == ["python", "Xorg"]
    assert "spike in train" in document["charts"]
    assert '"x":[0,5,9]' in document["charts"]  # each loss at its step
    assert json.dumps(document, allow_nan=False)


def test_without_a_run_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert LiveRun("").look()["run"] is None
    assert LiveRun("").look()["why"]
