"""A GPU that this torch cannot use: the reason and the command that helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitgpt.core.units import GiB, MiB
from fitgpt.hardware.nvidia import GpuReading, Survey
from fitgpt.hardware.torch_install import CudaDevice, Mismatch, TorchBuild, runs_on, unusable_gpu_reason

DEFAULT_WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CUDA_BUILD = TorchBuild("2.13.0+cu130", cuda="13.0", archs=DEFAULT_WHEEL)
CPU_BUILD = TorchBuild("2.13.0+cpu")
RTX_4070 = CudaDevice(0, "NVIDIA GeForce RTX 4070", (8, 9), 11930 * MiB, "aa-1")
GTX_1060 = CudaDevice(0, "NVIDIA GeForce GTX 1060 6GB", (6, 1), 5838 * MiB, "dd-4")


def reading_of(gpu: CudaDevice, driver_version: str = "580.65.06", free: int = 10 * GiB) -> GpuReading:
    return GpuReading(gpu.index, gpu.name, f"GPU-{gpu.uuid}", "{}.{}".format(*gpu.capability), driver_version,
                      free_bytes=free)


def mismatch(gpu: CudaDevice, build: TorchBuild, driver_version: str = "580.65.06", *, opened: bool = False,
             platform: str = "linux", caught: str = "") -> Mismatch:
    survey = Survey((reading_of(gpu, driver_version),))
    found = unusable_gpu_reason(build, survey, (gpu,) if opened else (), caught, platform)
    assert found is not None
    return found


def test_a_cpu_build_of_torch_next_to_a_gpu_names_the_pip_command() -> None:
    found = mismatch(RTX_4070, CPU_BUILD)
    assert found.why == ("The driver lists NVIDIA GeForce RTX 4070, but this torch (2.13.0+cpu) is a build for CPUs "
                         "only.")
    assert found.fix.startswith("pip install --force-reinstall torch==2.13.0 ")


def test_the_default_wheel_is_not_advised_where_it_has_no_cuda() -> None:
    assert "pip install" not in mismatch(RTX_4070, CPU_BUILD, platform="win32").fix


@pytest.mark.parametrize(("gpu", "driver_version"), [(GTX_1060, "580.65.06"), (RTX_4070, "535.183.01")])
def test_the_default_wheel_is_not_advised_where_it_would_not_run_either(gpu: CudaDevice, driver_version: str) -> None:
    assert "CUDA 12.6" in mismatch(gpu, CPU_BUILD, driver_version).fix


def test_a_driver_too_old_is_named_with_the_one_it_takes() -> None:
    found = mismatch(RTX_4070, CUDA_BUILD, "535.183.01")
    assert "driver 535.183.01 is too old" in found.why
    assert "needs driver 580 or newer" in found.why
    assert "CUDA 12.6" in found.fix


@pytest.mark.parametrize("gpu", [replace(RTX_4070, capability=(12, 0)), RTX_4070])
def test_a_driver_no_build_supports_must_be_updated(gpu: CudaDevice) -> None:
    version = "570.86.10" if gpu.capability == (12, 0) else "515.43.04"
    assert "Update the NVIDIA driver to 580" in mismatch(gpu, CUDA_BUILD, version).fix


def test_a_card_too_old_for_the_build_is_named_with_both_architectures() -> None:
    found = mismatch(GTX_1060, CUDA_BUILD, opened=True)
    assert "is sm_61" in found.why
    assert "sm_75, sm_80" in found.why
    assert "CUDA 12.6" in found.fix


def test_a_gpu_too_new_for_the_build_names_the_default_wheel() -> None:
    build = TorchBuild("2.11.0+cu126", cuda="12.6", archs=("sm_70", "sm_80", "sm_90"))
    found = mismatch(replace(RTX_4070, capability=(12, 0)), build, opened=True)
    assert "is sm_120" in found.why
    assert "torch==2.11.0" in found.fix


def test_a_gpu_that_no_torch_supports_is_an_error() -> None:
    assert "No torch" in mismatch(replace(GTX_1060, capability=(3, 5)), CPU_BUILD).fix


def test_a_build_for_amd_is_named() -> None:
    assert "a build for AMD GPUs" in mismatch(RTX_4070, TorchBuild("2.13.0+rocm7", hip="7.0")).why


def test_an_unknown_cuda_error_shows_torchs_message() -> None:
    found = mismatch(RTX_4070, CUDA_BUILD, caught="CUDA unknown error")
    assert "cannot open it: CUDA unknown error." in found.why
    assert "torch.cuda.init()" in found.fix


def test_a_driver_that_does_not_work_is_not_taken_for_no_gpu() -> None:
    survey = Survey(reason="the NVIDIA driver answers: Driver/library version mismatch", faulty=True)
    found = unusable_gpu_reason(CUDA_BUILD, survey)
    assert found is not None
    assert "Driver/library version mismatch" in found.why


@pytest.mark.parametrize(("capability", "archs", "runs"), [
    ((8, 9), ("sm_80", "sm_86"), True),         # same major, later minor
    ((8, 0), ("sm_86",), False),                # an earlier minor
    ((9, 0), ("sm_80", "sm_86"), False),        # another major
    ((9, 0), ("sm_80", "compute_80"), True),    # PTX is compiled by the driver
    ((7, 5), ("compute_80",), False),           # PTX for newer GPUs
    ((9, 0), ("sm_90a",), True),
    ((10, 0), ("sm_90a",), False),
    ((12, 0), ("sm_100", "sm_120"), True),
    ((10, 3), ("sm_100f",), True),
    ((6, 1), ("sm_50", "sm_60"), True),
    ((6, 1), (), True),                         # not known: not rejected
])
def test_compiled_code_runs_by_cudas_rules(capability: tuple[int, int], archs: tuple[str, ...], runs: bool) -> None:
    assert runs_on(capability, archs) is runs
