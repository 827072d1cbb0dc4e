"""core.files: atomic writes, errors of the disk, JSON with a checksum."""

from __future__ import annotations

import errno
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core import files
from fitgpt.core.errors import SystemFault
from fitgpt.core.files import (
    data_home,
    disk_faults,
    folder_atomically,
    open_regular,
    read_limited,
    recover_folder,
    seal_json,
    temporary_folder,
    unseal_json,
    write_atomically,
)


def test_a_file_is_complete_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = os.fsync

    def record_size(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record_size)
    write_atomically(tmp_path / "run.json", "{}\n")
    assert sizes[0] == 3  # the file; after it, its folder
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_file_that_is_too_large_names_the_limit(tmp_path: Path) -> None:
    with pytest.raises(SystemFault, match="File too large") as raised, disk_faults("write", tmp_path):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert "ulimit -f" in raised.value.fix


def test_a_failed_write_keeps_the_old_content_and_leaves_no_temporary_file(
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


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("completed", range(4))
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         exchanges: bool, completed: int) -> None:
    """Killed after this many renames: the target, or what `recover_folder` brings back, is whole."""
    target, killed_pid = tmp_path / "t", 2**22 + 1  # above the highest pid of Linux
    target.mkdir()
    (target / "a").write_text("old")
    calls = count(1)

    def until_killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*paths: Path) -> Any:
            if next(calls) > completed:
                raise SystemExit
            return real(*paths)
        return call

    is_replaced = True
    with monkeypatch.context() as patched:
        patched.setattr(files, "_exchange", until_killed(files._exchange if exchanges else lambda one, other: False))
        patched.setattr(files, "rename_with_retry", until_killed(files.rename_with_retry))
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process does not remove anything either
        try:
            with folder_atomically(target, tmp_path / f".tmp-t-{killed_pid}") as folder:
                (folder / "a").write_text("new")
        except SystemExit:
            is_replaced = False
    recover_folder(target)
    assert (target / "a").read_text() == ("new" if is_replaced else "old")
    assert list(tmp_path.iterdir()) == [target]
    assert is_replaced == (completed >= (1 if exchanges and sys.platform == "linux" else 3))


def test_a_pipe_is_read_to_its_end_and_one_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with open(reading), open(writing, "wb", buffering=0) as writer:
        later = threading.Timer(0.05, lambda: (writer.write(b"text"), writer.close()))
        later.start()
        assert read_limited(f"/dev/fd/{reading}", 10, pipes=True) == b"text"
        later.join()
    os.mkfifo(tmp_path / "pipe")
    read = "from fitgpt.core.files import read_limited; read_limited('pipe', 10, pipes=True)"
    done = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert "it is a pipe that nothing was written to" in done.stderr


def test_a_pipe_is_not_opened_and_a_large_file_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe or a device"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe or a device"):
        read_limited("/dev/zero", 100)
    with pytest.raises(ValueError, match="larger than 100 B"):
        read_limited("/dev/zero", 100, pipes=True)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="larger than"):
        read_limited(tmp_path / "sparse", 100)
    (tmp_path / "small").write_bytes(b"x" * 100)
    assert read_limited(tmp_path / "small", 100) == b"x" * 100


def test_on_windows_a_rename_is_retried_while_the_file_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        files.rename_with_retry(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(sys, "platform", "win32")
    files.rename_with_retry(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").exists()


def test_sealed_json_keeps_nonfinite_values_and_detects_edits() -> None:
    document = {"a": [1, 2.5, None, True], "é": {"inf": math.inf, "low": -math.inf}, "1": "NaN"}
    sealed = seal_json(document)
    assert unseal_json(sealed) == document
    with pytest.raises(ValueError, match="its own checksum"):
        unseal_json(sealed.replace("2.5", "2.6"))


def test_a_temporary_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "fitgpt-tmp-left"
    left.mkdir()
    (left / "lock").touch()
    with temporary_folder() as used:
        assert left.exists()  # it may be one that is being made
        for folder in (left, used):
            os.utime(folder / "lock", (0, 0))
        with temporary_folder():
            assert not left.exists()
            assert used.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_an_exchange_that_fails_is_an_error_and_not_taken_for_one_that_is_unsupported(tmp_path: Path) -> None:
    """It may have happened all the same. Done again in another way, it would bring back the earlier folder."""
    (tmp_path / "new").mkdir()
    with pytest.raises(FileNotFoundError):
        files._exchange(tmp_path / "new", tmp_path / "missing")


def test_a_user_without_a_home_directory_gets_no_folder_named_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "FITGPT_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user that the system does not know
    assert data_home() == Path("/.local/share/fitgpt")


def test_a_home_of_an_unknown_user_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITGPT_HOME", "~no_such_user/x")
    assert data_home() == Path("~no_such_user/x")
