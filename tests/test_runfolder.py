"""The run folder: one writer, no run lost by starting another, a record that is always readable."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitgpt import atomic, runfolder
from fitgpt.atomic import folder_atomically, seal_json, unseal_json, write_atomically
from fitgpt.errors import CheckpointError, SystemFault, UsageError
from fitgpt.runfolder import need_disk, open_run, read_metrics, recorded_config

CONFIG = {"n_layer": 6, "learning_rate": 6e-4, "dataset": "x"}


def with_a_checkpoint(out: Path, config: dict[str, Any] = CONFIG) -> Path:
    with open_run(out, config, resume=False) as run:
        run.record(config)
    (out / "checkpoints" / "step-00000500").mkdir(parents=True)
    return out


# ---- opening

def test_opening_creates_the_folder_and_loads_no_torch(tmp_path: Path) -> None:
    code = ("import sys; from fitgpt.runfolder import open_run; open_run(sys.argv[1], {}, resume=False).close();"
            "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "a" / "b"], check=False).returncode == 0
    assert (tmp_path / "a" / "b").is_dir()


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def a_symlink_loop(tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path / "loop"


@pytest.mark.parametrize("place", [
    a_file,
    lambda tmp: a_file(tmp) / "below",
    a_symlink_loop,
    lambda tmp: a_symlink_loop(tmp) / "below",
    lambda tmp: tmp / "nul\0byte",
    lambda tmp: tmp / ("x" * 300),
    lambda tmp: tmp / "\udcff\ud800",
], ids=["file", "below a file", "loop", "below a loop", "NUL", "300 characters", "lone surrogate"])
def test_a_place_that_cannot_be_a_folder_is_a_system_fault(tmp_path: Path, place: Any) -> None:
    with pytest.raises(SystemFault) as refusal:
        open_run(place(tmp_path), CONFIG, resume=False)
    assert "--out_dir" in refusal.value.fix


def test_a_folder_without_permission_is_a_system_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SystemFault, match="Permission denied"):
        open_run(tmp_path / "out", CONFIG, resume=False)


def test_a_full_disk_is_found_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    real_fsync = os.fsync

    def full(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(SystemFault, match="No space left") as refusal:
            open_run(out, CONFIG, resume=False)
    assert "Free some space" in refusal.value.fix
    assert not list(out.glob(".tmp-*"))
    open_run(out, CONFIG, resume=False).close()  # the failed opening left no lock behind


def test_a_run_in_the_folder_is_not_trained_over(tmp_path: Path) -> None:
    with_a_checkpoint(tmp_path)
    with pytest.raises(UsageError) as refusal:
        open_run(tmp_path, CONFIG | {"n_layer": 12, "new": 1}, resume=False)
    assert "step 500" in refusal.value.what
    assert "n_layer: 6 → 12" in refusal.value.what
    assert "new: 'absent' → 1" in refusal.value.what
    assert "learning_rate" not in refusal.value.what
    assert "--init_from=resume" in refusal.value.fix
    assert "--out_dir" in refusal.value.fix
    with pytest.raises(UsageError, match="the same"):
        open_run(tmp_path, CONFIG, resume=False)
    open_run(tmp_path, CONFIG, resume=True).close()


def test_a_run_whose_config_is_damaged_is_not_trained_over_either(tmp_path: Path) -> None:
    (with_a_checkpoint(tmp_path) / "run.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        open_run(tmp_path, CONFIG, resume=False)


def test_many_differences_are_cut_short(tmp_path: Path) -> None:
    with_a_checkpoint(tmp_path, {f"k{n:02d}": 0 for n in range(30)})
    with pytest.raises(UsageError, match="and 20 more"):
        open_run(tmp_path, {f"k{n:02d}": 1 for n in range(30)}, resume=False)


def test_a_run_that_never_saved_may_be_started_again_and_keeps_its_metrics(tmp_path: Path) -> None:
    for _ in range(3):
        with open_run(tmp_path, CONFIG, resume=False) as run:
            run.record(CONFIG)
            run.append_metrics({"step": 1})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert (tmp_path / "metrics-1.jsonl").exists()
    assert (tmp_path / "metrics-2.jsonl").exists()
    assert "metrics-2.jsonl" in run.notes[0]


# ---- the lock

def test_a_second_trainer_is_told_who_is_there(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, resume=False), pytest.raises(SystemFault) as refusal:
        open_run(tmp_path, CONFIG, resume=True)
    assert f"process {os.getpid()} on {socket.gethostname()}" in refusal.value.what
    open_run(tmp_path, CONFIG, resume=True).close()


def test_the_lock_ends_with_its_process_however_it_dies(tmp_path: Path) -> None:
    code = ("import sys, time; from fitgpt.runfolder import open_run\n"
            "run = open_run(sys.argv[1], {}, resume=False); print('open', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(SystemFault, match=f"process {holder.pid} "):
            open_run(tmp_path, CONFIG, resume=False)
        holder.send_signal(signal.SIGKILL)
    open_run(tmp_path, CONFIG, resume=False).close()


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_a_disk_without_locks_is_used_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with open_run(tmp_path, CONFIG, resume=False) as run:
        assert "no file locks" in run.notes[0]


# ---- run.json

def test_the_recorded_config_comes_back_and_damage_is_told(tmp_path: Path) -> None:
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


# ---- metrics

def test_metrics_are_valid_json_lines_whatever_the_numbers(tmp_path: Path) -> None:
    rows = [{"step": 0, "loss": math.nan, "deep": [math.inf, {"x": -math.inf}], "text": "é\n"},
            {"step": 1, "loss": 2.5}]
    with open_run(tmp_path, CONFIG, resume=False) as run:
        for row in rows:
            run.append_metrics(row)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # readable while the run is on
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [0, 1]
    back = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(back[0]["loss"])
    assert back[0]["deep"] == [math.inf, {"x": -math.inf}]
    assert back[1] == rows[1]


@pytest.mark.parametrize(("tail", "kept", "noted"), [
    (b'{"step": 2, "lo', [1], True),
    (b'{"step": 2}', [1, 2], False),
    (b"\0" * 200_000, [1], True),
    (b"7", [1], True),
    (b"", [1], False),
])
def test_a_torn_last_line_is_repaired_on_resume(tmp_path: Path, tail: bytes, kept: list[int], noted: bool) -> None:
    with_a_checkpoint(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + tail)
    with open_run(tmp_path, CONFIG, resume=True) as run:
        assert bool(run.notes) is noted
        run.append_metrics({"step": 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*kept, 3]


def test_a_file_that_is_one_torn_line_is_emptied(tmp_path: Path) -> None:
    with_a_checkpoint(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"st')
    open_run(tmp_path, CONFIG, resume=True).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_an_append_cut_short_by_a_full_disk_harms_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write
    with open_run(tmp_path, CONFIG, resume=False) as run:
        run.append_metrics({"step": 1})
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:5]))
            with pytest.raises(SystemFault, match="No space left"):
                run.append_metrics({"step": 2})
        run.append_metrics({"step": 3})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]


def test_reading_lets_the_resumed_run_have_the_last_word(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "start", "start_step": 0},
        *({"kind": "step", "step": step, "loss": 1} for step in range(5)),
        {"kind": "eval", "step": 2, "loss": 1},
        {"kind": "start", "start_step": 2},
        {"kind": "step", "step": 2, "loss": 2},
        {"kind": "step", "step": 3, "loss": 2},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(["not json", *map(json.dumps, rows), "[1]", ""]))
    assert [(row["kind"], row.get("step"), row.get("loss")) for row in read_metrics(path)] == [
        ("start", None, None), ("step", 0, 1), ("step", 1, 1), ("eval", 2, 1), ("start", None, None),
        ("step", 2, 2), ("step", 3, 2),
    ]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_what_happened_is_not_undone_by_going_back_nor_by_the_same_happening_again(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        *({"kind": "step", "step": step} for step in range(5)),
        {"kind": "oom", "step": 5, "text": "Memory ran out."},
        {"kind": "oom", "step": 5},
        {"kind": "went_back", "start_step": 3},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"kind": ["oom"], "step": 1}])))
    assert read_metrics(path) == [*rows[:3], *rows[5:], {"kind": ["oom"], "step": 1}]


# ---- disk

def test_too_little_disk_is_told_in_numbers(tmp_path: Path) -> None:
    need_disk(tmp_path / "not" / "yet", 1)
    with pytest.raises(SystemFault, match=r"needs 1024\.00 TiB"):
        need_disk(tmp_path / "not" / "yet", 2**50)


def test_a_failed_atomic_write_keeps_the_old_content_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(SystemFault, match="Input/output"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_text() == "new"


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target, temporary = tmp_path / "t", tmp_path / ".tmp-t"

    def interrupted() -> None:
        with folder_atomically(target, temporary) as folder:
            (folder / "a").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with folder_atomically(target, temporary) as folder:
        (folder / "a").write_text("x")
        assert not target.exists()
    assert (target / "a").read_text() == "x"


def test_on_windows_a_file_held_by_a_scanner_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    real_replace = os.replace

    def held_twice(source: Path, target: Path) -> None:
        attempts.append(source)
        if len(attempts) < 3:
            raise PermissionError(errno.EACCES, "held")
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", held_twice)
    (tmp_path / "a").write_text("x")
    with pytest.raises(PermissionError):
        atomic.patiently_rename(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(sys, "platform", "win32")
    atomic.patiently_rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").exists()


def test_a_sealed_document_survives_odd_values_and_no_edit() -> None:
    document = {"a": [1, 2.5, None, True], "é": {"inf": math.inf, "low": -math.inf}, "1": "NaN"}
    sealed = seal_json(document)
    assert unseal_json(sealed) == document
    with pytest.raises(ValueError):
        unseal_json(sealed.replace("2.5", "2.6"))


def test_the_newest_checkpoint_is_of_the_latest_branch(tmp_path: Path) -> None:
    for name in ("step-00000100", "step-00000060-2", "step-123456789", "set-aside-by-x", ".tmp-5-1", "step-5"):
        (tmp_path / name).mkdir()
    assert [(slot.branch, slot.step) for slot in runfolder.step_folders(tmp_path)] == [
        (1, 100), (1, 123456789), (2, 60)]
