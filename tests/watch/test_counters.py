"""The driver's counters: each by itself, whatever the driver leaves out, and whose programs are on a card."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from watched import words_of

from fake_nvml import CountingNvml
from fitgpt.core.units import MiB
from fitgpt.hardware import gpu_stats
from fitgpt.hardware.nvidia import GpuProcess
from fitgpt.sights import CardState, Program, Track, WatchFrame


def test_every_counter_of_a_card_is_read(nvml: CountingNvml) -> None:
    (card, _), reason = gpu_stats.read_cards()
    assert (card.utilisation, card.watts, card.watt_limit, card.celsius) == (97, 187.4, 200.0, 71)
    assert (card.clock_mhz, card.top_clock_mhz, card.throttled) == (2475, 2550, ("power limit", "heat"))
    assert (card.used_bytes, card.free_bytes, card.total_bytes) == (30 * MiB, 60 * MiB, 100 * MiB)
    assert [(one.pid, one.nbytes) for one in card.programs] == [(7, 20 * MiB), (5, 2 * MiB), (8, None)]
    assert reason == ""
    assert not nvml.is_open


def test_a_counter_the_driver_does_not_know_shows_as_na(nvml: CountingNvml) -> None:
    _, silent = gpu_stats.read_cards()[0]
    assert silent == CardState(1, "NVIDIA GeForce RTX 4070")
    words = words_of(WatchFrame(0.0, (silent,), "", None, Track()))
    assert "utilisation N/A  power N/A  N/A  clock N/A" in words
    assert re.search(r"throttled +N/A", words)
    assert "N/A of N/A" in words


def test_a_library_without_the_function_costs_only_that_counter(nvml: CountingNvml,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CountingNvml, "nvmlDeviceGetPowerUsage")
    card = gpu_stats.read_cards()[0][0]
    assert (card.watts, card.celsius) == (None, 71)


def test_before_driver_535_throttling_has_another_name(nvml: CountingNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CountingNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(CountingNvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda self, handle: 0x40,
                        raising=False)
    assert gpu_stats.read_cards()[0][0].throttled == ("heat (hardware)",)


@pytest.mark.parametrize(("bits", "words"), [(0, ()), (0x1, ()), (0x5, ("power limit",)), (None, None),
                                             (0x1000, ("reason 0x1000",)), ("odd", None)])
def test_an_idle_card_is_not_throttled_and_a_new_reason_is_still_one(bits: Any, words: Any) -> None:
    assert gpu_stats.throttling(bits) == words


def test_hidden_cards_are_watched_too(nvml: CountingNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert [card.index for card in gpu_stats.read_cards()[0]] == [0, 1]


def test_without_the_library_nvidia_smi_counts_even_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(command: list[str], **_: Any) -> SimpleNamespace:
        asked = command[1]
        if "event_reasons" in asked:
            return SimpleNamespace(returncode=2, stdout="Field is not a valid field to query")
        if "compute-apps" in asked:
            return SimpleNamespace(returncode=0, stdout="GPU-1, 42, 4464, /usr/bin/python3\nGPU-1, 43, [N/A], odd\n")
        if "throttle" in asked:
            return SimpleNamespace(returncode=0, stdout="0, 57, 88.20, [N/A], 64, 1800, 2100, 0x0000000000000004\n")
        return SimpleNamespace(returncode=0, stdout="0, T4, GPU-1, 470.57, 15109, 15000, 109, 7.5\n")

    gpu_stats._reason_field.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi-old")
    monkeypatch.setattr("subprocess.run", smi)
    (card,), _ = gpu_stats.read_cards()
    gpu_stats._reason_field.cache_clear()
    assert (card.utilisation, card.watts, card.watt_limit, card.celsius) == (57, 88.2, None, 64)
    assert card.throttled == ("power limit",)
    assert card.programs == (Program(42, "python3", 4464 * MiB), Program(43, "odd", None))


@pytest.mark.parametrize(("told", "name", "kind"), [
    ("/usr/lib/xorg/Xorg", "Xorg", "desktop"), ("/usr/bin/gnome-shell", "gnome-shell", "desktop"),
    ("/opt/google/chrome/chrome --type=gpu-process --no-sandbox", "chrome", "app"),
    (r"C:\Windows\System32\dwm.exe", "dwm.exe", "desktop"),
    (r"C:\Program Files\Mozilla\firefox.exe", "firefox.exe", "app"),
    ("python train.py", "python train.py", "other"), ("/usr/bin/python3.11", "python3.11", "other"),
    (None, "", "other"),
])
def test_programs_are_named_plainly_and_the_desktops_told_apart(told: str | None, name: str, kind: str) -> None:
    assert gpu_stats.program_name(told) == name
    assert gpu_stats.kind_of(name) == kind


def test_more_bytes_than_the_card_has_are_not_believed() -> None:
    found = gpu_stats.programs([GpuProcess(1, "a", 2**64 - 1), GpuProcess(2, "b", 5)], 100)
    assert found == (Program(2, "b", 5), Program(1, "a", None))


def test_a_process_nobody_names_is_called_by_its_number() -> None:
    assert gpu_stats.programs([GpuProcess(2**30, None, 5)], None)[0].name == f"process {2**30}"
    assert gpu_stats.programs([GpuProcess(os.getpid(), None, 5)], None)[0].name != ""
