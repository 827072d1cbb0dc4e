"""nvidia-smi's screen, pasted: each GPU, what is used of it and by whom; None where it prints N/A (WSL, Windows).
Or what `nvidia-smi --query-gpu=… --format=csv` and gpustat print of the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..core.units import MiB
from .pasted import cleaned

LONGEST_LINE = 200  # nvidia-smi's are under 100 characters
_NAME = re.compile(r"^\W*(\d+)\s+(\S.*?)\s+(?:On|Off|N/A|TCC|WDDM|MCDM)\s*[|│]\s*[0-9A-Fa-f]{4,8}:")
_USED = re.compile(r"(\d+|N/A)\s*(?:MiB)?\s*/\s*(\d+)\s*MiB")
# A part of a card that MIG has cut: | GPU  GI  CI  MIG |  used / total  |
_PART = re.compile(r"^\W*(\d+)\s+(\d+)\s+\d+\s+\d+\s*[|│]\s*(\d+)\s*MiB\s*/\s*(\d+)\s*MiB")
_PROCESS = re.compile(r"^\W*(\d+)\s+(?:(N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+(?:C\+G|M\+C|C|G)\s+(\S.*?)\s+"
                      r"(\d+\s*MiB|N/A)\W*$")
# gpustat's: [0] NVIDIA GeForce RTX 4070 | 50'C, 30 % | 6582 / 12282 MB | alice:python/2211(4464M)
_STAT = re.compile(r"^\[(\d+)\]\s*(\S.*?)\s*[|│].*[|│]\s*(\d+)\s*/\s*(\d+)\s*MB\b(.*)")
_STAT_PROCESS = re.compile(r"([\w.+-]+)/(\d+)\((\d+)M\)")


@dataclass(frozen=True)
class ScreenProcess:
    """A line of the list of processes."""

    pid: int
    name: str
    nbytes: int | None

    @property
    def computes(self) -> bool:
        """Whether it looks like a training run."""
        return "python" in self.name.lower() or "torchrun" in self.name.lower()


@dataclass(frozen=True)
class ScreenGpu:
    """A card, as the screen has it."""

    index: int
    name: str           # may be cut: "NVIDIA GeForce ..."
    used: int | None
    total: int
    processes: tuple[ScreenProcess, ...] = ()
    part: int | None = None  # of a card that MIG has cut: the number of its GPU instance


def parse_screen(text: str) -> tuple[ScreenGpu, ...]:
    """The GPUs of the first screen in a text, or the parts that MIG has cut them into; none where there is no such
    screen."""
    lines = [line for line in cleaned(text).split("\n") if len(line) < LONGEST_LINE]
    return _drawn(lines) or _queried(lines) or _listed(lines)


def _drawn(lines: list[str]) -> tuple[ScreenGpu, ...]:
    """The screen that nvidia-smi draws."""
    gpus: dict[int, ScreenGpu] = {}
    parts: dict[tuple[int, int], ScreenGpu] = {}
    processes: dict[tuple[int, int | None], list[ScreenProcess]] = {}
    named: tuple[int, str] | None = None
    for line in lines:
        if found := _NAME.match(line):
            named = int(found[1]), found[2].strip()
        elif named and (found := _USED.search(line)):
            index, name = named
            if index in gpus:
                break  # the next screen of `nvidia-smi -l`
            gpus[index] = ScreenGpu(index, name, None if found[1] == "N/A" else int(found[1]) * MiB,
                                    int(found[2]) * MiB)
            named = None
        elif (found := _PART.match(line)) and int(found[1]) in gpus:
            index, part = int(found[1]), int(found[2])
            parts[index, part] = ScreenGpu(index, gpus[index].name, int(found[3]) * MiB, int(found[4]) * MiB, (), part)
        elif found := _PROCESS.match(line):
            size = None if found[5] == "N/A" else int(re.sub(r"\D", "", found[5])) * MiB
            whose = int(found[1]), int(found[2]) if (found[2] or "").isdigit() else None
            processes.setdefault(whose, []).append(ScreenProcess(int(found[3]), found[4].strip(), size))
    whole = (gpu for gpu in gpus.values() if all(index != gpu.index for index, _ in parts))
    return tuple(replace(gpu, processes=tuple(processes.get((gpu.index, gpu.part), ())))
                 for gpu in (*whole, *parts.values()))


def _queried(lines: list[str]) -> tuple[ScreenGpu, ...]:
    """A row a GPU under a row of names: index, name, memory.used [MiB], memory.total [MiB] …, in any order."""
    at = next((at for at, line in enumerate(lines) if "memory.used" in line and "memory.total" in line), len(lines))
    names = [name.split("[")[0].strip() for name in lines[at].split(",")] if at < len(lines) else []
    found: dict[int, ScreenGpu] = {}
    for line in lines[at + 1:]:
        row = dict(zip(names, (cell.strip() for cell in line.split(",")), strict=False))
        total, used = (re.match(r"(\d+)(?: MiB)?$", row.get(f"memory.{which}", "")) for which in ("total", "used"))
        index = int(row["index"]) if row.get("index", "").isdigit() else len(found)
        if total is None or index in found:
            break
        found[index] = ScreenGpu(index, row.get("name", ""), int(used[1]) * MiB if used else None, int(total[1]) * MiB)
    return tuple(found.values())


def _listed(lines: list[str]) -> tuple[ScreenGpu, ...]:
    """gpustat's, whose MB are MiB. It tells processes by their users, unless asked for names and numbers (-cp)."""
    found: dict[int, ScreenGpu] = {}
    for line in filter(None, map(_STAT.match, lines)):
        processes = tuple(ScreenProcess(int(pid), name, int(mib) * MiB)
                          for name, pid, mib in _STAT_PROCESS.findall(line[5]))
        found.setdefault(int(line[1]), ScreenGpu(int(line[1]), line[2], int(line[3]) * MiB, int(line[4]) * MiB,
                                                 processes))
    return tuple(found.values())
