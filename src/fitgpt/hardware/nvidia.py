"""What the NVIDIA driver says is on this machine, asked without torch; and whether the environment names it rightly."""

from __future__ import annotations

import csv
import difflib
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..core.errors import DeviceError
from ..core.units import MiB


@dataclass(frozen=True)
class GpuProcess:
    """A program that has memory of the card."""

    pid: int
    name: str | None
    nbytes: int | None


@dataclass(frozen=True)
class GpuReading:
    """One GPU as the driver sees it. None: the driver did not say."""

    index: int
    name: str
    uuid: str | None = None
    cc: str | None = None              # "8.9"
    driver_version: str | None = None  # "580.65.06"
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None  # the driver's own share, counted in neither free nor used
    processes: tuple[GpuProcess, ...] = ()

    @property
    def usable_bytes(self) -> int | None:
        """What CUDA gives of the card: on an H200 the difference is exact to the byte."""
        if self.total_bytes is None or self.reserved_bytes is None:
            return None
        return self.total_bytes - self.reserved_bytes


@dataclass(frozen=True)
class Survey:
    """The GPUs this process may use, those CUDA_VISIBLE_DEVICES hides from it, and why there are none."""

    gpus: tuple[GpuReading, ...] = ()
    hidden: tuple[GpuReading, ...] = ()
    reason: str = ""      # why there are no readings at all
    faulty: bool = False  # a driver is installed and does not answer: not the same as no GPU
    chosen: str | None = None  # CUDA_VISIBLE_DEVICES


def gpus(env: Mapping[str, str] | None = None) -> list[GpuReading]:
    """The GPUs this process may use; empty where there is no driver, whatever the cause (`survey` says which)."""
    return list(survey(env).gpus)


def survey(env: Mapping[str, str] | None = None) -> Survey:
    """Ask NVML, or nvidia-smi where its Python library is missing. Raises DeviceError only for the environment."""
    everything = ask_nvml(_read_all, _no_answer)
    if everything is None:
        everything = _ask_smi()
    chosen = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    if not everything.gpus:
        return replace(everything, chosen=chosen)  # nothing to judge it by: it may mean another vendor's GPUs
    seen = visible(everything.gpus, chosen)
    hidden = tuple(gpu for gpu in everything.gpus if gpu not in seen)
    return replace(everything, gpus=seen, hidden=hidden, chosen=chosen)


HIDES_ALL = ("", "-1", "NoDevFiles")  # the usual values of CUDA_VISIBLE_DEVICES that leave none; the last is Slurm's


def visible(readings: Sequence[GpuReading], chosen: str | None) -> tuple[GpuReading, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of the GPUs, in its order. A name of no GPU is an error: CUDA would
    drop it in silence, with everything after it. Numbers follow the driver's order, by bus."""
    if chosen is None:
        return tuple(readings)
    if chosen.strip() in HIDES_ALL:
        return ()
    words = [word.strip() for word in chosen.split(",")]
    if any(word.startswith("MIG-") for word in words):  # a part of a GPU: NVML lists only whole ones
        return tuple(readings)
    found = [_named(word, readings, chosen) for word in words]
    if len(set(found)) < len(found):
        raise _not_there(chosen, "names one GPU twice", readings)
    return tuple(found)


def _named(word: str, readings: Sequence[GpuReading], chosen: str) -> GpuReading:
    if word.isdecimal():
        fits = [gpu for gpu in readings if gpu.index == int(word)]
    else:
        fits = [gpu for gpu in readings if word.startswith("GPU-") and gpu.uuid and gpu.uuid.startswith(word)]
    if len(fits) != 1:
        wrong = "more than one GPU" if fits else "no GPU here"
        raise _not_there(chosen, f"names {word!r}, which is {wrong}", readings)
    return fits[0]


def _not_there(chosen: str, wrong: str, readings: Sequence[GpuReading]) -> DeviceError:
    there = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in readings) or "none"
    return DeviceError(f"CUDA_VISIBLE_DEVICES={chosen!r} {wrong}. GPUs the driver shows: {there}.",
                       "unset CUDA_VISIBLE_DEVICES, or train without a GPU: --device=cpu")


# NVML, through nvidia-ml-py.

Answer = TypeVar("Answer")


def ask_nvml(read: Callable[[Any], Answer], silent: Callable[[Any, Any], Answer]) -> Answer | None:
    """What `read` finds in the library while it is open, or what `silent` makes of the error where the driver does not
    answer; None where the Python library itself is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return silent(pynvml, error)
    try:
        return read(pynvml)
    finally:
        or_none(pynvml.nvmlShutdown)


def _read_all(pynvml: Any) -> Survey:
    readings = (_read_nvml(pynvml, index) for index in range(or_none(pynvml.nvmlDeviceGetCount) or 0))
    found = tuple(reading for reading in readings if reading is not None)
    return Survey(found, reason="" if found else "the NVIDIA driver shows no GPU")


def _no_answer(pynvml: Any, error: Any) -> Survey:
    absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    if error.value in absent:
        return Survey(reason="no NVIDIA driver is installed or loaded")
    return Survey(reason=f"the NVIDIA driver answers: {error}", faulty=True)


def _read_nvml(pynvml: Any, index: int) -> GpuReading | None:
    handle = or_none(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    cc = or_none(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    # version 2 tells the driver's own share from what processes use
    memory = or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    if memory is None:
        memory = or_none(pynvml.nvmlDeviceGetMemoryInfo, handle)
    running = {process.pid: process
               for ask in (pynvml.nvmlDeviceGetGraphicsRunningProcesses, pynvml.nvmlDeviceGetComputeRunningProcesses)
               for process in or_none(ask, handle) or ()}
    return GpuReading(
        index=index,
        name=_text(or_none(pynvml.nvmlDeviceGetName, handle)) or "an unnamed GPU",
        uuid=_text(or_none(pynvml.nvmlDeviceGetUUID, handle)),
        cc=f"{cc[0]}.{cc[1]}" if cc else None,
        driver_version=_text(or_none(pynvml.nvmlSystemGetDriverVersion)),
        total_bytes=getattr(memory, "total", None), free_bytes=getattr(memory, "free", None),
        used_bytes=getattr(memory, "used", None), reserved_bytes=getattr(memory, "reserved", None),
        processes=tuple(
            GpuProcess(pid, _text(or_none(pynvml.nvmlSystemGetProcessName, pid)), process.usedGpuMemory)
            for pid, process in sorted(running.items())),
    )


def or_none(ask: Callable[..., Any], *args: Any) -> Any:
    try:
        return ask(*args)
    except Exception:  # NVML refuses single questions on single cards, each binding in its own way: ask the others
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# nvidia-smi.

_SMI_FIELDS = "index,name,uuid,driver_version,memory.total,memory.free,memory.used,compute_cap"


def _ask_smi() -> Survey:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Survey(reason="no NVIDIA driver was found: neither nvidia-ml-py nor nvidia-smi is here")
    answer = run_smi(smi, "--query-gpu", _SMI_FIELDS)
    if answer is None:  # drivers before 510 do not know the last field
        answer = run_smi(smi, "--query-gpu", _SMI_FIELDS.removesuffix(",compute_cap"))
    if answer is None:
        return Survey(reason="nvidia-smi is installed and does not answer", faulty=True)
    found = parse_smi(answer)
    return Survey(found, reason="" if found else "the NVIDIA driver shows no GPU")


def run_smi(smi: str, question: str, fields: str) -> str | None:
    """None where it does not answer."""
    try:
        done = subprocess.run([smi, f"{question}={fields}", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_smi(answer: str) -> tuple[GpuReading, ...]:
    """nvidia-smi's csv lines, in the order of _SMI_FIELDS; a line that is not of that shape is left out."""
    return tuple(
        GpuReading(index=int(row[0]), name=row[1], uuid=_known(row[2]), driver_version=_known(row[3]),
                   total_bytes=_mib(row[4]), free_bytes=_mib(row[5]), used_bytes=_mib(row[6]),
                   cc=_known(row[7]) if len(row) > 7 else None)
        for row in smi_rows(answer) if len(row) >= 7 and row[0].isdecimal())


def smi_rows(answer: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(answer), skipinitialspace=True)]


def _known(cell: str) -> str | None:
    return None if not cell or cell.startswith("[") or cell == "N/A" else cell  # "[N/A]", "[Not Supported]"


def _mib(cell: str) -> int | None:
    return int(cell) * MiB if cell.isdecimal() else None


# The allocator's environment. torch reads it when it loads, and answers a mistake with an internal assertion.

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9 honours only the second
ALLOCATOR_DEFAULT = "expandable_segments:True"  # one growing range a pool: far less lost between blocks
_BOOLEAN = ("expandable_segments", "pinned_use_background_threads", "pinned_use_cuda_host_register",
            "pinned_use_hip_host_register", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
            "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom")
_WHOLE = ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb", "pinned_num_register_threads",
          "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
_OTHER = ("roundup_power2_divisions", "garbage_collection_threshold", "per_process_memory_fraction", "backend",
          "pinned_free_catch_all")


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings must be there before torch loads; the user's own are left alone."""
    result = dict(environment)
    if not any(result.get(name) for name in ALLOCATOR_VARIABLES):
        result.update({name: ALLOCATOR_DEFAULT for name in ALLOCATOR_VARIABLES})
    return result


def check_allocator_env(env: Mapping[str, str]) -> None:
    """Refuse what torch 2.11 to 2.13 could not read. An option it may know and we do not is let through."""
    for variable in (*ALLOCATOR_VARIABLES, "PYTORCH_HIP_ALLOC_CONF"):
        if value := env.get(variable, ""):
            wrong = _allocator_fault(value)
            if wrong:
                raise DeviceError(f"{variable}={value!r}: {wrong}. It holds option:value pairs, separated by commas.",
                                  f"unset {variable}, or set it to expandable_segments:True")


def _allocator_fault(text: str) -> str:
    pairs = _pairs(text)
    if isinstance(pairs, str):
        return pairs
    return next((fault for option, value in pairs if (fault := _option_fault(option, value))), "")


def _pairs(text: str) -> list[tuple[str, str]] | str:
    """option:value pairs, a [list] being one value; or what is wrong."""
    pairs, rest = [], "".join(text.split())
    while rest := rest.lstrip(","):
        option, colon, after = rest.partition(":")
        if not colon or "," in option:
            return f"{option.split(',')[0]!r} has no value"
        value, bracket, rest = after.partition("]") if after.startswith("[") else after.partition(",")
        if after.startswith("[") and not bracket:
            return f"the list of {option!r} is not closed"
        if not option or not value:
            return f"{option or ':' + value!r} has no {'value' if option else 'name'}"
        pairs.append((option, value))
    return pairs


def _option_fault(option: str, value: str) -> str:
    if option in _BOOLEAN:
        return "" if value in ("True", "False") else f"{option} is True or False, not {value!r}"
    if option in _WHOLE:
        return "" if value.isdecimal() else f"{option} is a whole number, not {value!r}"
    if option == "garbage_collection_threshold":
        return "" if _between_0_and_1(value) else f"{option} is a number between 0 and 1, not {value!r}"
    if option in _OTHER:
        return ""
    meant = difflib.get_close_matches(option, (*_BOOLEAN, *_WHOLE, *_OTHER), n=1, cutoff=0.85)
    return f"{option!r} is no option of torch's; {meant[0]!r} is" if meant else ""


def _between_0_and_1(value: str) -> bool:
    try:
        return 0 < float(value) < 1
    except ValueError:
        return False
