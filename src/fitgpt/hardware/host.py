"""How much CPU RAM a program may still use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

SHARE = 0.8  # of the available CPU RAM that a run may use: other programs need some too
MEMINFO, CGROUP, MEMBERSHIP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
Answer = TypeVar("Answer")


def available_memory(meminfo: Path = MEMINFO, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes available, or less where a limit of this process's control group (a container, a systemd unit) or of one
    above it is lower; None where the system does not report it."""
    def available() -> int:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))

    def own_group() -> Path:
        lines = membership.read_text(encoding="utf-8").splitlines()
        return next(root / line.removeprefix("0::/") for line in lines if line.startswith("0::/"))

    def left_in(group: Path) -> int:
        used = int((group / "memory.current").read_text()) - (or_none(cached, group) or 0)
        return max(int((group / "memory.max").read_text()) - used, 0)

    def cached(group: Path) -> int:
        """Page cache, which counts as used and can be reclaimed."""
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))

    own = or_none(own_group) or root
    groups = [root, *(each for each in (own, *own.parents) if each != root and each.is_relative_to(root))]
    known = [or_none(available), *(or_none(left_in, group) for group in groups)]
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def spare_memory() -> int | None:
    """What a run may use of it."""
    available = available_memory()
    return None if available is None else int(SHARE * available)


def or_none(query: Callable[..., Answer], *args: Any) -> Answer | None:
    """The result; None where it raises. Systems, drivers and GPUs lack different figures, each in its own way."""
    try:
        return query(*args)
    except Exception:
        return None
