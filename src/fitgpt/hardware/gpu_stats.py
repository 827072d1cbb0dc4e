"""What each GPU is doing now, from the driver: memory, utilisation, power, temperature, clocks, and its processes."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from .nvidia import GpuProcess, or_none, run_smi, smi_rows, survey, with_nvml

# NVML's bits for what keeps clocks low. Bit 0x1, an idle GPU, is no throttling.
_REASONS = {0x2: "clocks set by hand", 0x4: "power limit", 0x8: "hardware slowdown", 0x10: "sync boost",
            0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake (hardware)", 0x100: "display clocks",
            0x200: "board limit", 0x400: "reliability"}
_IDLE = 0x1


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


def read_gpus() -> tuple[tuple[GpuState, ...], str]:
    """Every GPU that the driver lists, whatever CUDA_VISIBLE_DEVICES hides; and why there is none. Never raises."""
    found = survey({})
    counters = with_nvml(lambda nvml: {gpu.index: _nvml_counters(nvml, gpu.index) for gpu in found.gpus},
                         lambda nvml, error: {})  # `survey` has the reason
    if counters is None:
        counters = _smi_counters() if found.gpus else {}
    states = tuple(GpuState(gpu.index, gpu.name, used_bytes=gpu.used_bytes, free_bytes=gpu.free_bytes,
                            total_bytes=gpu.total_bytes, programs=gpu.processes, **counters.get(gpu.index, {}))
                   for gpu in found.gpus)
    return states, found.reason


# ---- NVML

def _nvml_counters(nvml: Any, index: int) -> dict[str, Any]:
    """Each counter by itself: GPUs, drivers and versions of the library lack different ones."""
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
        "throttled": throttle_reasons(reasons),
    }


def throttle_reasons(bits: int | None) -> tuple[str, ...] | None:
    if not isinstance(bits, int):
        return None
    named = tuple(reason for bit, reason in _REASONS.items() if bits & bit)
    unnamed = bits & ~(sum(_REASONS) | _IDLE)
    return (*named, f"reason {unnamed:#x}") if unnamed else named


# ---- nvidia-smi

_FIELDS = "index,utilization.gpu,power.draw,enforced.power.limit,temperature.gpu,clocks.sm,clocks.max.sm"
_REASON_FIELDS = (",clocks_event_reasons.active", ",clocks_throttle_reasons.active", "")  # new, old, neither


def _smi_counters() -> dict[int, dict[str, Any]]:
    smi = shutil.which("nvidia-smi")
    return parse_counters(run_smi(smi, "--query-gpu", _FIELDS + _reason_field(smi)) or "") if smi else {}


@cache
def _reason_field(smi: str) -> str:
    """nvidia-smi rejects a query that contains an unknown field."""
    return next((field for field in _REASON_FIELDS if run_smi(smi, "--query-gpu", _FIELDS + field) is not None), "")


def parse_counters(answer: str) -> dict[int, dict[str, Any]]:
    """CSV lines of nvidia-smi, in the order of _FIELDS → counters by GPU. A cell that is no number is None."""
    def rounded(cell: str) -> int | None:
        number = _number(cell)
        return None if number is None else round(number)

    return {int(row[0]): {
        "utilisation": rounded(row[1]), "watts": _number(row[2]), "watt_limit": _number(row[3]),
        "celsius": rounded(row[4]), "clock_mhz": rounded(row[5]), "top_clock_mhz": rounded(row[6]),
        "throttled": throttle_reasons(_bits(row[7])) if len(row) > 7 else None}
        for row in smi_rows(answer) if len(row) >= 7 and row[0].isdecimal()}


def _bits(cell: str) -> int | None:
    return int(cell, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell) else None


def _number(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", cell) else None
