"""A `prepare` killed at any moment resumes, and ends with the same bytes as one that was never stopped."""

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
from fitgpt.data import pipeline, text, writer
from fitgpt.data.shards import summarise

# Slow enough to be stopped midway, and saving at every shard.
CHILD = """
import sys, time
from fitgpt.commands.prepare import prepare
from fitgpt.data import pipeline
from fitgpt.core.errors import FitError
from fitgpt.config.command_options import PrepareOptions
pipeline._SAVE_EVERY_S = 0
real = pipeline.encode_in_order
def slowly(*arguments):
    for pair in real(*arguments):
        time.sleep(0.003)
        yield pair
pipeline.encode_in_order = slowly
if __name__ == "__main__":
    try:
        prepare(PrepareOptions(input=("texts",), tokenizer=sys.argv[1], processes=int(sys.argv[2]),
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
    monkeypatch.setattr(pipeline, "_SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power failure is tested here
    random = np.random.default_rng(0)
    Path("texts").mkdir()
    for number in range(60):
        numbers = random.integers(0, 10**6, random.integers(6, 120))
        Path(f"texts/{number:05d}.txt").write_text(f"document {number}: " + " ".join(map(str, numbers)))
    Path("texts/00030.txt").write_bytes(b"bad \xff byte")


def prepare(options: PrepareOptions) -> list[str]:
    """Prepares the dataset; returns the notices for the user."""
    notices: list[str] = []
    pipeline.prepare_dataset(options, notify=notices.append, ask=lambda question: None)
    return notices


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
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"{path} was not written in 30 s")
        time.sleep(0.001)


def test_killed_several_times_it_ends_with_the_same_bytes() -> None:
    expected = uninterrupted()
    shards = []
    for shard in (2, 5, 8):
        process = start()
        wait_for(Path(f"data/texts/train-{shard:05d}.shard"), process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        assert Path("data/texts/progress.json").exists()
        assert not Path("data/texts/manifest.json").exists()
        shards.append(len(list(Path("data/texts").glob("train-*.shard"))))
    prepare(options())
    assert shards == sorted(shards)
    assert contents(Path("data/texts")) == expected


def test_ctrl_c_saves_the_state_and_prints_the_command_that_resumes() -> None:
    expected = uninterrupted()
    process = start()
    wait_for(Path("data/texts/train-00003.shard"), process)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "To resume: fitgpt prepare texts --tokenizer=bytes --val_fraction=0.1 --shard_tokens=2000" in printed
    assert "Traceback" not in printed
    assert not list(Path("data/texts").glob(".tmp-*"))
    assert prepare(options())[-1].startswith("Resuming an earlier `prepare` after ")
    assert contents(Path("data/texts")) == expected


class Killed(BaseException):
    pass


@pytest.mark.parametrize("documents", [15, 1], ids=["many documents", "one document, its end moved to val"])
def test_stopped_at_every_write_it_ends_with_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, documents: int
) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 1500)
    for path in sorted(Path("texts").iterdir())[documents:]:
        path.unlink()
    if documents == 1:
        Path("texts/00000.txt").write_text(" ".join(map(str, range(2000))))
    expected = uninterrupted()
    real_rename, real_unlink = files.rename_with_retry, Path.unlink
    operations = 0
    stop_at = 0

    def operation(act: Any) -> Any:
        def act_or_stop(*arguments: Any, **named: Any) -> Any:
            nonlocal operations
            operations += 1
            if operations == stop_at:
                raise Killed
            return act(*arguments, **named)
        return act_or_stop

    monkeypatch.setattr(files, "rename_with_retry", operation(real_rename))
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


def test_a_stop_within_a_long_document_resumes_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 1000)
    Path("texts/00001.txt").write_text("a long line " * 3000)
    expected = uninterrupted()
    real = pipeline.encode_in_order
    read: list[tuple[int, int]] = []

    def stopping(chunks: Any, *rest: Any) -> Any:
        for count, pair in enumerate(real(chunks, *rest)):
            read.append((pair[0].document, pair[0].part))
            if count == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            yield pair

    monkeypatch.setattr(pipeline, "encode_in_order", stopping)
    with pytest.raises(Interrupted):
        prepare(options())
    document, part = read[-1]
    assert document == 1
    read.clear()
    monkeypatch.setattr(pipeline, "encode_in_order", lambda *arguments: (read.append(
        (pair[0].document, pair[0].part)) or pair for pair in real(*arguments)))
    prepare(options())
    assert read[0] == (1, part + 1)
    assert contents(Path("data/texts")) == expected


def prepare_until_shard(number: int, **changes: Any) -> None:
    """Stops when a split is about to write the shard of that number."""
    real = writer.SplitWriter._write

    def stop(self: writer.SplitWriter, tokens: Any) -> None:
        if len(self.shards) == number:
            raise Killed
        real(self, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.SplitWriter, "_write", stop)
        with pytest.raises(Killed):
            prepare(options(**changes))


def test_max_tokens_counts_the_tokens_before_a_stop() -> None:
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


def test_an_unfinished_dataset_is_not_resumed_with_other_settings_or_input(stopped: Path) -> None:
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
def test_with_a_damaged_state_it_starts_over_and_ends_with_the_same_bytes(stopped: Path, damage: str) -> None:
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
    assert "starting over" in prepare(options())[-1]
    resumed = contents(stopped)
    shutil.rmtree("data")
    assert resumed == uninterrupted()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc to list child processes")
def test_tokenizing_processes_exit_when_their_parent_is_killed(gpt2: None) -> None:
    process = start("gpt2", processes=2)
    wait_for(Path("data/texts/train-00001.shard"), process)
    children = [int(child) for task in Path(f"/proc/{process.pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() and _alive(child) for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
