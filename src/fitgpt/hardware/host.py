"""How much CPU RAM a program may still use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

SHARE = 0.8  # of the available CPU RAM that a run may use: other programs need some too
MEMINFO, CGROUP, MEMBERSHIP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 2**62  # bytes; version 1 reports 2**63 less a page where there is none
Answer = TypeVar("Answer")


class CgroupNames(NamedTuple):
    """Files of a control group, and the entry of memory.stat for the page cache."""

    limit: str
    usage: str
    cached: str


# https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
VERSION_2 = CgroupNames("memory.max", "memory.current", "inactive_file")
VERSION_1 = CgroupNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(meminfo: Path = MEMINFO, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes available, or less where a limit of this process's control group (a container, a systemd unit) or of one
    above it is lower; None where the system does not report it."""
    def available() -> int:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))

    def left_in(group: Path, names: CgroupNames) -> int:
        limit, used = (int((group / name).read_text()) for name in (names.limit, names.usage))
        if limit >= NO_LIMIT:
            raise ValueError(f"no limit: {limit}")
        return max(limit - used + (or_none(cached, group, names) or 0), 0)

    def cached(group: Path, names: CgroupNames) -> int:
        """Page cache, which counts as used and can be reclaimed."""
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{names.cached} "))

    known = [or_none(available)]
    lines = (or_none(membership.read_text) or "").splitlines()
    member_of = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for top, controller, names in ((root, "", VERSION_2), (root / "memory", "memory", VERSION_1)):
        paths = [path for _, controllers, path in member_of if controller in controllers.split(",")]
        own = [top / path.removeprefix("/") for path in paths]
        groups = {top, *own, *(above for each in own for above in each.parents if above.is_relative_to(top))}
        known += [or_none(left_in, group, names) for group in groups]
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
