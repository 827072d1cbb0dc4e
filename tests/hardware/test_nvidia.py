"""GPUs by NVML, and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fitgpt.core.errors import DeviceError
from fitgpt.core.units import MiB
from fitgpt.hardware import nvidia
from fitgpt.hardware.nvidia import GpuProcess, GpuReading, Survey
from tests.fake_nvml import TWO, FakeNvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_every_figure_of_a_gpu_and_its_processes_are_read(nvml: FakeNvml) -> None:
    first = nvidia.survey({}).gpus[0]
    assert replace(first, processes=()) == GpuReading(
        0, "NVIDIA H200", "GPU-aaaa-1", "9.0", "580.65.06", 100 * MiB, 60 * MiB, 30 * MiB, 10 * MiB)
    assert first.processes[:2] == (GpuProcess(7, "python", 20 * MiB), GpuProcess(5, "python", 2 * MiB))
    assert (first.processes[2].pid, first.processes[2].nbytes) == (8, None)
    assert first.usable_bytes == 90 * MiB
    assert not nvml.is_open


def test_a_gpu_that_reports_little_is_still_listed(nvml: FakeNvml) -> None:
    second = nvidia.survey({}).gpus[1]
    assert (second.name, second.cc, second.total_bytes, second.processes) == ("NVIDIA GeForce RTX 4070", None, None, ())
    assert second.usable_bytes is None


@pytest.mark.parametrize(("code", "faulty"), [(12, False), (9, False), (18, True), (999, True)])
def test_no_driver_and_a_broken_driver_are_different(monkeypatch: pytest.MonkeyPatch, code: int,
                                                     faulty: bool) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=code))
    survey = nvidia.survey({"CUDA_VISIBLE_DEVICES": "0"})
    assert survey.gpus == ()
    assert survey.faulty is faulty
    assert ("driver reports: NVML error" in survey.reason) is faulty


def test_without_nvidia_ml_py_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia.survey({}) == Survey(reason="nvidia-ml-py is not installed")
    assert nvidia.read_gpus() == ((), "nvidia-ml-py is not installed")


@pytest.mark.parametrize(("chosen", "left"), [
    (None, [0, 1]), ("", []), ("-1", []), ("NoDevFiles", []), ("1", [1]), ("1,0", [1, 0]), (" 0 , 1 ", [0, 1]),
    ("GPU-aabb-2", [1]), ("GPU-aab", [1]), ("MIG-whatever", [0, 1]),
])
def test_cuda_visible_devices_selects_gpus(chosen: str | None, left: list[int]) -> None:
    assert [gpu.index for gpu in nvidia.visible(TWO, chosen)] == left


@pytest.mark.parametrize("chosen", ["7", "0,7", "0,0", "GPU-zz", "GPU-aa", "first", "0;1", "0,-1"])
def test_a_visible_device_that_does_not_exist_is_an_error_with_the_value(chosen: str) -> None:
    with pytest.raises(DeviceError) as raised:
        nvidia.visible(TWO, chosen)
    assert raised.value.exit_code == 5
    assert f"CUDA_VISIBLE_DEVICES={chosen!r}" in raised.value.what
    assert "NVIDIA GeForce RTX 4070" in raised.value.what
    assert "unset CUDA_VISIBLE_DEVICES" in raised.value.fix


def test_hidden_gpus_are_listed(nvml: FakeNvml) -> None:
    survey = nvidia.survey({"CUDA_VISIBLE_DEVICES": "1"})
    assert ([gpu.index for gpu in survey.gpus], [gpu.index for gpu in survey.hidden]) == ([1], [0])


def test_reading_the_driver_loads_no_torch() -> None:
    script = ("import sys\nfrom fitgpt.hardware import gpus, nvidia\nnvidia.survey({}).gpus\ngpus.load()\n"
              "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
