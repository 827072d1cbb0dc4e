"""The driver is asked without torch, never brings the program down, and the environment is checked against it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fake_nvml import TWO, FakeNvml
from fitgpt.core.errors import DeviceError
from fitgpt.core.units import MiB
from fitgpt.hardware import nvidia
from fitgpt.hardware.nvidia import GpuProcess, GpuReading, Survey


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_a_card_is_read_whole_with_its_processes(nvml: FakeNvml) -> None:
    first = nvidia.gpus({})[0]
    assert first == GpuReading(
        0, "NVIDIA H200", "GPU-aaaa-1", "9.0", "580.65.06", 100 * MiB, 60 * MiB, 30 * MiB, 10 * MiB,
        (GpuProcess(5, "python", 2 * MiB), GpuProcess(7, "python", 20 * MiB), GpuProcess(8, None, None)))
    assert first.usable_bytes == 90 * MiB
    assert not nvml.is_open


def test_a_card_that_answers_little_is_still_listed(nvml: FakeNvml) -> None:
    second = nvidia.gpus({})[1]
    assert (second.name, second.cc, second.total_bytes, second.processes) == ("NVIDIA GeForce RTX 4070", None, None, ())
    assert second.usable_bytes is None


@pytest.mark.parametrize(("code", "faulty"), [(12, False), (9, False), (18, True), (999, True)])
def test_no_driver_is_told_from_a_driver_that_does_not_work(monkeypatch: pytest.MonkeyPatch, code: int,
                                                            faulty: bool) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=code))
    survey = nvidia.survey({"CUDA_VISIBLE_DEVICES": "0"})
    assert survey.gpus == ()
    assert survey.faulty is faulty
    assert ("driver answers: NVML error" in survey.reason) is faulty


def test_without_the_library_nvidia_smi_is_asked(no_nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "0, NVIDIA H200, GPU-aaaa-1, 580.65.06, 143771, 143167, 4, 9.0\n"
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", lambda *a, **k: SimpleNamespace(returncode=0, stdout=line))
    assert nvidia.gpus({}) == [GpuReading(0, "NVIDIA H200", "GPU-aaaa-1", "9.0", "580.65.06", 143771 * MiB,
                                          143167 * MiB, 4 * MiB)]


def test_an_old_nvidia_smi_is_asked_again_without_compute_cap(no_nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        known = "compute_cap" not in command[1]
        return SimpleNamespace(returncode=0 if known else 2, stdout="0, T4, GPU-1, 470.57, 15109, 15000, 109\n")
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", run)
    assert [(gpu.name, gpu.cc) for gpu in nvidia.gpus({})] == [("T4", None)]


def test_an_nvidia_smi_that_hangs_is_a_fault_with_a_reason(no_nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", run)
    assert nvidia.survey({}) == Survey(reason="nvidia-smi is installed and does not answer", faulty=True)


def test_with_neither_there_is_nothing_and_a_reason(no_nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert nvidia.gpus({}) == []
    assert "nvidia-smi" in nvidia.survey({}).reason


def test_unknown_cells_of_nvidia_smi_are_none_and_noise_is_left_out() -> None:
    answer = 'NVIDIA-SMI has noticed\n0, "Card, odd", [N/A], 550.1, [Not Supported], 5, [N/A], 8.9\n\n'
    assert nvidia.parse_smi(answer) == (
        GpuReading(0, "Card, odd", None, "8.9", "550.1", None, 5 * MiB, None),)


@pytest.mark.parametrize(("chosen", "left"), [
    (None, [0, 1]), ("", []), ("-1", []), ("NoDevFiles", []), ("1", [1]), ("1,0", [1, 0]), (" 0 , 1 ", [0, 1]),
    ("GPU-aabb-2", [1]), ("GPU-aab", [1]), ("MIG-whatever", [0, 1]),
])
def test_cuda_visible_devices_chooses(chosen: str | None, left: list[int]) -> None:
    assert [gpu.index for gpu in nvidia.visible(TWO, chosen)] == left


@pytest.mark.parametrize("chosen", ["7", "0,7", "0,0", "GPU-zz", "GPU-aa", "first", "0;1", "0,-1"])
def test_a_visible_device_that_is_not_there_is_refused_with_the_value(chosen: str) -> None:
    with pytest.raises(DeviceError) as refused:
        nvidia.visible(TWO, chosen)
    assert refused.value.exit_code == 5
    assert f"CUDA_VISIBLE_DEVICES={chosen!r}" in refused.value.what
    assert "NVIDIA GeForce RTX 4070" in refused.value.what
    assert "unset CUDA_VISIBLE_DEVICES" in refused.value.fix


def test_hidden_cards_are_remembered(nvml: FakeNvml) -> None:
    survey = nvidia.survey({"CUDA_VISIBLE_DEVICES": "1"})
    assert ([gpu.index for gpu in survey.gpus], [gpu.index for gpu in survey.hidden]) == ([1], [0])


@pytest.mark.parametrize("value", [
    "", "expandable_segments:True", "expandable_segments:True,", " max_split_size_mb : 128 ", "some_new_option:7",
    "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False", "backend:cudaMallocAsync",
    "garbage_collection_threshold:0.8", "pinned_num_register_threads:8",
])
def test_allocator_settings_torch_reads_are_let_through(value: str) -> None:
    nvidia.check_allocator_env({"PYTORCH_CUDA_ALLOC_CONF": value})


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(("value", "fault"), [
    ("expandable_segments", "has no value"), ("expandable_segments:", "has no value"), (":True", "has no name"),
    ("expandable_segments=True", "has no value"), ("expandable_segments:true", "True or False, not 'true'"),
    ("expandable_segments:True;max_split_size_mb:64", "True or False"), ("max_split_size_mb:abc", "whole number"),
    ("max_split_size_mb,backend:native", "'max_split_size_mb' has no value"),
    ("roundup_power2_divisions:[256:1", "not closed"), ("garbage_collection_threshold:1.5", "between 0 and 1"),
    ("expandable_segment:True", "'expandable_segments' is"),
])
def test_malformed_allocator_settings_are_refused_with_the_value(variable: str, value: str, fault: str) -> None:
    with pytest.raises(DeviceError) as refused:
        nvidia.check_allocator_env({variable: value})
    assert f"{variable}={value!r}" in refused.value.what
    assert fault in refused.value.what
    assert variable in refused.value.fix


@pytest.mark.parametrize("value", [
    "expandable_segments:True", " expandable_segments : True ,", "roundup_power2_divisions:[256:1,>:4]",
    "expandable_segments", "expandable_segments:", "expandable_segments:true", "max_split_size_mb:abc",
    "expandable_segments=True", "roundup_power2_divisions:[256:1", "garbage_collection_threshold:1.5",
])
def test_torch_itself_reads_what_we_let_through_and_refuses_what_we_refuse(value: str) -> None:
    apply = getattr(pytest.importorskip("torch")._C, "_accelerator_setAllocatorSettings", None)
    if apply is None:
        pytest.skip("this torch has no way to ask")
    try:
        theirs = raises_nothing(lambda: apply(value))
    finally:
        apply("")
    assert raises_nothing(lambda: nvidia.check_allocator_env({"PYTORCH_ALLOC_CONF": value})) is theirs


def raises_nothing(ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except (RuntimeError, ValueError, DeviceError):
        return False
    return True


def test_asking_the_driver_never_loads_torch() -> None:
    script = ("import sys\nfrom fitgpt.hardware import gpus, nvidia\nnvidia.gpus({})\ngpus.load()\n"
              "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
