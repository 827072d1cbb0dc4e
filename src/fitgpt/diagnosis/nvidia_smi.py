"""Pasted output of nvidia-smi, `nvidia-smi --query-gpu=… --format=csv` or gpustat → memory and processes per GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..core.units import MiB
from .oom_message import clean

MAX_LINE = 200  # characters; nvidia-smi's lines have fewer than 100
_NAME = re.compile(r"^\W*(\d+)\s+(\S.*?)\s+(?:On|Off|N/A|TCC|WDDM|MCDM)\s*[|│]\s*[0-9A-Fa-f]{4,8}:")
_USED = re.compile(r"(\d+|N/A)\s*(?:MiB)?\s*/\s*(\d+)\s*MiB")
# A MIG device: | GPU  GI  CI  MIG |  used / total  |
_MIG = re.compile(r"^\W*(\d+)\s+(\d+)\s+\d+\s+\d+\s*[|│]\s*(\d+)\s*MiB\s*/\s*(\d+)\s*MiB")
_PROCESS = re.compile(r"^\W*(\d+)\s+(?:(N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+(?:C\+G|M\+C|C|G)\s+(\S.*?)\s+"
                      r"(\d+\s*MiB|N/A)\W*$")
# gpustat: [0] NVIDIA GeForce RTX 4070 | 50'C, 30 % | 6582 / 12282 MB | alice:python/2211(4464M)
_GPUSTAT = re.compile(r"^\[(\d+)\]\s*(\S.*?)\s*[|│].*[|│]\s*(\d+)\s*/\s*(\d+)\s*MB\b(.*)")
_GPUSTAT_PROCESS = re.compile(r"([\w.+-]+)/(\d+)\((\d+)M\)")


@dataclass(frozen=True)
class SmiProcess:
    """One row of the process table."""

    pid: int
    name: str
    nbytes: int | None  # None: printed as N/A (WSL, Windows)

    @property
    def computes(self) -> bool:
        """Whether it looks like a training run."""
        return "python" in self.name.lower() or "torchrun" in self.name.lower()


@dataclass(frozen=True)
class SmiGpu:
    """One GPU, or one MIG device of it, with its processes."""

    index: int
    name: str           # nvidia-smi may truncate it: "NVIDIA GeForce ..."
    used: int | None
    total: int
    processes: tuple[SmiProcess, ...] = ()
    gpu_instance: int | None = None  # of a MIG device


def parse_nvidia_smi(text: str) -> tuple[SmiGpu, ...]:
    """The GPUs of the first nvidia-smi output in a text, or their MIG devices; empty if there is none."""
    lines = [line for line in clean(text).split("\n") if len(line) < MAX_LINE]
    return _parse_table(lines) or _parse_csv(lines) or _parse_gpustat(lines)


def _parse_table(lines: list[str]) -> tuple[SmiGpu, ...]:
    """Plain `nvidia-smi`."""
    gpus: dict[int, SmiGpu] = {}
    mig: dict[tuple[int, int], SmiGpu] = {}
    processes: dict[tuple[int, int | None], list[SmiProcess]] = {}
    named: tuple[int, str] | None = None
    for line in lines:
        if found := _NAME.match(line):
            named = int(found[1]), found[2].strip()
        elif named and (found := _USED.search(line)):
            index, name = named
            if index in gpus:
                break  # the second output of `nvidia-smi -l`
            gpus[index] = SmiGpu(index, name, None if found[1] == "N/A" else int(found[1]) * MiB,
                                    int(found[2]) * MiB)
            named = None
        elif (found := _MIG.match(line)) and int(found[1]) in gpus:
            index, instance = int(found[1]), int(found[2])
            mig[index, instance] = SmiGpu(index, gpus[index].name, int(found[3]) * MiB, int(found[4]) * MiB,
                                          gpu_instance=instance)
        elif found := _PROCESS.match(line):
            size = None if found[5] == "N/A" else int(re.sub(r"\D", "", found[5])) * MiB
            owner = int(found[1]), int(found[2]) if (found[2] or "").isdigit() else None
            processes.setdefault(owner, []).append(SmiProcess(int(found[3]), found[4].strip(), size))
    whole = (gpu for gpu in gpus.values() if all(index != gpu.index for index, _ in mig))
    return tuple(replace(gpu, processes=tuple(processes.get((gpu.index, gpu.gpu_instance), ())))
                 for gpu in (*whole, *mig.values()))


def _parse_csv(lines: list[str]) -> tuple[SmiGpu, ...]:
    """One row per GPU below a header row: index, name, memory.used [MiB], memory.total [MiB] …, in any order."""
    at = next((at for at, line in enumerate(lines) if "memory.used" in line and "memory.total" in line), len(lines))
    names = [name.split("[")[0].strip() for name in lines[at].split(",")] if at < len(lines) else []
    found: dict[int, SmiGpu] = {}
    for line in lines[at + 1:]:
        row = dict(zip(names, (cell.strip() for cell in line.split(",")), strict=False))
        total, used = (re.match(r"(\d+)(?: MiB)?$", row.get(f"memory.{which}", "")) for which in ("total", "used"))
        index = int(row["index"]) if row.get("index", "").isdigit() else len(found)
        if total is None or index in found:
            break
        found[index] = SmiGpu(index, row.get("name", ""), int(used[1]) * MiB if used else None, int(total[1]) * MiB)
    return tuple(found.values())


def _parse_gpustat(lines: list[str]) -> tuple[SmiGpu, ...]:
    """gpustat, whose MB are MiB. Only `gpustat -cp` prints names and ids of processes."""
    found: dict[int, SmiGpu] = {}
    for line in filter(None, map(_GPUSTAT.match, lines)):
        processes = tuple(SmiProcess(int(pid), name, int(mib) * MiB)
                          for name, pid, mib in _GPUSTAT_PROCESS.findall(line[5]))
        found.setdefault(int(line[1]), SmiGpu(int(line[1]), line[2], int(line[3]) * MiB, int(line[4]) * MiB,
                                                 processes))
    return tuple(found.values())
