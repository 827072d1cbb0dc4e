"""nvidia-smi's screen, pasted: each GPU, what is used of it and by whom; None where it prints N/A (WSL, Windows)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..units import MiB
from .pasted import cleaned

LONGEST_LINE = 200  # nvidia-smi's are under 100 characters
_NAME = re.compile(r"^\W*(\d+)\s+(\S.*?)\s+(?:On|Off|N/A|TCC|WDDM|MCDM)\s*[|│]\s*[0-9A-Fa-f]{4,8}:")
_USED = re.compile(r"(\d+|N/A)\s*(?:MiB)?\s*/\s*(\d+)\s*MiB")
_PROCESS = re.compile(r"^\W*(\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+(?:C\+G|M\+C|C|G)\s+(\S.*?)\s+"
                      r"(\d+\s*MiB|N/A)\W*$")


@dataclass(frozen=True)
class ScreenProcess:
    pid: int
    name: str
    nbytes: int | None

    @property
    def computes(self) -> bool:
        """Whether it looks like a training run."""
        return "python" in self.name.lower() or "torchrun" in self.name.lower()


@dataclass(frozen=True)
class ScreenGpu:
    index: int
    name: str           # may be cut: "NVIDIA GeForce ..."
    used: int | None
    total: int
    processes: tuple[ScreenProcess, ...] = ()


def parse_screen(text: str) -> tuple[ScreenGpu, ...]:
    """The GPUs of the first screen in a text; none where there is no such screen."""
    gpus: dict[int, ScreenGpu] = {}
    processes: dict[int, list[ScreenProcess]] = {}
    named: tuple[int, str] | None = None
    for line in (line for line in cleaned(text).split("\n") if len(line) < LONGEST_LINE):
        if found := _NAME.match(line):
            named = int(found[1]), found[2].strip()
        elif named and (found := _USED.search(line)):
            index, name = named
            if index in gpus:
                break  # the next screen of `nvidia-smi -l`
            gpus[index] = ScreenGpu(index, name, None if found[1] == "N/A" else int(found[1]) * MiB,
                                    int(found[2]) * MiB)
            named = None
        elif found := _PROCESS.match(line):
            size = None if found[4] == "N/A" else int(re.sub(r"\D", "", found[4])) * MiB
            processes.setdefault(int(found[1]), []).append(ScreenProcess(int(found[2]), found[3].strip(), size))
    return tuple(ScreenGpu(gpu.index, gpu.name, gpu.used, gpu.total, tuple(processes.get(gpu.index, ())))
                 for gpu in gpus.values())
