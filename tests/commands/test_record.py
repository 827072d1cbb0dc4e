"""`fitgpt record`: without a GPU, interrupted and continued, and what it leaves behind. The GPU is simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands import record as command
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import MiB
from fitgpt.hardware import nvidia
from fitgpt.hardware.nvidia import GpuReading, Survey
from fitgpt.memory.platform import Platform
from fitgpt.planning import gpu_record, measured_speeds
from fitgpt.planning.gpu_record import GpuRun
from fitgpt.planning.record_check import TIMED, bytes_of_sum, cases
from tests.planning.test_record_check import simulated_run

ADA = Platform((8, 9), "2.11", sms=46)
READING = GpuReading(0, "NVIDIA GeForce RTX 4070", cc="8.9", driver_version="580.65.06", total_bytes=12282 * MiB,
                     reserved_bytes=482 * MiB, used_bytes=700 * MiB)


class SimulatedGpu:
    """Answers as training/recording.py would on an RTX 4070 on which the planner is right."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stop_at = ""   # the run during which Ctrl-C is pressed
        self.extra = 0      # bytes by which the planner is wrong

    def __call__(self, request: dict[str, Any], *, native: bool) -> dict[str, Any]:
        if "run" not in request:
            return {"name": READING.name, "cc": "8.9", "sms": 46, "threads": 1536, "l2_bytes": 36 * MiB,
                    "usable_bytes": 11800 * MiB, "workspace_bytes": ADA.workspace, "sum_bytes": bytes_of_sum(ADA),
                    "matmul_tflops": 52.0, "copy_gbs": 440.0, "torch": "2.11.0+cu130", "cuda": "13.0"}
        run = GpuRun(**request["run"])
        assert native == run.native
        if run.name == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(run.name)
        done = simulated_run(run, ADA)
        done.phases["train"]["reserved"] += self.extra
        return {"phases": done.phases, "attention": done.attention, "used_outside": 900 * MiB}


class SimulatedTiming:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> SimulatedTiming:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def time(self, config: RunConfig, cap: int) -> float:
        return 21_000.0


@pytest.fixture
def gpu(run_plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimulatedGpu:
    simulated = SimulatedGpu()
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((READING,)))
    monkeypatch.setattr(nvidia, "read_gpus", lambda: ((), ""))
    monkeypatch.setattr(command, "ask_child", simulated)
    monkeypatch.setattr(command, "TimingProcess", SimulatedTiming)
    return simulated


def test_without_a_gpu_it_is_one_sentence_and_exit_code_5(run_plan: Any) -> None:
    output = run_plan("-o", "gpu.json", command="record")
    assert output.code == 5
    assert output.err.startswith("fitgpt: There is no NVIDIA GPU here to record: ")
    assert "Traceback" not in output.err


def test_a_complete_record_is_used_for_plans_and_speeds_at_once(gpu: SimulatedGpu, run_plan: Any) -> None:
    output = run_plan("-o", "gpu.json", command="record")
    assert output.code == 0, output.err
    assert "156 of 156 figures to the byte" in output.out
    assert "measured on this machine" in output.out
    assert gpu.asked == [case.name for case in cases(ADA) if case.name not in TIMED]
    kept = gpu_record.own_records()
    assert [record.outside_mib for record in kept] == [200]
    assert kept[0].to_json() == Path("gpu.json").read_text(encoding="utf-8")
    assert {each.tokens_per_s for each in measured_speeds.load("RTX 4070")} == {21_000.0}
    assert len(measured_speeds.load("RTX 4070")) == len(TIMED)
    assert "measured on this machine" in " ".join(run_plan("--gpu", "4070").out.split())


def test_an_interrupted_record_is_continued_by_the_same_command(gpu: SimulatedGpu, run_plan: Any) -> None:
    gpu.stop_at = "float32"
    stopped = run_plan("-o", "gpu.json", command="record")
    assert stopped.code == 75
    assert "fitgpt record -o gpu.json continues" in stopped.err
    before, gpu.stop_at, gpu.asked = list(gpu.asked), "", []
    assert before
    assert gpu_record.own_records() == []
    assert run_plan("-o", "gpu.json", command="record").code == 0
    assert not set(before) & set(gpu.asked)
    assert len(gpu_record.own_records()[0].runs) == len(cases(ADA))


def test_a_record_that_is_not_explained_is_not_used(gpu: SimulatedGpu, run_plan: Any) -> None:
    gpu.extra = 2 * MiB
    output = run_plan("-o", "gpu.json", command="record")
    assert output.code == 3
    assert "train reserved: recorded" in output.out
    assert gpu_record.own_records() == []


def test_runs_that_need_more_than_is_free_are_skipped(gpu: SimulatedGpu, run_plan: Any) -> None:
    output = run_plan("-o", "gpu.json", "--leave=9GiB", command="record")
    assert "skipped: needs" in output.out
    runs = json.loads(Path("gpu.json").read_text(encoding="utf-8"))["runs"]
    assert {run["name"] for run in runs if run["why"]} >= {"timed 124M", "eager"}
    assert all(not run["phases"] for run in runs if run["why"])


def test_a_file_of_something_else_is_not_overwritten(gpu: SimulatedGpu, run_plan: Any) -> None:
    Path("gpu.json").write_text("[1]", encoding="utf-8")
    assert run_plan("-o", "gpu.json", command="record").code == 2
    assert Path("gpu.json").read_text(encoding="utf-8") == "[1]"
