"""Pasted output of nvidia-smi, `nvidia-smi --query-gpu=… --format=csv` or gpustat, or a row or cell of it → memory and
processes per GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..core.units import GiB, MiB, ascii_digits
from .oom_message import clean

MAX_LINE = 200  # characters; nvidia-smi's lines have fewer than 100
_NAME = re.compile(r"^\W*(\d+)\s+(\S.*?)\s+(?:On|Off|N/A|TCC|WDDM|MCDM)\s*[|│]\s*[0-9A-Fa-f]{4,8}:")
_USED = re.compile(r"(\d+|N/A)\s*(?:MiB)?\s*/\s*(\d+)\s*MiB")
# A MIG device: | GPU  GI  CI  MIG |  used / total  |
_MIG = re.compile(r"^\W*(\d+)\s+(\d+)\s+\d+\s+\d+\s*[|│]\s*(\d+)\s*MiB\s*/\s*(\d+)\s*MiB")
_PROCESS = re.compile(r"^\W*(\d+)\s+(?:(N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+(C\+G|M\+C|C|G)\s+(\S.*?)\s+"
                      r"(\d+\s*MiB|N/A)\W*$")
# gpustat: [0] NVIDIA GeForce RTX 4070 | 50'C, 30 % | 6582 / 12282 MB | alice:python/2211(4464M)
_GPUSTAT = re.compile(r"^\[(\d+)\]\s*(\S.*?)\s*[|│].*[|│]\s*(\d+)\s*/\s*(\d+)\s*MB\b(.*)")
_GPUSTAT_PROCESS = re.compile(r"([\w.+-]+)(?:/(\d+))?\((\d+)M\)")  # without -c and -p, users instead of names
# nvtop: PID USER DEV TYPE GPU GPU-MEM CPU HOST-MEM Command
_NVTOP_PROCESS = re.compile(r"^\s*(\d+)\s+\S+\s+\d+\s+(Compute|Graphic|Both)\D.*?\s(\d+)MiB\s.*?MiB\s+(\S.*)")
# A figure per line: nvidia-smi -q, in MiB, and rocm-smi --showmeminfo vram, in bytes
_LISTED = {MiB: re.compile(r"FB Memory Usage\s+Total\s*: (\d{1,9}) MiB(?:\s+Reserved\s*: .*)?\s+Used\s*: (\d{1,9})"),
           1: re.compile(r"VRAM Total Memory \(B\): (\d{1,15})\s+.*?VRAM Total Used Memory \(B\): (\d{1,15})")}
# A cell: "6582MiB / 12282MiB", "6.4 of 12 GiB", "6582 / 12282". Such tools print MB and GB and mean MiB and GiB.
_UNIT = r"\s*([MG])?i?B?\b"
_NUMBER = r"(\d{1,9}(?:[.,]\d{1,9})?)"
_CELL = re.compile(rf"(?<![\w.,]){_NUMBER}{_UNIT}\s*(?:/|of)\s*{_NUMBER}{_UNIT}", re.IGNORECASE)
_CSV_CELL = re.compile(r"(\d+)(?:\s*MiB)?")
_SIZE_ALONE = re.compile(rf"{_NUMBER}{_UNIT}", re.IGNORECASE)
_PYTHON_ROW = re.compile(r"(\S*python\S*)\s.*?(\d+)\s*MiB", re.IGNORECASE)  # the end of a row of the process table
_HUGE = re.compile(r"\d{16}")
# Windows' Task Manager: "Shared GPU memory 5.0/15.9 GB", the CPU RAM that the GPU uses
_SHARED = re.compile(r"(?:shared|gemeinsam|partagé|compartid|condivis|共享|共有|общ)[^\d\n]{0,40}\n?\s*"
                     rf"{_NUMBER}{_UNIT}\s*(?:/|of)\s*{_NUMBER}{_UNIT}", re.IGNORECASE)
MAX_FRAGMENT = 2000  # characters; in a longer text, 2 / 3 GB is a download
MIN_TOTAL = 500 * MiB  # of a GPU


@dataclass(frozen=True)
class SmiProcess:
    """One row of the process table."""

    pid: int
    name: str
    nbytes: int | None  # None: printed as N/A (WSL, Windows)
    kind: str = ""      # C: computes; G: graphics; empty: not known

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
    total: int | None   # None: a row or cell without it
    processes: tuple[SmiProcess, ...] = ()
    gpu_instance: int | None = None  # of a MIG device
    shared: int | None = None  # CPU RAM that the GPU uses, as Windows' Task Manager shows it

    @property
    def runs(self) -> list[SmiProcess]:
        """The processes that may be training runs: those of Python, or else those that compute."""
        return ([each for each in self.processes if each.computes]
                or [each for each in self.processes if each.kind == "C"])


def parse_nvidia_smi(text: str) -> tuple[SmiGpu, ...]:
    """The GPUs of the first nvidia-smi output in a text, or their MIG devices; empty if there is none."""
    lines = [line for line in clean(text).split("\n") if _is_plausible(line)]
    return _parse_table(lines) or _parse_csv(lines) or _parse_gpustat(lines) or _parse_list(lines)


def parse_fragment(text: str) -> SmiGpu | None:
    """The GPU of a row or cell of such an output, or of a size alone: 6582MiB. None if it is neither."""
    if len(text) > MAX_FRAGMENT:
        return None
    text = ascii_digits(clean(text))
    shared = _SHARED.search(text)
    if shared:
        text = text.replace(shared[0], "")
    lines = [line.strip(" |│") for line in text.split("\n") if line.strip(" |│")]
    used, total, processes = None, None, list[SmiProcess]()
    for line in filter(_is_plausible, lines):
        if found := _PROCESS.match(line):
            processes.append(_process(found))
        elif found := _NVTOP_PROCESS.match(line):
            processes.append(SmiProcess(int(found[1]), found[4], int(found[3]) * MiB, found[2][0]))
        elif found := _PYTHON_ROW.search(line):
            processes.append(SmiProcess(0, found[1].strip(","), int(found[2]) * MiB))
        elif total is None and (sizes := _used_and_total(line)):
            used, total = sizes
    if len(lines) == 1 and total is None and not processes and (found := _SIZE_ALONE.fullmatch(lines[0])):
        used = _bytes(found[1], found[2])
    if used is None and not processes:
        return None
    return SmiGpu(0, "", used, total, tuple(processes), shared=shared and _bytes(shared[1], shared[2] or shared[4]))


def _is_plausible(line: str) -> bool:
    """Whether the line is short enough, and so are its numbers: none of 16 digits is a figure of nvidia-smi."""
    return len(line) < MAX_LINE and _HUGE.search(line) is None


def _used_and_total(line: str) -> tuple[int, int] | None:
    """Of "6582MiB / 12282MiB" or of csv without a header, with or without units: 6582, 12282."""
    cells = [int(cell[1]) * MiB for each in line.split(",") if (cell := _CSV_CELL.fullmatch(each.strip()))]
    if len(cells) > 2 and cells[0] < 64 * MiB:  # the GPU's index
        del cells[0]
    sizes = sorted(cells[:2])
    found = next((cell for cell in _CELL.finditer(line) if cell[2] or cell[4] or cell[0] == line), None)
    if len(sizes) < 2 and found:
        sizes = [_bytes(found[1], found[2] or found[4]), _bytes(found[3], found[4] or found[2])]
    return (sizes[0], sizes[1]) if len(sizes) == 2 and sizes[0] <= sizes[1] and sizes[1] >= MIN_TOTAL else None


def _bytes(number: str, unit: str | None) -> int:
    """MiB if there is no unit."""
    return round(float(number.replace(",", ".")) * (GiB if (unit or "").lower() == "g" else MiB))


def _process(found: re.Match[str]) -> SmiProcess:
    return SmiProcess(int(found[3]), found[5].strip(), None if found[6] == "N/A" else
                      int(re.sub(r"\D", "", found[6])) * MiB, found[4])


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
            owner = int(found[1]), int(found[2]) if (found[2] or "").isdecimal() else None
            processes.setdefault(owner, []).append(_process(found))
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
        index = int(row["index"]) if row.get("index", "").isdecimal() else len(found)
        if total is None or index in found:
            break
        found[index] = SmiGpu(index, row.get("name", ""), int(used[1]) * MiB if used else None, int(total[1]) * MiB)
    return tuple(found.values())


def _parse_list(lines: list[str]) -> tuple[SmiGpu, ...]:
    """A figure per line, the GPUs in their order."""
    found = [(int(used) * unit, int(total) * unit) for unit, pattern in _LISTED.items()
             for total, used in pattern.findall("\n".join(lines))]
    return tuple(SmiGpu(index, "", used, total) for index, (used, total) in enumerate(found))


def _parse_gpustat(lines: list[str]) -> tuple[SmiGpu, ...]:
    """gpustat, whose MB are MiB. Only `gpustat -cp` prints names and ids of processes; without it, their users."""
    found: dict[int, SmiGpu] = {}
    for line in filter(None, map(_GPUSTAT.match, lines)):
        processes = tuple(SmiProcess(int(pid or 0), name, int(mib) * MiB)
                          for name, pid, mib in _GPUSTAT_PROCESS.findall(line[5]))
        found.setdefault(int(line[1]), SmiGpu(int(line[1]), line[2], int(line[3]) * MiB, int(line[4]) * MiB,
                                                 processes))
    return tuple(found.values())
