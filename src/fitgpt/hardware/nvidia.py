"""The NVIDIA GPUs of this machine and their processes, by NVML or nvidia-smi, without torch."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..core.errors import DeviceError
from ..core.units import MiB


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds GPU memory."""

    pid: int
    name: str            # "python3.11"
    nbytes: int | None   # None: the driver does not say
    kind: str = "other"  # "desktop": the graphical session; "app": what runs in it; "run": the run watched; "other"


@dataclass(frozen=True)
class GpuReading:
    """One GPU as the driver reports it. None: not reported."""

    index: int
    name: str
    uuid: str | None = None
    cc: str | None = None              # "8.9"
    driver_version: str | None = None  # "580.65.06"
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None  # the driver's own, counted in neither free nor used
    processes: tuple[GpuProcess, ...] = ()  # the largest first

    @property
    def usable_bytes(self) -> int | None:
        """The total that CUDA reports: on an H200 the difference is exact to the byte."""
        if self.total_bytes is None or self.reserved_bytes is None:
            return None
        return self.total_bytes - self.reserved_bytes


@dataclass(frozen=True)
class Survey:
    """The GPUs that this process may use, those that CUDA_VISIBLE_DEVICES hides, and why there are none."""

    gpus: tuple[GpuReading, ...] = ()
    hidden: tuple[GpuReading, ...] = ()
    reason: str = ""      # why there are no readings at all
    faulty: bool = False  # a driver is installed but does not work: not the same as no GPU
    chosen: str | None = None  # CUDA_VISIBLE_DEVICES


def gpus(env: Mapping[str, str] | None = None) -> list[GpuReading]:
    """The GPUs that this process may use; empty where there is no driver, for any reason (`survey` has it)."""
    return list(survey(env).gpus)


def survey(env: Mapping[str, str] | None = None) -> Survey:
    """By NVML, or by nvidia-smi where nvidia-ml-py is missing. DeviceError only for CUDA_VISIBLE_DEVICES."""
    everything = with_nvml(_read_all, _init_error)
    if everything is None:
        everything = _survey_by_smi()
    chosen = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    if not everything.gpus:
        return replace(everything, chosen=chosen)  # nothing to check it against: it may mean another vendor's GPUs
    seen = visible(everything.gpus, chosen)
    hidden = tuple(gpu for gpu in everything.gpus if gpu not in seen)
    return replace(everything, gpus=seen, hidden=hidden, chosen=chosen)


HIDES_ALL = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide every GPU; the last is Slurm's


def visible(readings: Sequence[GpuReading], chosen: str | None) -> tuple[GpuReading, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order. A name of no GPU is an error: CUDA would silently ignore
    it and everything after it. Numbers follow the driver's order, by bus."""
    if chosen is None:
        return tuple(readings)
    if chosen.strip() in HIDES_ALL:
        return ()
    names = [name.strip() for name in chosen.split(",")]
    if any(name.startswith("MIG-") for name in names):  # a partition: NVML lists only whole GPUs
        return tuple(readings)
    found = [_named(name, readings, chosen) for name in names]
    if len(set(found)) < len(found):
        raise _wrong_choice(chosen, "names one GPU twice", readings)
    return tuple(found)


def _named(name: str, readings: Sequence[GpuReading], chosen: str) -> GpuReading:
    if name.isdecimal():
        fits = [gpu for gpu in readings if gpu.index == int(name)]
    else:
        fits = [gpu for gpu in readings if name.startswith("GPU-") and gpu.uuid and gpu.uuid.startswith(name)]
    if len(fits) != 1:
        wrong = "more than one GPU" if fits else "no GPU here"
        raise _wrong_choice(chosen, f"names {name!r}, which is {wrong}", readings)
    return fits[0]


def _wrong_choice(chosen: str, wrong: str, readings: Sequence[GpuReading]) -> DeviceError:
    listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in readings) or "none"
    return DeviceError(f"CUDA_VISIBLE_DEVICES={chosen!r} {wrong}. GPUs that the driver lists: {listed}.",
                       "unset CUDA_VISIBLE_DEVICES, or train without a GPU: --device=cpu")


# ---- NVML, through nvidia-ml-py

Answer = TypeVar("Answer")


def with_nvml(read: Callable[[Any], Answer], failed: Callable[[Any, Any], Answer]) -> Answer | None:
    """The result of `read` with NVML initialised, or of `failed` with its error; None where nvidia-ml-py is not
    installed."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return failed(pynvml, error)
    try:
        return read(pynvml)
    finally:
        or_none(pynvml.nvmlShutdown)


def _read_all(pynvml: Any) -> Survey:
    readings = (_read_nvml(pynvml, index) for index in range(or_none(pynvml.nvmlDeviceGetCount) or 0))
    found = tuple(reading for reading in readings if reading is not None)
    return Survey(found, reason="" if found else "the NVIDIA driver lists no GPU")


def _init_error(pynvml: Any, error: Any) -> Survey:
    absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    if error.value in absent:
        return Survey(reason="no NVIDIA driver is installed or loaded")
    return Survey(reason=f"the NVIDIA driver reports: {error}", faulty=True)


def _read_nvml(pynvml: Any, index: int) -> GpuReading | None:
    handle = or_none(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    cc = or_none(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    # version 2 separates the driver's own memory from that of processes
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
        processes=identified(((pid, _text(or_none(pynvml.nvmlSystemGetProcessName, pid)) or "", process.usedGpuMemory)
                              for pid, process in running.items()), getattr(memory, "total", None)),
    )


def or_none(query: Callable[..., Any], *args: Any) -> Any:
    """The result; None where it raises. NVML lacks single queries on single GPUs, each version of it in its own way."""
    try:
        return query(*args)
    except Exception:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# ---- nvidia-smi

_SMI_FIELDS = "index,name,uuid,driver_version,memory.total,memory.free,memory.used,compute_cap"


def _survey_by_smi() -> Survey:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Survey(reason="no NVIDIA driver was found: neither nvidia-ml-py nor nvidia-smi is installed")
    answer = run_smi(smi, "--query-gpu", _SMI_FIELDS)
    if answer is None:  # drivers before 510 lack the last field
        answer = run_smi(smi, "--query-gpu", _SMI_FIELDS.removesuffix(",compute_cap"))
    if answer is None:
        return Survey(reason="nvidia-smi is installed but does not work", faulty=True)
    processes = parse_processes(run_smi(smi, "--query-compute-apps", "gpu_uuid,pid,used_memory,process_name") or "")
    found = tuple(replace(gpu, processes=identified(processes.get(gpu.uuid or "", ()), gpu.total_bytes))
                  for gpu in parse_smi(answer))
    return Survey(found, reason="" if found else "the NVIDIA driver lists no GPU")


def run_smi(smi: str, query: str, fields: str) -> str | None:
    """Its output; None where it fails."""
    try:
        done = subprocess.run([smi, f"{query}={fields}", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_smi(answer: str) -> tuple[GpuReading, ...]:
    """CSV lines of nvidia-smi, in the order of _SMI_FIELDS. Other lines are skipped."""
    return tuple(
        GpuReading(index=int(row[0]), name=row[1], uuid=_known(row[2]), driver_version=_known(row[3]),
                   total_bytes=_mib(row[4]), free_bytes=_mib(row[5]), used_bytes=_mib(row[6]),
                   cc=_known(row[7]) if len(row) > 7 else None)
        for row in smi_rows(answer) if len(row) >= 7 and row[0].isdecimal())


def parse_processes(answer: str) -> dict[str, list[tuple[int, str, int | None]]]:
    """CSV lines of nvidia-smi → (pid, name, bytes) per process, by the GPU's UUID."""
    found: dict[str, list[tuple[int, str, int | None]]] = {}
    for row in smi_rows(answer):
        if len(row) >= 4 and row[1].isdecimal():
            found.setdefault(row[0], []).append((int(row[1]), ", ".join(row[3:]), _mib(row[2])))
    return found


def smi_rows(answer: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(answer), skipinitialspace=True)]


def _known(cell: str) -> str | None:
    return None if not cell or cell.startswith("[") or cell == "N/A" else cell  # "[N/A]", "[Not Supported]"


def _mib(cell: str) -> int | None:
    return int(cell) * MiB if cell.isdecimal() else None


# ---- processes on a GPU

# Names of programs as drivers give them, without .exe: the graphical session itself, and what people run in it.
_SESSION = """
    xorg x xwayland gnome-shell gnome-session-binary mutter-x11-frames kwin kwin_x11 kwin_wayland plasmashell krunner
    ksmserver cinnamon muffin marco xfwm4 compiz compton picom sway hyprland weston cosmic-comp budgie-wm
    gdm-x-session gdm-wayland-session sddm-greeter lightdm-gtk-greeter gnome-remote-desktop-daemon xrdp
    xdg-desktop-portal xdg-desktop-portal-gnome xdg-desktop-portal-kde gnome-control-center gjs windowserver
    dwm explorer csrss shellexperiencehost shellhost searchhost searchapp startmenuexperiencehost textinputhost lockapp
    systemsettings applicationframehost widgets phoneexperiencehost nvcontainer
    """
_APPS = """
    chrome chromium chromium-browser google-chrome firefox firefox-bin brave msedge msedgewebview2 opera vivaldi
    thunderbird evolution code code-insiders cursor electron slack discord teams ms-teams zoom telegram-desktop
    signal-desktop whatsapp spotify steam steamwebhelper obs obs64 vlc mpv totem nautilus dolphin gnome-terminal-server
    gnome-terminal- ptyxis gnome-text-editor gnome-calculator kitty alacritty wezterm-gui ghostty konsole
    windowsterminal soffice.bin gimp blender
    """


def identified(processes: Iterable[tuple[int, str, int | None]], total_bytes: int | None) -> tuple[GpuProcess, ...]:
    """(pid, name, bytes) as a driver gives them → processes, the largest first.

    Drivers report more bytes than the GPU has where they do not know the size.
    """
    found = []
    for pid, raw_name, nbytes in processes:
        name = program_name(raw_name) or _name_in_proc(pid) or f"process {pid}"
        known = nbytes is not None and (total_bytes is None or nbytes <= total_bytes)
        found.append(GpuProcess(pid, name, nbytes if known else None, kind_of(name)))
    return tuple(sorted(found, key=lambda one: (-(one.nbytes or 0), one.pid)))


def program_name(command: str) -> str:
    """'chrome' of '/opt/google/chrome/chrome --type=gpu-process …'. Drivers give paths, some with arguments."""
    path = re.split(r"\s+-", command.strip())[0]
    return re.split(r"[\\/]", path)[-1].strip()


def kind_of(name: str) -> str:
    plain = name.lower().removesuffix(".exe")
    return "desktop" if plain in _SESSION.split() else "app" if plain in _APPS.split() else "other"


def _name_in_proc(pid: int) -> str:
    """Empty for a process of another container; there the pid may be another process of this one."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
