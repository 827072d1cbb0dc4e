"""Every counter of a GPU, whichever the driver lacks, and the processes on it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from fitgpt.core.units import MiB
from fitgpt.hardware import nvidia
from fitgpt.hardware.nvidia import GpuProcess, GpuState
from fitgpt.runs.watch import MemoryHistory, WatchFrame
from tests.fake_nvml import CountingNvml
from tests.watch_frames import text_of


def test_every_counter_is_read(nvml: CountingNvml) -> None:
    (gpu, _), reason = nvidia.read_gpus()
    assert (gpu.utilisation, gpu.watts, gpu.watt_limit, gpu.celsius) == (97, 187.4, 200.0, 71)
    assert (gpu.clock_mhz, gpu.top_clock_mhz, gpu.throttled) == (2475, 2550, ("power limit", "heat"))
    assert (gpu.used_bytes, gpu.free_bytes, gpu.total_bytes) == (30 * MiB, 60 * MiB, 100 * MiB)
    assert [(one.pid, one.nbytes) for one in gpu.programs] == [(7, 20 * MiB), (5, 2 * MiB), (8, None)]
    assert reason == ""
    assert not nvml.is_open


def test_a_missing_counter_is_shown_as_na(nvml: CountingNvml) -> None:
    _, silent = nvidia.read_gpus()[0]
    assert silent == GpuState(1, "NVIDIA GeForce RTX 4070")
    text = text_of(WatchFrame(0.0, (silent,), "", None, MemoryHistory()))
    assert "utilisation n/a  power n/a  n/a  clock n/a" in text
    assert re.search(r"throttled +n/a", text)
    assert "n/a of n/a" in text


def test_an_nvml_without_one_function_lacks_only_that_counter(nvml: CountingNvml,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CountingNvml, "nvmlDeviceGetPowerUsage")
    gpu = nvidia.read_gpus()[0][0]
    assert (gpu.watts, gpu.celsius) == (None, 71)


def test_drivers_before_535_give_throttle_reasons_by_another_name(nvml: CountingNvml,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CountingNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(CountingNvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda self, handle: 0x40,
                        raising=False)
    assert nvidia.read_gpus()[0][0].throttled == ("heat (hardware)",)


@pytest.mark.parametrize(("bits", "reasons"), [(0, ()), (0x1, ()), (0x5, ("power limit",)), (None, None),
                                               (0x1000, ("reason 0x1000",))])
def test_idle_is_no_throttle_reason_and_unknown_bits_are_shown(bits: Any, reasons: Any) -> None:
    assert nvidia.throttle_reasons(bits) == reasons


def test_gpus_hidden_by_cuda_visible_devices_are_read_too(nvml: CountingNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert [gpu.index for gpu in nvidia.read_gpus()[0]] == [0, 1]


@pytest.mark.parametrize(("command", "name", "kind"), [
    ("/usr/lib/xorg/Xorg", "Xorg", "desktop"), ("/usr/bin/gnome-shell", "gnome-shell", "desktop"),
    ("/opt/google/chrome/chrome --type=gpu-process --no-sandbox", "chrome", "app"),
    (r"C:\Windows\System32\dwm.exe", "dwm.exe", "desktop"),
    (r"C:\Program Files\Mozilla\firefox.exe", "firefox.exe", "app"),
    ("python train.py", "python train.py", "other"), ("/usr/bin/python3.11", "python3.11", "other"),
    ("", "", "other"),
])
def test_program_names_are_shortened_and_desktop_programs_recognised(command: str, name: str, kind: str) -> None:
    assert nvidia.program_name(command) == name
    assert nvidia.kind_of(name) == kind


def test_a_size_larger_than_the_gpu_is_unknown() -> None:
    found = nvidia.identified([(1, "a", 2**64 - 1), (2, "b", 5)], 100)
    assert found == (GpuProcess(2, "b", 5), GpuProcess(1, "a", None))


def test_a_process_without_name_is_shown_by_its_pid() -> None:
    assert nvidia.identified([(2**30, "", 5)], None)[0].name == f"process {2**30}"
    assert nvidia.identified([(os.getpid(), "", 5)], None)[0].name != ""
