"""How much of the host's memory a program may still take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SHARE = 0.8
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = MEMINFO, group: Path = CGROUP) -> int | None:
    """What is available, or less where a container may take less; None where the system does not say."""
    def available() -> int:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))

    def allowed() -> int:
        used = int((group / "memory.current").read_text()) - (or_none(cached) or 0)
        return max(int((group / "memory.max").read_text()) - used, 0)

    def cached() -> int:
        """Of what counts as used: files read before, which make room."""
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))

    known = [nbytes for nbytes in (or_none(available), or_none(allowed)) if nbytes is not None]
    return min(known, default=None)


def spare_memory() -> int | None:
    """What a run may keep there: a share, because others will want some too."""
    available = available_memory()
    return None if available is None else int(SHARE * available)


def or_none(ask: Callable[[], int]) -> int | None:
    """What a system answers, or None where it does not."""
    try:
        return ask()
    except (OSError, ValueError, StopIteration, IndexError):
        return None
