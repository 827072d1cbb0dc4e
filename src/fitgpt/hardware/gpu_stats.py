"""What each card is doing now, asked of the driver: memory, load, power, heat, clocks, and whose programs are on it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ..core.units import MiB
from ..sights import CardState, Program
from .nvidia import GpuProcess, GpuReading, ask_nvml, or_none, run_smi, smi_rows, survey

# NVML's bits of what holds a card's clocks down. Bit 0x1, an idle card, is no throttling.
_REASONS = {0x2: "clocks set by hand", 0x4: "power limit", 0x8: "hardware slowdown", 0x10: "sync boost",
            0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake (hardware)", 0x100: "display clocks",
            0x200: "board limit", 0x400: "reliability"}
_IDLE = 0x1

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


def read_cards() -> tuple[tuple[CardState, ...], str]:
    """Every card the driver shows, whatever CUDA_VISIBLE_DEVICES hides; and why there is none. Never raises."""
    found = survey({})
    counted = ask_nvml(lambda nvml: {gpu.index: _count(nvml, gpu.index) for gpu in found.gpus},
                       lambda nvml, error: {})  # survey has said why
    if counted is None:
        counted = _ask_smi(found.gpus)
    return tuple(_state(gpu, counted.get(gpu.index, {})) for gpu in found.gpus), found.reason


def _state(gpu: GpuReading, counted: dict[str, Any]) -> CardState:
    processes = gpu.processes or counted.get("processes", ())
    figures = {name: value for name, value in counted.items() if name != "processes"}
    return CardState(gpu.index, gpu.name, used_bytes=gpu.used_bytes, free_bytes=gpu.free_bytes,
                     total_bytes=gpu.total_bytes, programs=programs(processes, gpu.total_bytes), **figures)


# ---- programs

def programs(processes: Iterable[GpuProcess], total_bytes: int | None) -> tuple[Program, ...]:
    """The largest first. More bytes than the card has are a driver's way to say that it does not know."""
    found = []
    for process in processes:
        name = program_name(process.name) or _name_here(process.pid) or f"process {process.pid}"
        known = process.nbytes is not None and (total_bytes is None or process.nbytes <= total_bytes)
        found.append(Program(process.pid, name, process.nbytes if known else None, kind_of(name)))
    return tuple(sorted(found, key=lambda one: (-(one.nbytes or 0), one.pid)))


def program_name(told: str | None) -> str:
    """'chrome' of '/opt/google/chrome/chrome --type=gpu-process …'. Drivers give paths, flags and all."""
    path = re.split(r"\s+-", (told or "").strip())[0]
    return re.split(r"[\\/]", path)[-1].strip()


def kind_of(name: str) -> str:
    plain = name.lower().removesuffix(".exe")
    return "desktop" if plain in _SESSION.split() else "app" if plain in _APPS.split() else "other"


def _name_here(pid: int) -> str:
    """Asked of this system: of a process in another container it knows nothing, or another one by that number."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ---- NVML

def _count(nvml: Any, index: int) -> dict[str, Any]:
    """Each counter by itself: cards, drivers and versions of the library each lack others."""
    handle = or_none(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return {}
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
        "throttled": throttling(reasons),
    }


def throttling(bits: int | None) -> tuple[str, ...] | None:
    if not isinstance(bits, int):
        return None
    named = tuple(words for bit, words in _REASONS.items() if bits & bit)
    unnamed = bits & ~(sum(_REASONS) | _IDLE)
    return (*named, f"reason {unnamed:#x}") if unnamed else named


# ---- nvidia-smi

_FIELDS = "index,utilization.gpu,power.draw,enforced.power.limit,temperature.gpu,clocks.sm,clocks.max.sm"
_REASON_FIELDS = (",clocks_event_reasons.active", ",clocks_throttle_reasons.active", "")  # new, old, neither


def _ask_smi(gpus: tuple[GpuReading, ...]) -> dict[int, dict[str, Any]]:
    smi = shutil.which("nvidia-smi") if gpus else None
    if smi is None:
        return {}
    counted = parse_counters(run_smi(smi, "--query-gpu", _FIELDS + _reason_field(smi)) or "")
    processes = parse_processes(run_smi(smi, "--query-compute-apps", "gpu_uuid,pid,used_memory,process_name") or "")
    for gpu in gpus:
        counted.setdefault(gpu.index, {})["processes"] = processes.get(gpu.uuid or "", ())
    return counted


@cache
def _reason_field(smi: str) -> str:
    """nvidia-smi refuses a question with one field in it that it does not know."""
    return next((field for field in _REASON_FIELDS if run_smi(smi, "--query-gpu", _FIELDS + field) is not None), "")


def parse_counters(answer: str) -> dict[int, dict[str, Any]]:
    """In the order of _FIELDS; a cell that is no number is not known."""
    def whole(cell: str) -> int | None:
        number = _number(cell)
        return None if number is None else round(number)

    return {int(row[0]): {
        "utilisation": whole(row[1]), "watts": _number(row[2]), "watt_limit": _number(row[3]), "celsius": whole(row[4]),
        "clock_mhz": whole(row[5]), "top_clock_mhz": whole(row[6]),
        "throttled": throttling(_bits(row[7])) if len(row) > 7 else None}
        for row in smi_rows(answer) if len(row) >= 7 and row[0].isdecimal()}


def parse_processes(answer: str) -> dict[str, tuple[GpuProcess, ...]]:
    found: dict[str, tuple[GpuProcess, ...]] = {}
    for row in smi_rows(answer):
        if len(row) >= 4 and row[1].isdecimal():
            nbytes = int(row[2]) * MiB if row[2].isdecimal() else None
            found[row[0]] = (*found.get(row[0], ()), GpuProcess(int(row[1]), ", ".join(row[3:]), nbytes))
    return found


def _bits(cell: str) -> int | None:
    return int(cell, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell) else None


def _number(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", cell) else None
