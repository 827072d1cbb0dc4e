"""runs.folder and runs.folder: one writer per folder, and no run is overwritten."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core.errors import CheckpointError, SystemFault, UsageError
from fitgpt.core.files import seal_json
from fitgpt.runs.folder import RunFolderLost, need_disk, open_run, recorded_config, step_folders
from fitgpt.runs.metrics import read_metrics

CONFIG = {"n_layer": 6, "learning_rate": 6e-4, "dataset": "x"}


def with_a_checkpoint(out: Path, config: dict[str, Any] = CONFIG) -> Path:
    with open_run(out, config, resume=False) as run:
        run.record(config)
    (out / "checkpoints" / "step-00000500").mkdir(parents=True)
    return out


@pytest.mark.parametrize("opened", ["folder import open_run; open_run('.', {}, resume=True)",
                                    "watch import FollowedRun, Path; FollowedRun(Path('.')).state(None, 0)"])
def test_a_pipe_in_place_of_the_metrics_is_an_error_and_not_waited_for(tmp_path: Path, opened: str) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    done = subprocess.run([sys.executable, "-c", f"from fitgpt.runs.{opened}"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=20)
    assert re.search(r"SystemFault: metrics.jsonl is a pipe|OSError: .* it is a pipe", done.stderr)


def link_to_notes(path: Path) -> None:
    path.symlink_to(path.parent / "notes")


@pytest.mark.reproduction
@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
@pytest.mark.parametrize(("place", "kind"), [(link_to_notes, "a symbolic link"), (os.mkfifo, "a pipe"),
                                             (os.mkdir, "a folder")])
def test_what_is_no_file_of_ours_is_named_and_not_written_to(
        tmp_path: Path, name: str, place: Callable[[Path], None], kind: str) -> None:
    (tmp_path / "notes").write_text("not a row")
    place(tmp_path / name)
    with pytest.raises(SystemFault, match=rf"/{name} is {kind}, and") as raised:
        open_run(tmp_path, CONFIG, resume=True)
    assert raised.value.fix.endswith(f"mv {tmp_path / name} {tmp_path / name}.old")
    assert (tmp_path / "notes").read_text() == "not a row"


def test_metrics_that_a_link_replaces_during_a_run_are_written_once_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a row")
    with open_run(tmp_path, CONFIG, resume=False) as run:
        (tmp_path / "metrics.jsonl").unlink()
        link_to_notes(tmp_path / "metrics.jsonl")
        for _ in range(2):
            with pytest.raises(SystemFault, match="is a symbolic link"):
                run.append_metrics({"kind": "step", "step": 1})
        (tmp_path / "metrics.jsonl").unlink()
        run.append_metrics({"kind": "step", "step": 1})
    assert (tmp_path / "notes").read_text() == "not a row"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


# ---- the folder while a run trains in it

def test_a_renamed_folder_ends_the_run_and_names_its_new_place(tmp_path: Path) -> None:
    with open_run(tmp_path / "a", CONFIG, resume=False) as run:
        run.append_metrics({"kind": "step", "step": 1})
        (tmp_path / "a").rename(tmp_path / "b")
        for write in (run.check_ours, lambda: run.record(CONFIG), lambda: run.append_metrics({"kind": "step"})):
            with pytest.raises(RunFolderLost) as raised:
                write()
            assert raised.value.exit_code == 7
            assert f"renamed to {tmp_path / 'b'}" in raised.value.what
            assert raised.value.fix.endswith(f"--resume --out_dir={tmp_path / 'b'}")
    assert not (tmp_path / "a").exists()
    assert len(read_metrics(tmp_path / "b" / "metrics.jsonl")) == 1


def test_a_folder_that_another_run_took_over_is_not_written_to(tmp_path: Path) -> None:
    with open_run(tmp_path / "a", CONFIG, resume=False) as first:
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(RunFolderLost, match="was removed"):
            first.check_ours()
        with open_run(tmp_path / "a", CONFIG, resume=False) as second:
            with pytest.raises(RunFolderLost, match=f"process {os.getpid()} trains there now"):
                first.append_metrics({"kind": "step", "step": 1})
            second.append_metrics({"kind": "step", "step": 2})
    assert [row["step"] for row in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [2]


def test_a_removed_lock_ends_the_run(tmp_path: Path) -> None:
    with open_run(tmp_path / "a", CONFIG, resume=False) as run:
        (tmp_path / "a" / "checkpoints" / "step-00000500").mkdir(parents=True)
        (tmp_path / "a" / "lock").unlink()
        with pytest.raises(RunFolderLost, match=r"The lock of .* was removed"):
            run.check_ours()


@pytest.mark.parametrize("rotate", [os.unlink, lambda path: os.rename(path, f"{path}.1")])
def test_metrics_go_to_a_new_file_if_theirs_is_moved_or_removed(tmp_path: Path, rotate: Any) -> None:
    with open_run(tmp_path / "a", CONFIG, resume=False) as run:
        assert run.append_metrics({"kind": "step", "step": 1}) == ""
        rotate(tmp_path / "a" / "metrics.jsonl")
        assert "new file" in run.append_metrics({"kind": "step", "step": 2})
        assert run.append_metrics({"kind": "step", "step": 3}) == ""
    assert [row["step"] for row in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [2, 3]


# ---- opening

def test_opening_creates_the_folder_and_loads_no_torch(tmp_path: Path) -> None:
    code = ("import sys; from fitgpt.runs.folder import open_run; open_run(sys.argv[1], {}, resume=False).close();"
            "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "a" / "b"], check=False, timeout=60).returncode == 0
    assert (tmp_path / "a" / "b").is_dir()


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def a_symlink_loop(tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path / "loop"


@pytest.mark.parametrize("path_in", [
    a_file,
    lambda tmp: a_file(tmp) / "below",
    a_symlink_loop,
    lambda tmp: a_symlink_loop(tmp) / "below",
    lambda tmp: tmp / "nul\0byte",
    lambda tmp: tmp / ("x" * 300),
    lambda tmp: tmp / "\udcff\ud800",
], ids=["file", "below a file", "loop", "below a loop", "NUL", "300 characters", "lone surrogate"])
def test_a_path_that_cannot_be_a_folder_is_a_system_fault(tmp_path: Path, path_in: Any) -> None:
    with pytest.raises(SystemFault) as raised:
        open_run(path_in(tmp_path), CONFIG, resume=False)
    assert "--out_dir" in raised.value.fix


def test_a_folder_without_permission_is_a_system_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def fail(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(SystemFault, match="Permission denied"):
        open_run(tmp_path / "out", CONFIG, resume=False)


def test_a_full_disk_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    real_fsync = os.fsync

    def full(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(SystemFault, match="No space left") as raised:
            open_run(out, CONFIG, resume=False)
    assert "Free some space" in raised.value.fix
    assert not list(out.glob(".tmp-*"))
    open_run(out, CONFIG, resume=False).close()  # the failed opening left no lock behind


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with_a_checkpoint(tmp_path)
    with pytest.raises(UsageError) as raised:
        open_run(tmp_path, CONFIG | {"n_layer": 12, "new": 1}, resume=False)
    assert "step 500" in raised.value.what
    assert "n_layer: 6 → 12" in raised.value.what
    assert "new: 'absent' → 1" in raised.value.what
    assert "learning_rate" not in raised.value.what
    assert "--resume" in raised.value.fix
    assert "--out_dir" in raised.value.fix
    with pytest.raises(UsageError, match="the same"):
        open_run(tmp_path, CONFIG, resume=False)
    open_run(tmp_path, CONFIG, resume=True).close()


def test_a_folder_whose_config_is_damaged_is_not_overwritten(tmp_path: Path) -> None:
    (with_a_checkpoint(tmp_path) / "run.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        open_run(tmp_path, CONFIG, resume=False)


def test_many_differences_are_cut_short(tmp_path: Path) -> None:
    with_a_checkpoint(tmp_path, {f"k{n:02d}": 0 for n in range(30)})
    with pytest.raises(UsageError, match="and 20 more"):
        open_run(tmp_path, {f"k{n:02d}": 1 for n in range(30)}, resume=False)


def test_a_run_without_checkpoint_may_be_restarted_and_keeps_its_metrics(tmp_path: Path) -> None:
    for _ in range(3):
        with open_run(tmp_path, CONFIG, resume=False) as run:
            run.record(CONFIG)
            run.append_metrics({"step": 1})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert (tmp_path / "metrics-1.jsonl").exists()
    assert (tmp_path / "metrics-2.jsonl").exists()
    assert "metrics-2.jsonl" in run.notes[0]


# ---- the lock

def test_a_second_trainer_gets_the_pid_of_the_first(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, resume=False), pytest.raises(SystemFault) as raised:
        open_run(tmp_path, CONFIG, resume=True)
    assert f"process {os.getpid()} on {socket.gethostname()}" in raised.value.what
    open_run(tmp_path, CONFIG, resume=True).close()


def test_the_lock_ends_with_its_process_even_if_killed(tmp_path: Path) -> None:
    code = ("import sys, time; from fitgpt.runs.folder import open_run\n"
            "run = open_run(sys.argv[1], {}, resume=False); print('open', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(SystemFault, match=f"process {holder.pid} "):
            open_run(tmp_path, CONFIG, resume=False)
        holder.send_signal(signal.SIGKILL)
    open_run(tmp_path, CONFIG, resume=False).close()


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_a_disk_without_file_locks_gives_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with open_run(tmp_path, CONFIG, resume=False) as run:
        assert "no file locks" in run.notes[0]


# ---- run.json

def test_the_recorded_config_is_read_back_and_damage_is_an_error(tmp_path: Path) -> None:
    assert recorded_config(tmp_path) is None
    with open_run(tmp_path, CONFIG, resume=False) as run:
        run.record(CONFIG | {"inf": math.inf})
    assert recorded_config(tmp_path) == CONFIG | {"inf": math.inf}
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace('"n_layer": 6', '"n_layer": 7'))
    with pytest.raises(CheckpointError, match="damaged or was edited"):
        recorded_config(tmp_path)
    for broken in ("", "[", "[" * 100_000, "\0" * 100, "[1]"):
        path.write_text(broken)
        with pytest.raises(CheckpointError):
            recorded_config(tmp_path)
    path.write_text(seal_json({"schema": 2, "fitgpt": "9.0", "config": {}}))
    with pytest.raises(CheckpointError, match=r"fitgpt 9\.0"):
        recorded_config(tmp_path)


def test_without_run_json_the_config_is_that_of_the_last_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    for step, content in ((1, {"state": {"config": {"n_layer": 1}}}), (2, {"state": {"config": CONFIG}}), (3, {})):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(seal_json(content))
    assert recorded_config(tmp_path) == CONFIG


# ---- disk

def test_too_little_disk_space_is_an_error_with_figures(tmp_path: Path) -> None:
    need_disk(tmp_path / "not" / "yet", 1)
    with pytest.raises(SystemFault, match=r"needs 1\.00 PiB"):
        need_disk(tmp_path / "not" / "yet", 2**50)


def test_checkpoints_sort_by_branch_then_step(tmp_path: Path) -> None:
    for name in ("step-00000100", "step-00000060-2", "step-123456789", "set-aside-by-x", ".tmp-5-1", "step-5"):
        (tmp_path / name).mkdir()
    assert [(slot.branch, slot.step) for slot in step_folders(tmp_path)] == [
        (1, 100), (1, 123456789), (2, 60)]
