"""Chooses device, dtype and compilation, with the reasons; and reads memory counters.

Everything the choice depends on is read once into a `Host`; `choose` is a pure function of it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ..core.errors import DeviceError, UsageError
from ..core.units import MiB
from ..hardware import gpus, nvidia
from ..hardware.torch_install import (
    Capability,
    CudaDevice,
    Mismatch,
    TorchBuild,
    driver_branch,
    runs_on,
    unsupported_arch,
    unusable_gpu_reason,
)
from ..memory.platform import DEFAULT_TORCH, OLDEST_TORCH, release
from ..runs.metrics import MemoryReading

BF16_FROM: Capability = (8, 0)    # Ampere
TRITON_FROM: Capability = (7, 0)  # Volta


@dataclass(frozen=True)
class Tools:
    """What torch.compile needs besides torch."""

    triton: bool = False
    c_compiler: bool = False
    cxx_compiler: bool = False
    python_headers: bool = False


_NO_GPU, _NO_TOOLS = nvidia.Survey(), Tools()


@dataclass(frozen=True)
class Host:
    build: TorchBuild
    opened: tuple[CudaDevice, ...] = ()
    cuda_error: str = ""          # torch's message if CUDA did not initialise
    mps: bool = False
    cpu: str = "CPU"
    survey: nvidia.Survey = _NO_GPU
    tools: Tools = _NO_TOOLS
    platform: str = "linux"


@dataclass(frozen=True)
class DeviceChoice:
    device: str                   # "cuda:0", "cpu", "mps"
    name: str                     # "NVIDIA H200"
    dtype: str
    compile: bool
    notes: tuple[str, ...]        # what was decided for the user, each a sentence
    card: gpus.GpuModel | None
    mismatch: Mismatch | None     # only where --device=cpu leaves such a GPU unused


def resolve_device(config_device: str, config_dtype: str, config_compile: bool | str) -> DeviceChoice:
    """Resolves `auto`; DeviceError for what this machine cannot do."""
    return choose(config_device, config_dtype, config_compile, read_host(lenient=config_device == "cpu"))


def choose(device: str, dtype: str, compile: bool | str, host: Host) -> DeviceChoice:
    mismatch = unusable_gpu_reason(host.build, host.survey, host.opened, host.cuda_error, host.platform)
    kind, gpu, why = _place(device, host, mismatch)
    card = gpus.match_device(gpu.name, gpu.total_bytes // MiB) if gpu else None
    place = f"cuda:{gpu.index}" if gpu else kind
    name = gpu.name if gpu else {"cpu": host.cpu, "mps": "Apple GPU"}[kind]
    capability = gpu.capability if gpu else None
    chosen_dtype, dtype_note = _dtype(dtype, kind, name, capability)
    compiled, compile_note = _compile(compile, kind, capability, host.tools)
    unused = f"{mismatch.why} It stays unused, because --device=cpu was given. {mismatch.fix}" if mismatch else ""
    notes = (_version_note(host.build.version), unused, why, dtype_note, compile_note)
    return DeviceChoice(place, name, chosen_dtype, compiled, tuple(note for note in notes if note), card, mismatch)


def _place(device: str, host: Host, mismatch: Mismatch | None) -> tuple[str, CudaDevice | None, str]:
    """(kind of device, the GPU, a note)."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise UsageError(f"device={device!r} must be auto, cpu, cuda, cuda:N or mps.", "--device=auto")
    if device == "cpu":
        return "cpu", None, ""
    if device == "mps":
        if not host.mps:
            raise DeviceError("device=mps asks for an Apple GPU, and this torch sees none.", "--device=auto")
        return "mps", None, ""
    if mismatch:
        raise DeviceError(mismatch.why, f"{mismatch.fix}\nOr train without the GPU: --device=cpu")
    survey, why_none = host.survey, host.survey.reason or "torch sees no GPU"
    usable = [gpu for gpu in host.opened if host.build.hip or runs_on(gpu.capability, host.build.archs)]
    if not usable:  # is CUDA_VISIBLE_DEVICES the reason?
        fix = "unset CUDA_VISIBLE_DEVICES, or train without a GPU: --device=cpu"
        if survey.hidden:
            raise DeviceError(f"CUDA_VISIBLE_DEVICES={survey.chosen!r} hides {survey.hidden[0].name} from this run.",
                              fix)
        if (survey.chosen or "").strip() not in nvidia.HIDES_ALL:
            raise DeviceError(f"CUDA_VISIBLE_DEVICES={survey.chosen!r} names a GPU, and none is here: {why_none}.", fix)
    if device.startswith("cuda"):
        return "cuda", _requested_gpu(device, usable, host, why_none), ""
    if not usable:
        return ("mps", None, "device: mps, the GPU of this Mac.") if host.mps else (
            "cpu", None, f"device: cpu, because {why_none}.")
    if len(usable) == 1:
        return "cuda", usable[0], f"device: {usable[0].label}."
    # The GPU with the most free memory, by the driver: torch would create a context on every GPU.
    free = {_bare(gpu.uuid): gpu.free_bytes for gpu in survey.gpus if gpu.uuid and gpu.free_bytes is not None}
    known = [gpu for gpu in usable if _bare(gpu.uuid) in free]
    if not known:
        return "cuda", usable[0], f"device: {usable[0].label}, the first of {len(usable)}."
    best = max(known, key=lambda gpu: free[_bare(gpu.uuid)])
    return "cuda", best, f"device: {best.label}, which has the most free memory of {len(usable)}."


def _requested_gpu(device: str, usable: Sequence[CudaDevice], host: Host, why_none: str) -> CudaDevice:
    index = int(device.partition(":")[2] or 0)
    for gpu in usable:
        if gpu.index == index:
            return gpu
    for gpu in host.opened:
        if gpu.index == index:
            unfit = unsupported_arch(gpu, host.build, driver_branch(host.survey), host.platform)
            raise DeviceError(unfit.why, unfit.fix)
    if not usable:
        raise DeviceError(f"device={device} asks for a GPU, and there is none here: {why_none}.", "--device=cpu")
    raise DeviceError(f"device={device} is not here. Torch sees {', '.join(gpu.label for gpu in usable)}.",
                      f"--device=cuda:{usable[0].index}")


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


# ---- precision and compilation

def _dtype(dtype: str, kind: str, name: str, capability: Capability | None) -> tuple[str, str]:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UsageError(f"dtype={dtype!r} must be auto, float32, bfloat16 or float16.", "--dtype=auto")
    if capability is None:
        slow = kind == "cpu" and dtype in ("bfloat16", "float16")
        note = f"dtype: {dtype} as requested, though on most CPUs it is slower than float32." if slow else ""
        return "float32" if dtype == "auto" else dtype, note
    has_bf16, shown = capability >= BF16_FROM, "{}.{}".format(*capability)
    if dtype == "auto" and has_bf16:
        return "bfloat16", f"dtype: bfloat16, because compute capability {shown} has it."
    if dtype == "auto":
        return "float16", f"dtype: float16, because compute capability {shown} has no bfloat16."
    if dtype == "bfloat16" and not has_bf16:
        raise DeviceError(f"dtype=bfloat16 needs compute capability 8.0 or higher; {name} has {shown}.",
                          "--dtype=float16")
    return dtype, ""


def _compile(requested: bool | str, kind: str, capability: Capability | None, tools: Tools) -> tuple[bool, str]:
    lacks = ""
    headers = "Python.h, which is not installed (Debian, Ubuntu: apt install python3-dev)"
    if kind == "cuda" and capability is not None and capability < TRITON_FROM:
        lacks = "triton needs compute capability 7.0 or higher, and this GPU has {}.{}".format(*capability)
    elif kind == "cuda" and not tools.triton:
        lacks = "triton is not installed"
    elif kind == "cuda" and not tools.c_compiler:
        lacks = "triton needs a C compiler, and neither CC, gcc nor clang is one (Debian, Ubuntu: apt install gcc)"
    elif kind == "cpu" and not tools.cxx_compiler:
        lacks = "on a CPU torch.compile needs a C++ compiler, and there is none (Debian, Ubuntu: apt install g++)"
    elif kind != "mps" and not tools.python_headers:
        lacks = f"{'triton' if kind == 'cuda' else 'on a CPU torch.compile'} needs {headers}"
    if requested == "auto":
        if kind != "cuda":
            return False, "compile: off, because it pays only on CUDA GPUs."
        return not lacks, f"compile: off, because {lacks}." if lacks else "compile: on, because triton can run here."
    if requested and lacks:
        raise DeviceError(f"compile=True cannot work here: {lacks}.", "--compile=False")
    return bool(requested), ""


def _version_note(version: str) -> str:
    if release(version) < release(OLDEST_TORCH):
        return f"torch: {version} is not supported: fitgpt needs {OLDEST_TORCH} or newer."
    if release(version) > release(DEFAULT_TORCH):
        return f"torch: {version} is newer than {DEFAULT_TORCH}, the last version whose memory fitgpt knows."
    return ""


# ---- reading the machine

def read_host(*, lenient: bool = False) -> Host:
    """`lenient`: a wrong CUDA_VISIBLE_DEVICES is no error, since no GPU was requested."""
    try:
        survey = nvidia.survey()
    except DeviceError as error:
        if not lenient:
            raise
        survey = nvidia.Survey(reason=error.what)
    build = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip, tuple(torch.cuda.get_arch_list()))
    opened: tuple[CudaDevice, ...] = ()
    cuda_error = ""
    if build.cuda or build.hip:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about drivers and GPUs: our own message covers them
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
                opened = tuple(_opened(index) for index in range(torch.cuda.device_count()))
            except (RuntimeError, AssertionError) as error:
                cuda_error = str(error).strip().split("\n")[0].rstrip(".")
    return Host(build, opened, cuda_error, mps=torch.backends.mps.is_available(), cpu=cpu_name(), survey=survey,
                tools=read_tools(), platform=sys.platform)


def _opened(index: int) -> CudaDevice:
    properties = torch.cuda.get_device_properties(index)
    return CudaDevice(index, properties.name, (properties.major, properties.minor), properties.total_memory,
                      str(getattr(properties, "uuid", "")))


def read_tools() -> Tools:
    # triton looks for CC, else gcc, else clang; torch's CPU compiler for CXX, else the platform's own
    cxx = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return Tools(
        triton=importlib.util.find_spec("triton") is not None,
        c_compiler=any(map(_is_program, [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"])),
        cxx_compiler=_is_program(os.environ.get("CXX") or cxx),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists())


@lru_cache(maxsize=1)
def triton_works() -> bool:
    """Triton compiles a small C library when it first runs: without a C compiler that works the plain path is used."""
    tools = read_tools()
    return (tools.triton and tools.c_compiler and tools.python_headers
            and torch.cuda.get_device_capability() >= TRITON_FROM and _runs_a_triton_kernel())


def _runs_a_triton_kernel() -> bool:
    """Tries one. The memory it takes is given back: a run's memory is planned from nothing."""
    from .oom import is_out_of_memory

    try:
        from .kernels import fused_cross_entropy_

        fused_cross_entropy_(torch.zeros(1, 8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), None)
        torch.cuda.synchronize()
    except Exception as error:  # of Triton, of a compiler, of a driver that is too old: each has its own
        if is_out_of_memory(error):
            raise
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def compiler_message(error: BaseException) -> str:
    """What a compiler said that torch.compile or Triton started; empty if the error did not come from one."""
    behind: BaseException | None = error
    while behind is not None:
        module = type(behind).__module__
        if module.startswith(("torch._inductor", "torch._dynamo", "triton")) or isinstance(
                behind, subprocess.CalledProcessError):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            return lines[0].rstrip(".:")
        behind = behind.__cause__ or behind.__context__
    return ""


def _is_program(command: str) -> bool:
    words = shlex.split(command)
    return bool(words) and shutil.which(words[0]) is not None


def cpu_name() -> str:
    threads = torch.get_num_threads()
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        listed = ""
    model = re.search(r"model name\s*: *(.+)", listed)
    name = model[1].strip() if model else platform.processor() or "CPU"
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def set_deterministic(on: bool) -> None:
    """Makes torch use deterministic kernels only, and raise where it has none; or ends that. A setting of the process,
    before its first matmul: cuBLAS reads its variable once."""
    if on:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if on != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: seconds at every start
        torch.use_deterministic_algorithms(on)
    # The engine reads only what it has written: nothing need be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(not on)  # cuDNN's attention has no deterministic backward pass


def read_memory(device: str) -> MemoryReading:
    if device.startswith("cuda"):
        counted = torch.cuda.memory_stats(device)  # one call: each single counter builds this whole table
        return MemoryReading(*(counted.get(f"{kind}_bytes.all.{when}", 0)
                               for when in ("current", "peak") for kind in ("allocated", "reserved")))
    if device.startswith("mps"):
        return MemoryReading(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())
    return MemoryReading()


def reset_peaks(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()
