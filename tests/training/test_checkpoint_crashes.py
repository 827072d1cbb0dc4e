"""Disks that fail, and deaths at any moment: the last checkpoint that was acknowledged still loads. Many more of both:
tests/campaign."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fitgpt.core.errors import SystemFault
from fitgpt.runs.folder import step_folders
from fitgpt.training import checkpoint
from fitgpt.training.checkpoint import clean_leftovers, load, save
from tests.checkpoints import save_step

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


# ---- disks that say no

@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_leaves_older_checkpoints_and_no_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(SystemFault, match="step-00000004"):
            save_step(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]
    assert load(tmp_path).step == 3
    assert save_step(tmp_path, 4).step == 4


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_file_cut_short_by_the_system_fails_the_save(tmp_path: Path) -> None:
    import resource

    save_step(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"w": torch.zeros(1_000_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(SystemFault, match="too large"):
            save(tmp_path, 2, big, {}, {}, best=False, keep_last=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_failing_to_tidy_up_is_a_note_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, keep_last=2)

    def fail(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint, "_remove", fail)
    saved = save_step(tmp_path, 3, keep_last=2)
    assert "Permission denied" in saved.notes[0]
    assert load(tmp_path).step == 3


# ---- crashes

def test_leftovers_of_earlier_processes_are_removed_and_named(tmp_path: Path) -> None:
    (tmp_path / ".tmp-500-1234").mkdir()
    (tmp_path / ".tmp-500-1234" / "model.safetensors").write_bytes(b"half")
    notes = clean_leftovers(tmp_path)
    assert len(notes) == 1
    assert ".tmp-500-1234" in notes[0]
    assert not list(tmp_path.iterdir())
    assert clean_leftovers(tmp_path / "nowhere") == []


def in_a_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("next_step", [4, 3, 2])
def test_a_crash_at_any_disk_operation_of_a_save_loses_no_checkpoint(tmp_path: Path, next_step: int) -> None:
    """The child dies just before its nth operation on the disk, for every n until a save goes through."""
    template = tmp_path / "template"
    for step in (1, 2, 3):
        save_step(template, step, best=step == 1, keep_last=2)
    before = {slot.path.name for slot in step_folders(template)}
    for deadly in range(1, 200):
        folder = tmp_path / f"death-{deadly}"
        shutil.copytree(template, folder)

        def save_until_death(folder: Path = folder, deadly: int = deadly) -> None:
            done = 0

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal done
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fsync"):
                    done += 1
                    if done == deadly:
                        os._exit(9)

            fsync = os.fsync
            os.fsync = lambda descriptor: (count("fsync", ()), fsync(descriptor))[1]  # not an audited event
            sys.addaudithook(count)
            save_step(folder, next_step, keep_last=2, new=True)

        _, status = os.waitpid(in_a_child(save_until_death), 0)
        loaded = load(folder)
        assert loaded.notes == ()
        # from the rename on it is the new one, also when the run went back; until then the one before
        there = step_folders(folder)
        renamed = any(slot.path.name not in before for slot in there)
        assert (loaded.step, loaded.state.get("new", False)) == ((next_step, True) if renamed else (3, False))
        assert all(load(folder, slot.step).notes == () for slot in there)
        assert load(folder, "best").step == 1
        exit_code = os.waitstatus_to_exitcode(status)
        assert exit_code in (0, 9)
        if exit_code == 0:
            assert loaded.step == next_step
            break
        save_step(folder, next_step + 1, keep_last=2)
        assert load(folder).step == next_step + 1
        shutil.rmtree(folder)
    assert exit_code == 0
    assert deadly > 15  # the hook did count


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be synced there")
def test_a_save_syncs_files_then_renames_then_removes_old_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, keep_last=2)
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace
    inodes: dict[int, str] = {}

    def watch_fsync(descriptor: int) -> None:
        for path in (tmp_path, *tmp_path.rglob("*")):
            inodes[path.stat().st_ino] = path.name
        happened.append(f"sync {inodes[os.fstat(descriptor).st_ino]}")
        fsync(descriptor)

    def watch_replace(source: Path, target: Path) -> None:
        happened.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    save_step(tmp_path, 3, keep_last=2)
    mine = f".tmp-3-{os.getpid()}"
    assert sorted(happened[:3]) == ["sync model.safetensors", "sync optimizer.safetensors", "sync state.json"]
    assert happened[3:] == [f"sync {mine}", f"rename {mine} step-00000003", f"sync {tmp_path.name}",
                            f"rename step-00000001 .tmp-step-00000001-{os.getpid()}"]
