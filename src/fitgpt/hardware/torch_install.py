"""Why the installed torch cannot use a GPU that the driver lists, and the command that fixes it. Without torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import DeviceError
from . import nvidia

Capability = tuple[int, int]

LOADED = ("torch", "numpy", "safetensors", "triton")  # packages with native libraries, which may not load

# NVIDIA's table: CUDA's major version → the first driver branch that runs it.
_DRIVER_NEEDED = {11: 450, 12: 525, 13: 580}
# What the wheels of torch 2.11 to 2.15 are built for: the default one (CUDA 13), and the one for CUDA 12.6.
_DEFAULT_WHEEL_FROM: Capability = (7, 5)
_OLDEST_WHEEL_FROM: Capability = (5, 0)
_BLACKWELL: Capability = (10, 0)  # not in the CUDA 12.6 wheel


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch: its version, and what it was built for."""

    version: str                  # "2.13.0+cpu"
    cuda: str | None = None       # CUDA's version, "13.0"; None: a build without CUDA
    hip: str | None = None
    archs: tuple[str, ...] = ()   # ("sm_75", …, "compute_120")


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that torch can open."""

    index: int
    name: str
    capability: Capability
    total_bytes: int
    uuid: str = ""

    @property
    def label(self) -> str:
        return f"cuda:{self.index} ({self.name})"


@dataclass(frozen=True)
class Mismatch:
    """Why this torch cannot use a GPU that the driver lists, and the fix."""

    why: str
    fix: str


def failed_import(error: BaseException) -> DeviceError | None:
    """The error of a package that is installed and does not load, such as a torch that lacks a library; None if this
    error did not come from a package's import. Whatever its class: CDLL raises OSError, numpy RuntimeError."""
    # A name that the package lacks: `from safetensors import SafetensorError`, where it is another version.
    importing = [error.name or ""] if type(error) is ImportError else []
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_name == "<module>":
            importing.append(str(frame.tb_frame.f_globals.get("__name__", "")))
        frame = frame.tb_next
    package = next((name.partition(".")[0] for name in importing if name.partition(".")[0] in LOADED), None)
    if package is None:
        return None
    last_line = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return DeviceError(f"{package} is installed for {sys.executable}, but does not load: {last_line}.",
                       f"{sys.executable} -m pip install --force-reinstall {package}")


def unusable_gpu_reason(build: TorchBuild, survey: nvidia.Survey, opened: Sequence[CudaDevice] = (),
                        cuda_error: str = "", platform: str = "linux") -> Mismatch | None:
    """Why none of the GPUs that the driver lists can be used; None if one can, or if there is none."""
    if opened and (build.hip or any(runs_on(gpu.capability, build.archs) for gpu in opened)):
        return None
    branch = driver_branch(survey)
    if opened:
        return unsupported_arch(opened[0], build, branch, platform)
    if survey.faulty:
        return Mismatch(f"An NVIDIA driver is installed, but does not work: {survey.reason}.",
                        "Restart the machine (or the container), until nvidia-smi shows the GPU.")
    if not survey.gpus:
        return None
    gpu = survey.gpus[0]
    cc = re.fullmatch(r"(\d+)\.(\d+)", gpu.cc or "")
    fix = wheel_fix(build.version, (int(cc[1]), int(cc[2])) if cc else None, branch, platform)
    seen = f"The driver lists {gpu.name}, but"
    if build.cuda is None:
        target = "AMD GPUs" if build.hip else "CPUs only"
        return Mismatch(f"{seen} this torch ({build.version}) is a build for {target}.", fix)
    needed = _DRIVER_NEEDED.get(int(build.cuda.split(".")[0]), 0)
    if branch is not None and branch < needed:
        return Mismatch(f"{seen} its driver {gpu.driver_version} is too old: this torch ({build.version}) is built for "
                        f"CUDA {build.cuda}, which needs driver {needed} or newer.", fix)
    error = cuda_error or "it gives no reason"
    return Mismatch(f"{seen} this torch ({build.version}) cannot open it: {error}.",
                    'To see torch\'s error: python -c "import torch; torch.cuda.init()"')


def runs_on(capability: Capability, archs: Sequence[str]) -> bool:
    """Machine code runs on its own major version from its minor on; PTX on anything newer. An empty list: unknown."""
    for arch in archs:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch):
            built = (int(found[2]), int(found[3]))
            only_that_one = found[4] == "a"  # architecture-specific
            if built == capability or (not only_that_one and built <= capability
                                       and (found[1] == "compute" or built[0] == capability[0])):
                return True
    return not archs


def unsupported_arch(gpu: CudaDevice, build: TorchBuild, branch: int | None, platform: str) -> Mismatch:
    shown = "sm_{}{}".format(*gpu.capability)
    return Mismatch(f"{gpu.name} is {shown}, and this torch ({build.version}) is built for {', '.join(build.archs)}.",
                    wheel_fix(build.version, gpu.capability, branch, platform))


def driver_branch(survey: nvidia.Survey) -> int | None:
    """580 of 580.65.06."""
    versions = [gpu.driver_version for gpu in survey.gpus if gpu.driver_version]
    head = versions[0].split(".")[0] if versions else ""
    return int(head) if head.isdecimal() else None


def wheel_fix(version: str, capability: Capability | None, branch: int | None, platform: str) -> str:
    """What to install for a GPU and a driver branch; an unknown one counts as new."""
    capability, branch = capability or _DEFAULT_WHEEL_FROM, branch or _DRIVER_NEEDED[13]
    default = (f"pip install --force-reinstall torch=={version.partition('+')[0]}  (the default Linux wheel has CUDA)"
               if platform.startswith("linux")
               else "Install the CUDA build of torch: the install selector on pytorch.org gives the line.")
    older = "Install the CUDA 12.6 build of torch: the install selector on pytorch.org gives the line."
    update = f"Update the NVIDIA driver to {_DRIVER_NEEDED[13]} or newer."
    if capability < _OLDEST_WHEEL_FROM:
        return "No torch that fitgpt supports runs on this GPU."
    if branch < _DRIVER_NEEDED[12] or (branch < _DRIVER_NEEDED[13] and capability >= _BLACKWELL):
        return f"{update} Then: {older if capability < _DEFAULT_WHEEL_FROM else default}"
    return default if branch >= _DRIVER_NEEDED[13] and capability >= _DEFAULT_WHEEL_FROM else older
