"""A frame of `fitgpt watch`: the run and its GPU."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fitgpt.core.units import GiB, MiB
from fitgpt.hardware.nvidia import GpuProcess, GpuState
from fitgpt.runs import watch
from fitgpt.runs.folder import LockOwner, open_run
from fitgpt.runs.metrics import facts_from
from fitgpt.runs.watch import MemoryHistory, Spike
from tests.fake_nvml import CountingNvml
from tests.watch_frames import FACTS, evaluation, memory, progress_after, step


def test_the_gpu_is_the_one_with_the_runs_process(nvml: CountingNvml, tmp_path: Path) -> None:
    cards = (GpuState(0, "A"), GpuState(1, "A", programs=(GpuProcess(7, "python", GiB),)), GpuState(2, "B"))
    here = socket.gethostname()

    def chosen(facts: dict[str, Any], pid: int) -> int | None:
        card, _ = watch.gpu_of_run(facts_from(facts), LockOwner(pid, here, 0.0, True), cards, "")
        return card.index if card else None

    assert chosen({"device": "cuda:0", "device_name": "A"}, 7) == 1   # CUDA_VISIBLE_DEVICES renumbers
    assert chosen({"device": "cuda:1", "device_name": "A"}, 99) == 1  # the driver shows no processes
    assert chosen({"device": "cuda:0", "device_name": "B"}, 99) == 2
    assert chosen({"device": "cuda:0", "device_name": "C"}, 99) is None
    assert chosen({"device": "cpu"}, 7) is None


def test_headroom_is_the_free_memory_of_the_gpu(nvml: CountingNvml, tmp_path: Path) -> None:
    with open_run(tmp_path, {}, resume=False) as run:
        run.append_metrics(FACTS)
        frame = watch.Watcher(str(tmp_path)).read()
        assert frame.cards[0].index == 0
        assert frame.run is not None
        assert frame.run.headroom_bytes == 60 * MiB


def test_the_peaks_are_those_since_the_start_by_phase() -> None:
    """Each evaluation resets torch's counters, so that the last reading alone says little."""
    plan = {"kind": "plan", "phases": {"train": {"allocated_bytes": 3, "reserved_bytes": 30}}}
    progress = progress_after(
        step(0, memory=memory(99)), {**FACTS, "memory": memory(1)}, plan, evaluation(0, memory=memory(2)),
        step(0, memory=memory(4)), step(1, memory=memory(6)), step(2, memory=memory(5)),
        evaluation(3, memory=memory(3)), {"kind": "save", "step": 3, "memory": memory(2)}, step(3, memory=memory(4)))
    # Reserved is the maximum up to and with each phase, as in a plan.
    assert [(peak.phase, peak.allocated, peak.reserved, peak.planned_reserved) for peak in progress.phase_peaks()] == [
        ("load", 1, 1, None), ("first_eval", 2, 2, None), ("first_train", 4, 4, None), ("train", 6, 6, 30),
        ("eval", 3, 6, None), ("save", 2, 6, None)]
    assert progress.highest_reserved == 6


def test_a_rehearsal_counts_as_part_of_the_run() -> None:
    phases = {"train": {"allocated_bytes": 8, "reserved_bytes": 9}}
    progress = progress_after({"kind": "rehearsal", "step": 0, "phases": phases}, step(0, memory=memory(4)))
    assert progress.highest_reserved == 9


def test_a_spike_of_another_program_has_its_name_and_the_runs_phase() -> None:
    def sample(phase: str, mine: int, theirs: int) -> watch.GpuSample:
        programs = (GpuProcess(7, "python", mine, "run"), GpuProcess(6, "chrome", theirs, "app"))
        return watch.GpuSample(mine + theirs, phase, 50, 7, programs)

    samples = [sample("train", GiB, GiB), sample("train", 4 * GiB, GiB), sample("eval", 4 * GiB, 2 * GiB)]
    assert watch.spikes_of_others(samples) == (Spike("eval", 50, GiB, 2 * GiB, "chrome"),)


def test_from_the_second_frame_on_the_history_is_the_gpus_memory(nvml: CountingNvml,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = watch.Watcher("0")
    watcher.read()
    used = SimpleNamespace(total=900 * MiB, free=500 * MiB, used=300 * MiB, reserved=10 * MiB)
    monkeypatch.setattr(CountingNvml, "nvmlDeviceGetMemoryInfo", lambda *_, **__: used)
    assert watcher.read().history == MemoryHistory((30 * MiB, 300 * MiB), ((1, ""),))
