"""A preparation killed at any moment goes on, and ends with the same bytes as one never stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitgpt.config.command_options import PrepareOptions
from fitgpt.core import files
from fitgpt.core.errors import Interrupted, UsageError
from fitgpt.data import prepare as module
from fitgpt.data import text, writing
from fitgpt.data.header import summarise
from fitgpt.data.prepare import prepare

# Slow enough to be caught at work, and saving at every shard.
CHILD = """
import sys, time
from fitgpt.data import prepare, workers
from fitgpt.core.errors import FitError
from fitgpt.config.command_options import PrepareOptions
prepare._SAVE_EVERY_S = 0
real = prepare.encode_in_order
def slowly(*arguments):
    for pair in real(*arguments):
        time.sleep(0.003)
        yield pair
prepare.encode_in_order = slowly
if __name__ == "__main__":
    try:
        prepare.prepare(PrepareOptions(input=("texts",), tokenizer=sys.argv[1], processes=int(sys.argv[2]),
                                       val_fraction=0.1, shard_tokens="2000"))
    except FitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


def options(**changes: Any) -> PrepareOptions:
    settings = {"input": ("texts",), "tokenizer": "bytes", "processes": 1, "val_fraction": 0.1, "shard_tokens": "2000"}
    return PrepareOptions(**settings | changes)


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power cut is tested here
    random = np.random.default_rng(0)
    Path("texts").mkdir()
    for number in range(60):
        words = random.integers(0, 10**6, random.integers(6, 120))
        Path(f"texts/{number:05d}.txt").write_text(f"document {number}: " + " ".join(map(str, words)))
    Path("texts/00030.txt").write_bytes(b"bad \xff byte")


def uninterrupted(**changes: Any) -> dict[str, bytes]:
    prepare(options(**changes))
    shutil.move("data", "expected")
    return contents(Path("expected/texts"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".prepare.lock"}


def start(tokenizer: str = "bytes", processes: int = 1) -> subprocess.Popen[str]:
    Path("child.py").write_text(CHILD)
    return subprocess.Popen([sys.executable, "child.py", tokenizer, str(processes)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_killed_outright_again_and_again_it_ends_with_the_same_bytes() -> None:
    expected = uninterrupted()
    tokens = []
    for shard in (2, 5, 8):
        process = start()
        wait_for(Path(f"data/texts/train-{shard:05d}.shard"), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert Path("data/texts/progress.json").exists()
        assert not Path("data/texts/manifest.json").exists()
        tokens.append(len(list(Path("data/texts").glob("train-*.shard"))))
    prepare(options())
    assert tokens == sorted(tokens)
    assert contents(Path("data/texts")) == expected


def test_ctrl_c_stops_between_documents_keeps_the_work_and_says_how_to_go_on(capfd) -> None:
    expected = uninterrupted()
    process = start()
    wait_for(Path("data/texts/train-00003.shard"), process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 75
    assert "To go on: fitgpt prepare texts --tokenizer=bytes --val_fraction=0.1 --shard_tokens=2000" in said
    assert "Traceback" not in said
    assert not list(Path("data/texts").glob(".tmp-*"))
    capfd.readouterr()
    prepare(options())
    assert "Going on with an earlier preparation" in capfd.readouterr().out
    assert contents(Path("data/texts")) == expected


class Killed(BaseException):
    pass


@pytest.mark.parametrize("documents", [15, 1], ids=["many documents", "one document, its end moved to val"])
def test_stopped_at_every_single_write_it_ends_with_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, documents: int
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 1500)
    for path in sorted(Path("texts").iterdir())[documents:]:
        path.unlink()
    if documents == 1:
        Path("texts/00000.txt").write_text(" ".join(map(str, range(2000))))
    expected = uninterrupted()
    real_rename, real_unlink = files.patiently_rename, Path.unlink
    operations = 0
    stop_at = 0

    def operation(act: Any) -> Any:
        def perhaps(*arguments: Any, **named: Any) -> Any:
            nonlocal operations
            operations += 1
            if operations == stop_at:
                raise Killed
            return act(*arguments, **named)
        return perhaps

    monkeypatch.setattr(files, "patiently_rename", operation(real_rename))
    monkeypatch.setattr(Path, "unlink", operation(real_unlink))
    for number in range(1, 1000):
        operations, stop_at = 0, number
        try:
            prepare(options())
        except Killed:
            stop_at = -1
            prepare(options())
            assert contents(Path("data/texts")) == expected, f"stopped at write {number}"
            shutil.rmtree("data")
        else:
            break
    assert number > 15
    assert contents(Path("data/texts")) == expected


def test_a_stop_within_a_long_document_goes_on_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 1000)
    Path("texts/00001.txt").write_text("a long line " * 3000)
    expected = uninterrupted()
    real = module.encode_in_order
    read: list[tuple[int, int]] = []

    def stopping(pieces: Any, *rest: Any) -> Any:
        for count, pair in enumerate(real(pieces, *rest)):
            read.append((pair[0].document, pair[0].part))
            if count == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            yield pair

    monkeypatch.setattr(module, "encode_in_order", stopping)
    with pytest.raises(Interrupted):
        prepare(options())
    document, part = read[-1]
    assert document == 1
    read.clear()
    monkeypatch.setattr(module, "encode_in_order", lambda *arguments: (read.append(
        (pair[0].document, pair[0].part)) or pair for pair in real(*arguments)))
    prepare(options())
    assert read[0] == (1, part + 1)
    assert contents(Path("data/texts")) == expected


def prepare_until_shard(number: int, **changes: Any) -> None:
    """Stopped dead when a split is about to write the shard of that number."""
    real = writing.SplitWriter._write

    def stop(self: writing.SplitWriter, tokens: Any) -> None:
        if len(self.shards) == number:
            raise Killed
        real(self, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing.SplitWriter, "_write", stop)
        with pytest.raises(Killed):
            prepare(options(**changes))


def test_max_tokens_is_the_same_after_a_stop() -> None:
    expected = uninterrupted(max_tokens="20k")
    for shard in (2, 5):
        prepare_until_shard(shard, max_tokens="20k")
    prepare(options(max_tokens="20k"))
    assert contents(Path("data/texts")) == expected
    summary = summarise("texts")
    assert summary.train_tokens + summary.val_tokens == 20_000


@pytest.fixture
def stopped() -> Path:
    prepare_until_shard(4)
    assert Path("data/texts/progress.json").exists()
    return Path("data/texts")


def test_an_unfinished_preparation_with_other_settings_or_input_is_not_gone_on_with(stopped: Path) -> None:
    with pytest.raises(UsageError, match=r"unfinished.*seed 1337 then, 1 now"):
        prepare(options(seed=1))
    path = Path("texts/00003.txt")
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, (2**31, 2**31))
    with pytest.raises(UsageError, match="changed since"):
        prepare(options())
    prepare(options(overwrite=True))
    assert summarise("texts").train_tokens > 0


@pytest.mark.parametrize("damage", ["progress", "carry", "no carry", "shard", "no shard", "schema"])
def test_a_damaged_record_means_starting_over_and_the_same_bytes(stopped: Path, damage: str, capsys) -> None:
    carry = next(stopped.glob("carry-*.bin"))
    progress = stopped / "progress.json"
    shard = stopped / "train-00001.shard"
    match damage:
        case "progress":
            progress.write_bytes(progress.read_bytes()[:100])
        case "carry":
            carry.write_bytes(carry.read_bytes()[:-2] + b"zz")
        case "no carry":
            carry.unlink()
        case "shard":
            os.truncate(shard, 300)
        case "no shard":
            shard.unlink()
        case "schema":
            progress.write_text(progress.read_text().replace('"schema": 1', '"schema": 9'))
    prepare(options())
    assert "starting over" in capsys.readouterr().out
    resumed = contents(stopped)
    shutil.rmtree("data")
    assert resumed == uninterrupted()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc to see the children")
def test_tokenizing_processes_end_with_a_killed_parent(gpt2: None) -> None:
    process = start("gpt2", processes=2)
    wait_for(Path("data/texts/train-00001.shard"), process)
    children = [int(child) for task in Path(f"/proc/{process.pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() and _alive(child) for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
