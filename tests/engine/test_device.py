"""The device, the precision and compilation are chosen by rule, each with its reason; what cannot work is an error
with its fix, before the start. No GPU is needed: a machine is a value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fitgpt.core.errors import DeviceError, UsageError
from fitgpt.core.units import GiB, MiB
from fitgpt.engine import device
from fitgpt.engine.device import Host, Tools, choose
from fitgpt.hardware.nvidia import Survey
from fitgpt.hardware.torch_install import CudaDevice, TorchBuild, unusable_gpu_reason
from fitgpt.runs.metrics import MemoryReading
from tests.hardware.test_torch_install import CPU_BUILD, CUDA_BUILD, GTX_1060, RTX_4070, reading_of

ALL_TOOLS = Tools(triton=True, c_compiler=True, cxx_compiler=True, python_headers=True)
RTX_2060 = CudaDevice(0, "NVIDIA GeForce RTX 2060", (7, 5), 5928 * MiB, "cc-3")


def machine(*gpus: CudaDevice, build: TorchBuild = CUDA_BUILD, tools: Tools = ALL_TOOLS) -> Host:
    return Host(build, gpus, survey=Survey(tuple(reading_of(gpu) for gpu in gpus)), tools=tools)


NO_GPU = Host(CPU_BUILD, survey=Survey(reason="no NVIDIA driver is installed or loaded"), tools=ALL_TOOLS)


# ---- the choice

def test_auto_takes_the_gpu_in_bfloat16_and_compiled_with_notes() -> None:
    choice = choose("auto", "auto", "auto", machine(RTX_4070))
    assert (choice.device, choice.name, choice.dtype, choice.compile) == (
        "cuda:0", "NVIDIA GeForce RTX 4070", "bfloat16", True)
    assert choice.card is not None
    assert choice.card.name == "RTX 4070"
    assert [note.split(":")[0] for note in choice.notes] == ["device", "dtype", "compile"]


def test_auto_takes_float16_before_ampere() -> None:
    choice = choose("auto", "auto", "auto", machine(RTX_2060))
    assert choice.dtype == "float16"
    assert "dtype: float16, because compute capability 7.5 has no bfloat16." in choice.notes


def test_without_a_gpu_auto_takes_the_cpu_in_float32_eager_with_the_reason() -> None:
    choice = choose("auto", "auto", "auto", NO_GPU)
    assert (choice.device, choice.dtype, choice.compile) == ("cpu", "float32", False)
    assert "device: cpu, because no NVIDIA driver is installed or loaded." in choice.notes


def test_a_mac_gets_its_gpu_in_float32_eager() -> None:
    choice = choose("auto", "auto", "auto", replace(NO_GPU, mps=True, platform="darwin"))
    assert (choice.device, choice.dtype, choice.compile) == ("mps", "float32", False)


def test_of_two_gpus_auto_takes_the_one_with_more_free_memory() -> None:
    second = replace(RTX_4070, index=1, uuid="bb-2")
    survey = Survey((reading_of(RTX_4070, free=1 * GiB), reading_of(second, free=9 * GiB)))
    choice = choose("auto", "auto", "auto", replace(machine(RTX_4070, second), survey=survey))
    assert choice.device == "cuda:1"
    assert "device: cuda:1 (NVIDIA GeForce RTX 4070), which has the most free memory of 2." in choice.notes


def test_of_two_gpus_auto_never_takes_one_that_this_torch_cannot_run() -> None:
    old = replace(GTX_1060, index=1, uuid="bb-2")
    survey = Survey((reading_of(RTX_4070, free=1 * GiB), reading_of(old, free=6 * GiB)))
    assert choose("auto", "auto", "auto", replace(machine(RTX_4070, old), survey=survey)).device == "cuda:0"


def test_if_free_memory_is_unknown_the_first_gpu_is_taken_without_a_reason() -> None:
    second = replace(RTX_4070, index=1, uuid="bb-2")
    choice = choose("auto", "auto", "auto", replace(machine(RTX_4070, second), survey=Survey()))
    assert choice.device == "cuda:0"
    assert not any("most free" in note for note in choice.notes)


def test_explicit_settings_are_used_without_a_note() -> None:
    choice = choose("cuda", "float32", False, machine(RTX_4070))
    assert (choice.device, choice.dtype, choice.compile, choice.notes) == ("cuda:0", "float32", False, ())


def test_bfloat16_on_turing_is_rejected_with_the_flag_that_works() -> None:
    with pytest.raises(DeviceError) as caught:
        choose("auto", "bfloat16", "auto", machine(RTX_2060))
    assert "NVIDIA GeForce RTX 2060 has 7.5" in caught.value.what
    assert caught.value.fix == "--dtype=float16"
    assert choose("auto", "float16", "auto", machine(RTX_2060)).dtype == "float16"


def test_a_missing_gpu_is_an_error_that_lists_those_present() -> None:
    with pytest.raises(DeviceError) as caught:
        choose("cuda:3", "auto", "auto", machine(RTX_4070))
    assert "cuda:0 (NVIDIA GeForce RTX 4070)" in caught.value.what
    assert caught.value.fix == "--device=cuda:0"


@pytest.mark.parametrize("requested", ["cuda", "cuda:0", "mps"])
def test_requesting_a_gpu_where_there_is_none_is_an_error(requested: str) -> None:
    with pytest.raises(DeviceError, match=f"device={requested}"):
        choose(requested, "auto", "auto", NO_GPU)


@pytest.mark.parametrize(("requested", "dtype"), [("gpu", "auto"), ("cuda:x", "auto"), ("auto", "bf16")])
def test_invalid_values_are_usage_errors(requested: str, dtype: str) -> None:
    with pytest.raises(UsageError):
        choose(requested, dtype, "auto", machine(RTX_4070))


def test_half_precision_on_a_cpu_is_allowed_with_a_note() -> None:
    choice = choose("cpu", "float16", "auto", NO_GPU)
    assert choice.dtype == "float16"
    assert any("slower" in note for note in choice.notes)


@pytest.mark.parametrize(("tools", "lacking"), [
    (replace(ALL_TOOLS, triton=False), "triton is not installed"),
    (replace(ALL_TOOLS, c_compiler=False), "C compiler"),
    (replace(ALL_TOOLS, python_headers=False), "Python.h"),
])
def test_without_compilers_compile_auto_runs_eager_and_compile_true_is_rejected(tools: Tools, lacking: str) -> None:
    host = machine(RTX_4070, tools=tools)
    choice = choose("auto", "auto", "auto", host)
    assert choice.compile is False
    assert any(note.startswith("compile: off, because") and lacking in note for note in choice.notes)
    with pytest.raises(DeviceError, match=lacking):
        choose("auto", "auto", True, host)


def test_a_card_too_old_for_triton_runs_eager() -> None:
    build = replace(CUDA_BUILD, archs=("sm_50", "sm_60", "sm_70"))
    choice = choose("auto", "auto", "auto", machine(GTX_1060, build=build))
    assert choice.compile is False
    assert any("this GPU has 6.1" in note for note in choice.notes)


def test_compiling_on_a_cpu_is_honoured_where_there_is_a_compiler() -> None:
    assert choose("cpu", "auto", True, NO_GPU).compile is True
    with pytest.raises(DeviceError, match="C\\+\\+ compiler"):
        choose("cpu", "auto", True, replace(NO_GPU, tools=replace(ALL_TOOLS, cxx_compiler=False)))


@pytest.mark.parametrize(("version", "said"), [
    ("2.10.1+cu128", "fitgpt needs 2.11 or newer"), ("2.11.0+cu130", ""), ("2.15.0", ""),
    ("2.16.0a0+git1", "newer than 2.15, the last version"), ("3.0.0", "newer than 2.15, the last version"),
])
def test_an_unknown_torch_version_gets_a_note(version: str, said: str) -> None:
    notes = [note for note in choose("cpu", "auto", "auto", replace(NO_GPU, build=TorchBuild(version))).notes
             if note.startswith("torch:")]
    assert bool(notes) is bool(said)
    assert all(said in note for note in notes)


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_a_hidden_gpu_stops_the_run_with_the_value_that_hides_it(requested: str) -> None:
    host = Host(CUDA_BUILD, survey=Survey(hidden=(reading_of(RTX_4070),), chosen=""))
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES='' hides NVIDIA GeForce RTX 4070"):
        choose(requested, "auto", "auto", host)
    assert choose("cpu", "auto", "auto", host).mismatch is None


@pytest.mark.parametrize("host", [machine(RTX_4070), NO_GPU, Host(CUDA_BUILD)])
def test_there_is_no_mismatch_if_the_gpu_works_or_there_is_none(host: Host) -> None:
    assert unusable_gpu_reason(host.build, host.survey, host.opened) is None


@pytest.mark.parametrize("requested", ["auto", "cuda", "cuda:0"])
def test_an_unusable_gpu_stops_the_run_unless_the_cpu_is_requested(requested: str) -> None:
    host = replace(machine(RTX_4070, build=CPU_BUILD), opened=())
    with pytest.raises(DeviceError) as caught:
        choose(requested, "auto", "auto", host)
    assert caught.value.exit_code == 5
    assert "CPUs only" in caught.value.what
    assert "pip install" in caught.value.fix
    assert "--device=cpu" in caught.value.fix
    choice = choose("cpu", "auto", "auto", host)
    assert choice.device == "cpu"
    assert choice.mismatch is not None
    assert any("It stays unused" in note and "pip install" in note for note in choice.notes)


def test_an_unusable_gpu_requested_by_index_is_explained_even_if_another_works() -> None:
    old = replace(GTX_1060, index=1)
    with pytest.raises(DeviceError, match="is sm_61"):
        choose("cuda:1", "auto", "auto", machine(RTX_4070, old))


def test_cuda_visible_devices_without_a_gpu_is_an_error_with_the_value() -> None:
    def without_gpus(chosen: str | None) -> Host:
        return replace(NO_GPU, survey=replace(NO_GPU.survey, chosen=chosen))
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES='7'"):
        choose("auto", "auto", "auto", without_gpus("7"))
    for quiet in (None, "", "-1"):
        assert choose("auto", "auto", "auto", without_gpus(quiet)).device == "cpu"
    assert choose("cpu", "auto", "auto", without_gpus("7")).device == "cpu"


# ---- this machine, whatever it is

def test_reading_this_machine_never_fails_and_is_enough_to_train_on_its_cpu() -> None:
    choice = device.resolve_device("cpu", "auto", "auto")
    assert (choice.device, choice.dtype, choice.compile) == ("cpu", "float32", False)
    assert "thread" in choice.name


def test_a_wrong_environment_does_not_stop_a_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Survey:
        raise DeviceError("CUDA_VISIBLE_DEVICES='7' names no GPU")
    monkeypatch.setattr("fitgpt.hardware.nvidia.survey", fail)
    assert device.resolve_device("cpu", "auto", False).device == "cpu"
    with pytest.raises(DeviceError):
        device.resolve_device("auto", "auto", False)


def test_a_cpu_has_no_memory_counters() -> None:
    assert device.read_memory("cpu") == MemoryReading()
    device.reset_peaks("cpu")
    device.synchronize("cpu")


def test_memory_counters_are_read_under_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"allocated_bytes.all.current": 1, "reserved_bytes.all.current": 2,
               "allocated_bytes.all.peak": 3, "reserved_bytes.all.peak": 4}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counted)
    assert device.read_memory("cuda:0") == MemoryReading(allocated=1, reserved=2, peak_allocated=3, peak_reserved=4)


def test_a_compiler_named_by_cc_is_the_only_one_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert device.read_tools().c_compiler is False
    monkeypatch.setenv("CC", "sh -c")
    assert device.read_tools().c_compiler is True
