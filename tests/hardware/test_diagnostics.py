"""Each check of the machine: GPUs, driver, variables, disk, RAM, packages, torch in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.doctor import CHECKPOINT_BYTES, CHECKPOINTS
from fitgpt.config.argv import walk
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DeviceError
from fitgpt.core.units import GiB, MiB
from fitgpt.hardware import diagnostics
from fitgpt.hardware.diagnostics import Finding, Machine
from fitgpt.hardware.nvidia import GpuProcess, GpuReading, GpuState, Survey

GPU = GpuReading(0, "NVIDIA GeForce RTX 4070", "GPU-1", "8.9", "580.65", 12282 * MiB, 9882 * MiB, 2118 * MiB, 282 * MiB)
DESKTOP = (GpuProcess(11, "Xorg", 500 * MiB, "desktop"), GpuProcess(12, "chrome", 300 * MiB, "app"),
           GpuProcess(13, "gnome-shell", None, "desktop"))
OTHER = GpuProcess(14, "python3", 1218 * MiB)
HERE = Machine({}, Survey((replace(GPU, processes=(*DESKTOP, OTHER)),)), None, (), disk_free=100 * GiB,
               ram=30 * GiB, shm=16 * GiB, open_files=4096)
FINE = {"packages": {"numpy": "", "safetensors": "", "tiktoken": ""}, "import_error": "", "version": "2.13.0",
        "cuda": "13.0", "hip": None,
        "tools": {"triton": True, "c_compiler": True, "cxx_compiler": True, "python_headers": True},
        "device": "cuda:0", "name": GPU.name, "dtype": "bfloat16", "compile": True, "compute_error": "",
        "notes": ["compile: on, because triton can run here."]}


def by_subject(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        found.setdefault(finding.subject, []).append(finding)
    return found


def verdicts(findings: Iterable[Finding]) -> set[str]:
    return {finding.verdict for finding in findings}


# ---- GPUs


def test_memory_is_listed_by_program_with_the_desktop_apart() -> None:
    found = by_subject(diagnostics.check_gpus(HERE))
    assert "2.07 GiB of 11.99 GiB are used, 11.72 GiB of it for CUDA; 9.65 GiB are free" in found["memory"][0].what
    desktop = found["desktop"][0]
    assert desktop.what == ("The desktop uses 800.0 MiB: Xorg 500.0 MiB, chrome 300.0 MiB, gnome-shell an unknown "
                            "amount.")
    assert "Close chrome" in desktop.fix
    assert "sudo systemctl isolate multi-user.target" in desktop.fix
    assert found["program"][0].what == "python3 (process 14) uses 1.19 GiB of GPU 0."
    assert "kill 14" in found["program"][0].fix
    assert len(found["program"]) == 1  # 2118 MiB are all accounted for, within what the driver itself takes
    assert "wrong" not in verdicts(diagnostics.check_gpus(HERE))


def test_for_a_browser_alone_the_session_need_not_end() -> None:
    (finding,) = diagnostics.check_desktop(DESKTOP[1:2], HERE)
    assert finding.fix == "Close chrome"


def test_on_windows_there_is_no_advice_to_use_systemctl() -> None:
    windows = replace(HERE, platform="win32")
    (finding,) = diagnostics.check_desktop((GpuProcess(1, "dwm.exe", None, "desktop"),), windows)
    assert "systemctl" not in finding.fix
    assert "hardware acceleration" in finding.fix


def test_memory_of_no_listed_program_is_noted() -> None:
    alone = replace(HERE, survey=Survey((GPU,)))
    assert "2.07 GiB of GPU 0" in by_subject(diagnostics.check_gpus(alone))["program"][0].what
    assert "fuser" in by_subject(diagnostics.check_gpus(alone))["program"][0].fix
    assert "Task Manager" in by_subject(diagnostics.check_gpus(replace(alone, wsl=True)))["program"][0].fix


def test_a_gpu_that_reports_nothing_is_listed() -> None:
    found = by_subject(diagnostics.check_gpus(replace(HERE, survey=Survey((GpuReading(0, "Odd"),)))))
    assert "unknown" in found["GPU"][0].what
    assert "does not report" in found["memory"][0].what


def test_a_gpu_that_throttles_for_heat_is_noted() -> None:
    hot = replace(HERE, states=(GpuState(0, GPU.name, celsius=92, throttled=("heat",)),))
    assert "92 °C" in by_subject(diagnostics.check_gpus(hot))["heat"][0].what


def test_no_gpu_is_a_note_and_a_broken_driver_is_wrong() -> None:
    none = list(diagnostics.check_gpus(replace(HERE, survey=Survey(reason="no driver"))))
    assert none == [Finding("note", "GPU", "none: no driver.")]
    (faulty,) = diagnostics.check_gpus(replace(HERE, survey=Survey(reason="Xid 79", faulty=True)))
    assert (faulty.verdict, "Xid 79" in faulty.what, "reboot" in faulty.fix) == ("wrong", True, True)


def test_hidden_gpus_and_gpus_that_do_not_exist_are_findings() -> None:
    hidden = replace(HERE, survey=Survey((), (GPU,), chosen="-1"))
    (finding,) = diagnostics.check_gpus(hidden)
    assert (finding.verdict, finding.fix) == ("note", "unset CUDA_VISIBLE_DEVICES")
    assert "'-1' hides 0 (NVIDIA GeForce RTX 4070)" in finding.what
    misnamed = replace(HERE, visible_error=DeviceError("CUDA_VISIBLE_DEVICES='7'", "unset it"))
    assert Finding("wrong", "GPU", "CUDA_VISIBLE_DEVICES='7'", "unset it") in list(diagnostics.check_gpus(misnamed))


@pytest.mark.parametrize(("kernel", "env", "wsl"), [
    ("5.15.153.1-microsoft-standard-WSL2", {}, True), ("6.1.0-18-amd64", {"WSL_DISTRO_NAME": "Ubuntu"}, True),
    ("6.1.0-18-amd64", {}, False),
])
def test_wsl_is_recognised_by_kernel_or_environment(kernel: str, env: dict[str, str], wsl: bool) -> None:
    assert diagnostics.is_wsl(kernel, env) is wsl


def test_spill_into_cpu_ram_is_noted_on_windows_and_wsl_only() -> None:
    assert "spill" not in by_subject(diagnostics.check_system(HERE))
    assert "WSL" in by_subject(diagnostics.check_system(replace(HERE, wsl=True)))["spill"][0].what
    assert "Sysmem Fallback" in by_subject(diagnostics.check_system(replace(HERE, platform="win32")))["spill"][0].fix
    assert "spill" not in by_subject(diagnostics.check_system(replace(HERE, wsl=True, survey=Survey())))


def test_a_python_that_is_too_old_is_wrong() -> None:
    assert by_subject(diagnostics.check_system(replace(HERE, python=(3, 10))))["python"][0].verdict == "wrong"
    assert by_subject(diagnostics.check_system(replace(HERE, python=(3, 12))))["python"][0].verdict == "ok"


# ---- settings and room


def check_room(machine: Machine) -> Iterable[Finding]:
    return diagnostics.check_room(machine, CHECKPOINT_BYTES, CHECKPOINTS)


@pytest.mark.parametrize(("env", "verdict", "message"), [
    ({}, "ok", "fitgpt sets expandable_segments:True"),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "ok", "PYTORCH_ALLOC_CONF"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "note", "max_split_size_mb:64"),
    ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}, "note", "differ"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments"}, "wrong", "has no value"),
])
def test_allocator_variables_are_checked(env: dict[str, str], verdict: str, message: str) -> None:
    (finding,) = diagnostics.check_environment(replace(HERE, environment=env))
    assert finding.verdict == verdict
    assert message in finding.what
    assert verdict == "ok" or "unset" in finding.fix


def test_variables_that_slow_torch_down_are_noted_if_set() -> None:
    env = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_COMPILE_DISABLE": "0"}
    (finding,) = by_subject(diagnostics.check_environment(replace(HERE, environment=env)))["setting"]
    assert (finding.verdict, finding.fix) == ("note", "unset CUDA_LAUNCH_BLOCKING")


@pytest.mark.parametrize(("changes", "subject", "message"), [
    ({"disk_free": GiB}, "disk", "too little"), ({"can_write": False}, "disk", "cannot be written"),
    ({"ram": GiB}, "RAM", "1.00 GiB"), ({"shm": 64 * MiB}, "limits", "64.0 MiB"),
    ({"open_files": 256}, "limits", "256 files"), ({"address_space": 8 * GiB}, "limits", "8.00 GiB"),
])
def test_a_low_limit_is_noted_with_its_figure_and_a_command(changes: dict[str, Any], subject: str,
                                                            message: str) -> None:
    assert verdicts(check_room(HERE)) == {"ok"}
    noted = [finding for finding in check_room(replace(HERE, **changes)) if finding.verdict == "note"]
    assert [finding.subject for finding in noted] == [subject]
    assert message in noted[0].what
    assert noted[0].fix


def test_advice_for_a_small_disk_is_an_option_of_train() -> None:
    (finding,) = by_subject(check_room(replace(HERE, disk_free=GiB)))["disk"]
    flags = [word for word in finding.fix.split() if word.startswith("--")]
    assert [each.key for each in walk(flags, RunConfig)] == ["out_dir"]


# ---- torch


def test_a_working_machine_has_only_ok_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "try_compiler", lambda environment: "")
    findings = [*diagnostics.check_torch(FINE, HERE), *diagnostics.check_packages(FINE),
                *diagnostics.check_compiling(FINE, HERE)]
    assert verdicts(findings) == {"ok"}
    assert "2.13.0, built for CUDA 13.0" in by_subject(findings)["torch"][0].what
    assert "cuda:0 (NVIDIA GeForce RTX 4070), in bfloat16" in by_subject(findings)["device"][0].what


@pytest.mark.parametrize(("changes", "subject", "message", "fix"), [
    ({"import_error": "libcudart.so.12: cannot open shared object file"}, "torch", "libcudart",
     "--force-reinstall torch"),
    ({"device_error": ["The driver lists X, but this torch is a build for CPUs only.", "pip install torch"]}, "device",
     "CPUs only", "pip install torch"),
    ({"compute_error": "CUDA error: no kernel image"}, "device", "no kernel image", "nvidia-smi"),
])
def test_a_torch_that_cannot_train_is_wrong_with_a_command(changes: dict[str, Any], subject: str, message: str,
                                                           fix: str) -> None:
    wrong = [finding for finding in diagnostics.check_torch({**FINE, **changes}, HERE) if finding.verdict == "wrong"]
    assert [finding.subject for finding in wrong] == [subject]
    assert message in wrong[0].what
    assert fix in wrong[0].fix


def test_a_cpu_and_an_old_torch_are_notes() -> None:
    notes = ["torch: 2.4.0 is not supported: fitgpt needs 2.11 or newer.",
             "compile: off, because it pays only on CUDA."]
    cpu = {**FINE, "device": "cpu", "name": "Ryzen", "compile": False, "notes": notes}
    found = by_subject(diagnostics.check_torch(cpu, HERE))
    assert [finding.verdict for finding in found["torch"]] == ["ok", "note"]
    assert "pip install 'torch>=2.11'" in found["torch"][1].fix
    assert found["device"][0].verdict == "note"
    assert verdicts(diagnostics.check_compiling(cpu, HERE)) == {"ok"}


@pytest.mark.reproduction
def test_a_torch_that_is_too_new_gets_no_fix() -> None:
    notes = ["torch: 2.16.0 is newer than 2.15, the last version whose memory fitgpt knows."]
    _, note = by_subject(diagnostics.check_torch({**FINE, "notes": notes}, HERE))["torch"]
    assert (note.verdict, note.fix) == ("note", "")


def test_missing_and_broken_packages_are_wrong_each_with_its_command() -> None:
    answer = {**FINE, "packages": {"numpy": "", "safetensors": "is not installed", "tiktoken": "bad ELF"}}
    found = by_subject(diagnostics.check_packages(answer))
    missing, broken = found["package"]
    assert (missing.verdict, broken.verdict) == ("wrong", "wrong")
    assert missing.what.startswith("safetensors is not installed")
    assert "[train]" in missing.fix
    assert "--force-reinstall tiktoken" in broken.fix
    assert found["packages"][0].what.startswith("numpy ")


@pytest.mark.parametrize(("lacking", "fix"), [
    ("triton", "pip install triton"), ("c_compiler", "apt-get install build-essential"), ("python_headers", "-dev"),
])
def test_what_torch_compile_lacks_is_a_note_with_a_command(lacking: str, fix: str,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    answer = {**FINE, "compile": False, "tools": {**FINE["tools"], lacking: False},  # type: ignore[dict-item]
              "notes": [f"compile: off, because {lacking}."]}
    (finding,) = diagnostics.check_compiling(answer, HERE)
    assert finding.verdict == "note"
    assert finding.what.startswith(f"off, because {lacking}.")
    assert fix in finding.fix


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_the_c_compiler_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include"
    include.mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(include))
    assert "Python.h" in diagnostics.try_compiler({"CC": "gcc"})
    (include / "Python.h").touch()
    assert diagnostics.try_compiler({"CC": "gcc"}) == ""
    assert "does not run" in diagnostics.try_compiler({"CC": str(tmp_path / "no-such-compiler")})


# ---- torch, in a process of its own


def run_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The process that doctor starts runs this script instead."""
    real = subprocess.run
    monkeypatch.setattr("subprocess.run", lambda command, **options: real([command[0], "-c", script], **options))


@pytest.mark.parametrize(("script", "message"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed (SIGILL)"),
    ("import sys; sys.exit('no libc')", "exit code 1: no libc"), ("print('[1]')", "exit code 0"),
    ("print('half {')", "exit code 0"), ("import time; time.sleep(60)", "did not finish within 1 s"),
])
def test_a_torch_that_crashes_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    monkeypatch.setattr(diagnostics, "TORCH_TIMEOUT_S", 1)
    run_instead(monkeypatch, script)
    answer = diagnostics.ask_torch(os.environ)
    (finding,) = diagnostics.check_torch(answer, HERE)
    assert finding.verdict == "wrong"
    assert message in finding.what
    assert list(diagnostics.check_packages(answer)) == list(diagnostics.check_compiling(answer, HERE)) == []


def test_output_before_the_result_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "print('a warning'); print('{\"import_error\": \"so\"}')")
    assert diagnostics.ask_torch(os.environ) == {"import_error": "so"}


def test_torch_is_tested_with_the_environment_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "import os, json; print(json.dumps(dict(os.environ)))")
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    assert diagnostics.ask_torch(plain)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in diagnostics.ask_torch({**plain, "PYTORCH_ALLOC_CONF": "nonsense"})


# ---- ranks


def test_several_gpus_are_listed_with_their_ranks_and_how_they_reach_each_other() -> None:
    pair = {**FINE, "ranks": {"gpus": [GPU.name] * 2, "nccl": "2.28.9", "no_peer_access": [[0, 1]]}}
    found = by_subject(diagnostics.check_ranks(pair))
    assert f"rank 1 on cuda:1 ({GPU.name})" in found["ranks"][0].what
    assert found["NCCL"][0].what == "version 2.28.9"
    assert found["peer access"][0].verdict == "note"
    assert found["peer access"][0].what.startswith("GPUs 0 and 1 cannot access each other's memory")
    without = {**FINE, "ranks": {"gpus": [GPU.name] * 2, "nccl": "", "no_peer_access": []}}
    assert by_subject(diagnostics.check_ranks(without))["NCCL"][0].fix == "--backend=gloo"
    assert list(diagnostics.check_ranks(FINE)) == []
