"""What is left of the host's memory: the machine's, or less where a container may take less."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitgpt.commands import doctor
from fitgpt.core.units import GiB
from fitgpt.hardware import host

MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1024 kB\nMemAvailable: {30 * 2**20} kB\n"


def left(folder: Path, meminfo: str = "", **group: str) -> int | None:
    (folder / "meminfo").write_text(meminfo)
    for name, text in group.items():
        (folder / f"memory.{name}").write_text(text)
    return host.available_memory(folder / "meminfo", folder)


def test_what_programs_hold_is_not_available(tmp_path: Path) -> None:
    assert left(tmp_path, MEMINFO) == 30 * GiB


@pytest.mark.parametrize(("limit", "expected"), [(8 * GiB, 5 * GiB), (100 * GiB, 30 * GiB), ("max", 30 * GiB),
                                                 (2 * GiB, 0)])
def test_a_container_gets_no_more_than_it_may_take(tmp_path: Path, limit: int | str, expected: int) -> None:
    assert left(tmp_path, MEMINFO, max=f"{limit}\n", current=f"{3 * GiB}\n") == expected


def test_files_that_a_container_has_read_make_room(tmp_path: Path) -> None:
    stat = f"anon {GiB}\ninactive_file {2 * GiB}\nactive_file 0\n"
    assert left(tmp_path, MEMINFO, max=str(8 * GiB), current=str(3 * GiB), stat=stat) == 7 * GiB


def test_a_system_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert left(tmp_path, "MemAvailable: lots\n") is None
    assert host.available_memory(tmp_path / "nowhere", tmp_path / "nowhere") is None


def test_the_doctor_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 7)
    assert doctor.read_machine().ram == 7
