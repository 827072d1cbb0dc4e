"""What is said to be on the disk has left Python's buffers before it is synced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fitgpt.atomic import write_atomically


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
