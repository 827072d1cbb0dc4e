"""`fitgpt prepare`: what it prints and asks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.prepare import prepare
from fitgpt.config.argv import walk
from fitgpt.config.command_options import PrepareOptions
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import UsageError
from fitgpt.data.shards import summarise


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(200):
        Path(f"texts/{number:03d}.txt").write_text(f"document {number}: " + " ".join(map(str, range(number, 300))))


def run(**options: Any) -> None:
    assert prepare(PrepareOptions(input=("texts",), name="mine", tokenizer="bytes", val_fraction=0.1, **options)) == 0


def test_it_prints_the_plan_the_counts_and_the_training_command(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    printed = capsys.readouterr().out
    summary = summarise("mine")
    assert printed.startswith("Preparing data/mine from texts")
    assert "on disk" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert f"{summary.train_tokens:,} tokens" in printed
    assert f"{summary.val_tokens:,} tokens" in printed
    command = shlex.split(printed.partition("To train on it:")[2].replace("\\\n", ""))
    assert command[:2] == ["fitgpt", "train"]
    assert command[-2:] == ["--dataset=mine", "--out_dir=runs/mine"]
    assert RunConfig(**{each.key: each.value for each in walk(command[2:], RunConfig)}).n_layer == 4
    assert not Path("data/mine/.prepare.lock").exists()


def test_the_training_command_uses_a_config_file_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config").mkdir()
    Path("config/demo.py").touch()
    run()
    assert capsys.readouterr().out.rstrip().endswith(
        "fitgpt train config/demo.py --dataset=mine --out_dir=runs/mine")


def test_it_prints_repairs_and_skipped_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts/a.txt").write_bytes(b"bad \xff byte")
    Path("texts/c.png").write_bytes(b"\0")
    run()
    output = capsys.readouterr().out
    assert "Skipped, because it is not text: texts/c.png." in output
    assert "Found in the input: 1 binary file skipped, 1 invalid utf8 replaced." in output


def test_it_prints_that_the_dataset_exists_already(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    capsys.readouterr()
    run()
    summary = summarise("mine")
    assert " ".join(capsys.readouterr().out.split()) == (
        "data/mine is already prepared, from the same source and with the same settings: "
        f"{summary.train_tokens:,} train and {summary.val_tokens:,} val tokens.")


def test_it_asks_before_a_large_download(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PrepareOptions(hub="some/dataset", tokenizer="bytes")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UsageError, match="no terminal to confirm"):
        prepare(options)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(UsageError, match="Nothing was downloaded"):
        prepare(options)
