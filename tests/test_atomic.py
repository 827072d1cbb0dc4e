"""What is said to be on the disk has left Python's buffers before it is synced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fitgpt.atomic import disk_faults, write_atomically
from fitgpt.errors import SystemFault


def test_a_small_file_is_whole_on_the_disk_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(tmp_path / "run.json", "{}\n")
    assert sizes[0] == 3  # the file; after it, its folder
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_file_larger_than_its_disk_or_the_shell_allows_says_which_limit(tmp_path: Path) -> None:
    with pytest.raises(SystemFault, match="File too large") as refused, disk_faults("write", tmp_path):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert "ulimit -f" in refused.value.fix
