"""Available CPU RAM: the machine's, or less in a container with a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitgpt.core.units import GiB
from fitgpt.hardware import diagnostics, host

MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1024 kB\nMemAvailable: {30 * 2**20} kB\n"


def available(folder: Path, meminfo: str = "", **group: str) -> int | None:
    (folder / "meminfo").write_text(meminfo)
    for name, text in group.items():
        (folder / f"memory.{name}").write_text(text)
    return host.available_memory(folder / "meminfo", folder, folder / "cgroup")


def test_memory_used_by_programs_is_not_available(tmp_path: Path) -> None:
    assert available(tmp_path, MEMINFO) == 30 * GiB


@pytest.mark.parametrize(("limit", "expected"), [(8 * GiB, 5 * GiB), (100 * GiB, 30 * GiB), ("max", 30 * GiB),
                                                 (2 * GiB, 0)])
def test_a_container_has_at_most_its_limit(tmp_path: Path, limit: int | str, expected: int) -> None:
    assert available(tmp_path, MEMINFO, max=f"{limit}\n", current=f"{3 * GiB}\n") == expected


def test_page_cache_of_a_container_is_available(tmp_path: Path) -> None:
    stat = f"anon {GiB}\ninactive_file {2 * GiB}\nactive_file 0\n"
    assert available(tmp_path, MEMINFO, max=str(8 * GiB), current=str(3 * GiB), stat=stat) == 7 * GiB


def test_an_unknown_figure_is_none(tmp_path: Path) -> None:
    assert available(tmp_path, "MemAvailable: lots\n") is None
    assert host.available_memory(tmp_path / "nowhere", tmp_path / "nowhere", tmp_path / "nowhere") is None


def test_the_lowest_limit_of_its_control_group_and_those_above_counts(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/user.slice/run.scope\n")
    for group, limit in (("user.slice", 9), ("user.slice/run.scope", 12)):
        (tmp_path / group).mkdir()
        (tmp_path / group / "memory.max").write_text(f"{limit * GiB}\n")
        (tmp_path / group / "memory.current").write_text(f"{2 * GiB}\n")
    assert available(tmp_path, MEMINFO) == 7 * GiB


@pytest.mark.parametrize(("limit", "expected"), [(8 * GiB, 7 * GiB), (2**63 - 4096, 30 * GiB)])
@pytest.mark.parametrize("group", ["memory", "memory/docker/abc"])  # as a container sees it, and as the host does
def test_a_limit_of_cgroup_version_1_counts(tmp_path: Path, limit: int, expected: int, group: str) -> None:
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    (tmp_path / group).mkdir(parents=True)
    for name, text in (("limit_in_bytes", limit), ("usage_in_bytes", 3 * GiB),
                       ("stat", f"inactive_file 0\ntotal_inactive_file {2 * GiB}")):
        (tmp_path / group / f"memory.{name}").write_text(f"{text}\n")
    assert available(tmp_path, MEMINFO) == expected
    assert available(tmp_path) == (expected if limit == 8 * GiB else None)


def test_doctor_uses_the_same_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "available_memory", lambda: 7)
    assert diagnostics.read_machine().ram == 7
