"""The NVIDIA GPUs of this machine, by NVML, without torch: memory, processes, power, clocks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import DeviceError
from .host import or_none


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


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment. None: not reported."""

    index: int
    name: str
    used_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    utilisation: int | None = None             # percent of the last moment in which some kernel ran
    watts: float | None = None
    watt_limit: float | None = None
    celsius: int | None = None
    clock_mhz: int | None = None
    top_clock_mhz: int | None = None
    throttled: tuple[str, ...] | None = None   # what keeps the clocks low; () = nothing
    programs: tuple[GpuProcess, ...] = ()


def survey(env: Mapping[str, str] | None = None) -> Survey:
    """The GPUs that NVML lists, divided by CUDA_VISIBLE_DEVICES; DeviceError where that names no GPU."""
    chosen = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml
    except ImportError:
        return Survey(reason="nvidia-ml-py is not installed", chosen=chosen)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return Survey(reason="no NVIDIA driver is installed or loaded", chosen=chosen)
        return Survey(reason=f"the NVIDIA driver reports: {error}", faulty=True, chosen=chosen)
    found = _readings(pynvml)
    or_none(pynvml.nvmlShutdown)
    if not found:  # nothing to check CUDA_VISIBLE_DEVICES against: it may mean another vendor's GPUs
        return Survey(reason="the NVIDIA driver lists no GPU", chosen=chosen)
    seen = visible(found, chosen)
    return Survey(seen, tuple(gpu for gpu in found if gpu not in seen), chosen=chosen)


def read_gpus() -> tuple[tuple[GpuState, ...], str]:
    """Every GPU that the driver lists, whatever CUDA_VISIBLE_DEVICES hides; and why there is none. Never raises."""
    found = survey({})
    if not found.gpus:
        return (), found.reason
    import pynvml

    or_none(pynvml.nvmlInit)  # where it fails, so does every counter
    states = tuple(GpuState(gpu.index, gpu.name, used_bytes=gpu.used_bytes, free_bytes=gpu.free_bytes,
                            total_bytes=gpu.total_bytes, programs=gpu.processes, **_counters(pynvml, gpu.index))
                   for gpu in found.gpus)
    or_none(pynvml.nvmlShutdown)
    return states, ""


HIDES_ALL = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide every GPU; the last is Slurm's


def visible(readings: Sequence[GpuReading], chosen: str | None) -> tuple[GpuReading, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order. A name of no GPU is an error: CUDA would silently ignore
    it and everything after it. Numbers follow the driver's order, by bus."""
    def error(wrong: str) -> DeviceError:
        listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in readings)
        return DeviceError(f"CUDA_VISIBLE_DEVICES={chosen!r} {wrong}. GPUs that the driver lists: {listed}.",
                           "unset CUDA_VISIBLE_DEVICES, or train without a GPU: --device=cpu")

    if chosen is None:
        return tuple(readings)
    if chosen.strip() in HIDES_ALL:
        return ()
    names = [name.strip() for name in chosen.split(",")]
    if any(name.startswith("MIG-") for name in names):  # a partition: NVML lists only whole GPUs
        return tuple(readings)
    found: list[GpuReading] = []
    for name in names:
        if name.isdecimal():
            named = [gpu for gpu in readings if gpu.index == int(name)]
        else:
            named = [gpu for gpu in readings if name.startswith("GPU-") and gpu.uuid and gpu.uuid.startswith(name)]
        if len(named) != 1:
            raise error(f"names {name!r}, which is {'more than one GPU' if named else 'no GPU here'}")
        if named[0] in found:
            raise error("names one GPU twice")
        found += named
    return tuple(found)


# ---- figures by NVML, each by itself: GPUs, drivers and versions of the library lack different ones


def _readings(nvml: Any) -> list[GpuReading]:
    def text(query: Callable[..., Any], *args: Any) -> str | None:
        value = or_none(query, *args)
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    found = []
    for index in range(or_none(nvml.nvmlDeviceGetCount) or 0):
        handle = or_none(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        cc = or_none(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        # version 2 separates the driver's own memory from that of processes
        memory = or_none(lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2), handle)
        if memory is None:
            memory = or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
        total = getattr(memory, "total", None)
        running = {process.pid: process
                   for query in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses)
                   for process in or_none(query, handle) or ()}
        found.append(GpuReading(
            index=index,
            name=text(nvml.nvmlDeviceGetName, handle) or "an unnamed GPU",
            uuid=text(nvml.nvmlDeviceGetUUID, handle),
            cc=f"{cc[0]}.{cc[1]}" if cc else None,
            driver_version=text(nvml.nvmlSystemGetDriverVersion),
            total_bytes=total, free_bytes=getattr(memory, "free", None),
            used_bytes=getattr(memory, "used", None), reserved_bytes=getattr(memory, "reserved", None),
            processes=identified(((pid, text(nvml.nvmlSystemGetProcessName, pid) or "", process.usedGpuMemory)
                                  for pid, process in running.items()), total)))
    return found


# NVML's bits for what keeps clocks low. Bit 0x1, an idle GPU, is no throttling.
_REASONS = {0x2: "clocks set by hand", 0x4: "power limit", 0x8: "hardware slowdown", 0x10: "sync boost",
            0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake (hardware)", 0x100: "display clocks",
            0x200: "board limit", 0x400: "reliability"}
_IDLE = 0x1


def _counters(nvml: Any, index: int) -> dict[str, Any]:
    """The fields of a GpuState that are not in a GpuReading."""
    handle = or_none(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    reasons = or_none(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:  # the name before driver 535
        reasons = or_none(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return {
        "utilisation": or_none(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "watts": or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        "watt_limit": or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "celsius": or_none(lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        "clock_mhz": or_none(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        "top_clock_mhz": or_none(lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
        "throttled": throttle_reasons(reasons),
    }


def throttle_reasons(bits: int | None) -> tuple[str, ...] | None:
    if bits is None:
        return None
    named = tuple(reason for bit, reason in _REASONS.items() if bits & bit)
    unnamed = bits & ~(sum(_REASONS) | _IDLE)
    return (*named, f"reason {unnamed:#x}") if unnamed else named


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
        # /proc has no entry for a process of another container, or one of this container with the same number
        name = program_name(raw_name) or or_none(_name_in_proc, pid) or f"process {pid}"
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
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
