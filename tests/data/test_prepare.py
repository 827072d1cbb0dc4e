"""`fitgpt prepare`, from text to a dataset that can be trained on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitgpt.config.command_options import PrepareOptions
from fitgpt.config.fields import walk
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DataError, SystemFault, UsageError
from fitgpt.data import manifest
from fitgpt.data.header import read_header, summarise
from fitgpt.data.prepare import prepare
from fitgpt.data.shards import Split, open_dataset
from fitgpt.data.tokenizers import get
from fitgpt.data.workers import cores

END = 256


def run(*inputs: str, **options: Any) -> None:
    settings = {"name": "" if "out" in options else "mine", "tokenizer": "bytes", "processes": 1} | options
    assert prepare(PrepareOptions(input=inputs, **settings)) == 0


def corpus(documents: int = 200, folder: str = "texts") -> list[str]:
    """Texts of their own, each different, 50 to 1,000 characters long."""
    random = np.random.default_rng(0)
    texts = [f"document {number}: " + " ".join(map(str, random.integers(0, 10**6, random.integers(6, 120))))
             for number in range(documents)]
    Path(folder).mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        Path(folder, f"{number:05d}.txt").write_text(text)
    return texts


def tokens_of(split: str, name: str = "mine") -> np.ndarray:
    shards = open_dataset(name).split(split).shards
    return np.concatenate([np.fromfile(shard.path, "<u2", offset=shard.start) for shard in shards])


def documents_of(split: str, name: str = "mine") -> list[str]:
    tokens = tokens_of(split, name)
    assert tokens[-1] == END
    return [bytes(part.astype(np.uint8)).decode() for part in np.split(tokens, np.flatnonzero(tokens == END) + 1)
            for part in [part[part != END]] if part.size]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- what comes out

def test_every_document_is_on_one_side_once_and_ends_with_the_end_of_text() -> None:
    texts = corpus()
    run("texts", val_fraction=0.1)
    train, val = documents_of("train"), documents_of("val")
    assert sorted(train + val) == sorted(texts)
    assert 8 <= len(val) <= 36
    assert train == [text for text in texts if text in set(train)]  # in their order


def test_the_result_says_its_counts_and_what_to_type_next(capsys: pytest.CaptureFixture[str]) -> None:
    corpus()
    run("texts", val_fraction=0.1)
    said = capsys.readouterr().out
    summary = summarise("mine")
    assert said.startswith("Preparing data/mine from texts")
    assert "on disk" in said.splitlines()[1]
    assert f"{summary.train_tokens:,} tokens" in said
    assert f"{summary.val_tokens:,} tokens" in said
    command = said.rstrip().splitlines()[-1].split()
    assert command[:2] == ["fitgpt", "train"]
    assert command[-2:] == ["--dataset=mine", "--out_dir=runs/mine"]
    assert RunConfig(**{each.key: each.value for each in walk(command[2:], RunConfig)}).n_layer == 4
    Path("config").mkdir()
    Path("config/demo.py").touch()
    run("texts", val_fraction=0.1, overwrite=True)
    said = capsys.readouterr().out
    assert said.rstrip().endswith("fitgpt train config/demo.py --dataset=mine --out_dir=runs/mine")
    assert not Path("data/mine/.prepare.lock").exists()


def test_shards_have_the_size_asked_for_and_true_headers() -> None:
    corpus()
    run("texts", val_fraction=0.1, shard_tokens="10k")
    made = manifest.read(Path("data/mine"))
    assert len(made.shards["train"]) > 3
    assert {shard.tokens for shard in made.shards["train"][:-1]} == {10_000}
    for shard in (*made.shards["train"], *made.shards["val"]):
        header, file = read_header(Path("data/mine", shard.file))
        tokens = np.fromfile(file.path, "<u2", offset=file.start)
        assert header.max_token == tokens.max()
        assert header.sha256 == hashlib.sha256(tokens.tobytes()).hexdigest() == shard.sha256
    assert sum(made.documents.values()) == 200


def test_the_number_of_shards_does_not_change_the_tokens() -> None:
    corpus()
    run("texts", val_fraction=0.1, name="one")
    run("texts", val_fraction=0.1, name="many", shard_tokens="1234")
    for split in ("train", "val"):
        assert np.array_equal(tokens_of(split, "one"), tokens_of(split, "many"))


def test_copies_of_a_document_are_never_on_both_sides() -> None:
    texts = corpus(100)
    for number, text in enumerate(texts):
        Path("texts", f"copy-{number}.txt").write_text(text)
    run("texts", val_fraction=0.2)
    assert not set(documents_of("train")) & set(documents_of("val"))


def test_the_seed_chooses_the_validation_documents() -> None:
    corpus()
    run("texts", val_fraction=0.1, name="one", seed=1)
    run("texts", val_fraction=0.1, name="two", seed=2)
    assert documents_of("val", "one") != documents_of("val", "two")


@pytest.mark.parametrize("documents", [1, 2, 3, 5, 20])
def test_few_documents_still_give_val_its_share(documents: int) -> None:
    texts = corpus(documents)
    run("texts", val_fraction=0.1, shard_tokens="500")
    train, val = tokens_of("train"), tokens_of("val")
    total = sum(len(text) + 1 for text in texts)
    assert len(train) + len(val) == total
    assert 0.05 <= len(val) / total <= 0.2
    made = manifest.read(Path("data/mine"))
    assert made.documents["train"] >= 1
    assert made.documents["val"] >= 1
    assert documents <= sum(made.documents.values()) <= documents + 1


def test_one_document_is_split_near_its_end_as_nanogpt_does() -> None:
    Path("input.txt").write_text("to be or not to be " * 1000)
    run("input.txt", val_fraction=0.1, shard_tokens="3k")
    assert len(tokens_of("train")) == 17_101
    assert len(tokens_of("val")) == 1900
    both = np.concatenate([tokens_of("train"), tokens_of("val")])
    assert bytes(both[:-1].astype(np.uint8)) == b"to be or not to be " * 1000


def test_documents_all_on_the_val_side_by_chance_are_moved_back() -> None:
    Path("input.txt").write_text("".join(map(str, range(3000))))
    for seed in range(10):  # half of the seeds put the only document on the val side
        run("input.txt", val_fraction=0.5, name=f"seed{seed}", seed=seed, shard_tokens="1k")
        assert abs(len(tokens_of("val", f"seed{seed}")) / 10_891 - 0.5) < 0.01
        both = np.concatenate([tokens_of("train", f"seed{seed}"), tokens_of("val", f"seed{seed}")])
        assert len(both) == 10_891


def test_max_tokens_is_met_to_the_token() -> None:
    corpus()
    run("texts", val_fraction=0.1, max_tokens="12345")
    assert len(tokens_of("train")) + len(tokens_of("val")) == 12_345
    run("texts", val_fraction=0.1, max_tokens="0", name="all")
    assert len(tokens_of("train", "all")) > 12_345


def test_what_was_mended_and_skipped_is_counted_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    corpus(30)
    Path("texts/a.txt").write_bytes(b"bad \xff byte")
    Path("texts/b.txt").write_bytes(b"")
    Path("texts/c.png").write_bytes(b"\0")
    run("texts")
    counts = manifest.read(Path("data/mine")).counts
    assert counts == {"binary_files_skipped": 1, "empty_documents": 1, "invalid_utf8_replaced": 1}
    assert "1 invalid utf8 replaced" in capsys.readouterr().out
    assert sum(manifest.read(Path("data/mine")).documents.values()) in (31, 32)


def test_what_holds_no_text_leaves_nothing_behind() -> None:
    Path("empty.txt").write_bytes(b"")
    Path("blank.jsonl").write_bytes(b'{"text": ""}\n')
    for source in ("empty.txt", "blank.jsonl"):
        with pytest.raises(DataError, match="no text"):
            run(source)
        assert not Path("data").exists()
    Path("data").mkdir()
    with pytest.raises(DataError, match="no text"):
        run("blank.jsonl")
    assert list(Path("data").iterdir()) == []


def test_an_overlap_of_val_and_train_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Two copies of one text, and nothing else: some of it has to be on both sides."""
    text = " ".join(map(str, np.random.default_rng(0).integers(0, 10**6, 3000)))
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(text)
    run("a.txt", "b.txt", val_fraction=0.1)
    assert "Note: val overlaps train" in capsys.readouterr().out


def test_gpt2_tokens_are_the_same_from_one_process_and_from_two(gpt2: None) -> None:
    texts = corpus(300)
    run("texts", tokenizer="gpt2", val_fraction=0.1, name="one", processes=1, shard_tokens="20k")
    run("texts", tokenizer="gpt2", val_fraction=0.1, name="two", processes=2, shard_tokens="20k")
    one, two = files_in(Path("data/one")), files_in(Path("data/two"))
    assert {name: data for name, data in one.items() if name.endswith("shard")} == \
        {name: data for name, data in two.items() if name.endswith("shard")}
    tokenizer = get("gpt2")
    first = tokenizer.encode(texts[0])
    split = "train" if tokens_of("train", "one")[:len(first)].tolist() == first else "val"
    assert tokens_of(split, "one")[len(first)] == 50256
    assert summarise("one").vocab_size == 50257


def test_the_embedded_corpus_needs_nothing_and_can_be_trained_on() -> None:
    assert prepare(PrepareOptions(embedded=True, out="data/stdlib", tokenizer="bytes")) == 0
    split: Split = open_dataset("stdlib").split("train")
    assert split.windows(128) > 10_000
    assert open_dataset("stdlib").split("val").windows(128) > 100


@pytest.mark.parametrize(("inputs", "options", "folder"), [
    (("texts",), {"name": ""}, "data/texts"), (("texts/00000.txt",), {"name": ""}, "data/00000"),
    (("texts",), {"out": "elsewhere/deep"}, "elsewhere/deep"), (("texts",), {"name": "x"}, "data/x"),
])
def test_where_the_result_goes(inputs: tuple[str, ...], options: dict[str, str], folder: str) -> None:
    corpus(20)
    run(*inputs, **options)
    assert summarise(folder).train_tokens > 0


# ---- what is already there

def test_a_second_time_with_the_same_settings_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    corpus(50)
    run("texts")
    before = {path: path.stat().st_mtime_ns for path in Path("data/mine").iterdir()}
    capsys.readouterr()
    run("texts")
    assert "already prepared" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("data/mine").iterdir()} == before


def test_other_settings_or_input_need_overwrite_or_another_name() -> None:
    corpus(50)
    run("texts", val_fraction=0.1)
    with pytest.raises(UsageError) as refused:
        run("texts", val_fraction=0.2)
    assert "val_fraction 0.1 then, 0.2 now" in refused.value.what
    assert "fitgpt prepare texts --name=mine --tokenizer=bytes --val_fraction=0.2 --overwrite" in refused.value.fix
    Path("texts/new.txt").write_text("new")
    with pytest.raises(UsageError, match="the input files changed"):
        run("texts", val_fraction=0.1)
    run("texts", val_fraction=0.2, shard_tokens="5k", overwrite=True)
    assert any(text == "new" for text in documents_of("train") + documents_of("val"))


def test_overwriting_leaves_nothing_of_the_old_and_touches_nothing_else() -> None:
    corpus(100)
    run("texts", shard_tokens="2k")
    Path("data/mine/notes.md").write_text("mine")
    assert len(list(Path("data/mine").glob("*.shard"))) > 10
    run("texts", overwrite=True)
    assert sorted(path.name for path in Path("data/mine").iterdir()) == [
        "manifest.json", "notes.md", "train-00000.shard", "val-00000.shard"]


def test_nanogpts_files_are_never_replaced(make_bins: Callable[..., Path]) -> None:
    corpus(10)
    make_bins(np.arange(10), np.arange(10), name="mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="nanoGPT"):
            run("texts", overwrite=overwrite)
    assert summarise("mine").train_tokens == 10


def test_a_damaged_dataset_is_not_taken_for_ready() -> None:
    corpus(50)
    run("texts")
    os.truncate("data/mine/train-00000.shard", 1000)
    with pytest.raises(DataError) as refused:
        run("texts")
    assert "truncated" in refused.value.what
    assert "fitgpt prepare texts --name=mine --tokenizer=bytes --overwrite" in refused.value.fix
    run("texts", overwrite=True)


# ---- what cannot be done

def test_a_full_disk_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(50)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(SystemFault) as refused:
        run("texts")
    assert refused.value.exit_code == 7
    assert "1000 B free" in refused.value.what
    assert not Path("data").exists()


def test_a_disk_that_fills_up_on_the_way_is_said_and_what_is_done_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(100)
    real_fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemFault) as refused:
        run("texts", shard_tokens="5k")
    assert "No space left" in refused.value.what
    assert "run the same command again" in refused.value.fix
    monkeypatch.setattr(os, "fsync", real_fsync)
    assert not list(Path("data/mine").glob(".tmp-*"))
    run("texts", shard_tokens="5k")
    run("texts", shard_tokens="5k", name="other")
    assert np.array_equal(tokens_of("train"), tokens_of("train", "other"))


def test_a_file_in_the_place_of_the_folder_is_refused() -> None:
    corpus(10)
    Path("data").mkdir()
    Path("data/mine").touch()
    with pytest.raises(SystemFault, match="cannot be made"):
        run("texts")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused() -> None:
    corpus(10)
    Path("data").mkdir(mode=0o500)
    with pytest.raises(SystemFault):
        run("texts")


def test_two_preparations_in_one_folder_are_kept_apart() -> None:
    from fitgpt.data.folder import locked

    corpus(10)
    Path("data/mine").mkdir(parents=True)
    with locked(Path("data/mine")), pytest.raises(SystemFault) as refused:
        run("texts")
    assert f"process {os.getpid()}" in refused.value.what


def test_text_that_is_all_empty_is_refused_and_leaves_nothing() -> None:
    Path("texts").mkdir()
    for number in range(3):
        Path(f"texts/{number}.txt").touch()
    with pytest.raises(DataError, match="all 3 files are empty"):
        run("texts")
    assert not list(Path("data/mine").glob("*.json"))


def test_a_large_download_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PrepareOptions(hub="some/dataset", tokenizer="bytes")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UsageError) as refused:
        prepare(options)
    assert "--yes" in refused.value.fix
    assert "--max_tokens" in refused.value.fix
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(UsageError, match="Nothing was downloaded"):
        prepare(options)


def test_processes_are_counted_from_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("fitgpt.data.workers._cgroup_quota", lambda: [])
    assert cores() == 4
    monkeypatch.setattr("fitgpt.data.workers._cgroup_quota", lambda: [2])
    assert cores() == 2


def test_the_manifest_is_plain_json_with_the_command_that_makes_it_again() -> None:
    corpus(20)
    run("texts", seed=5)
    document = json.loads(Path("data/mine/manifest.json").read_text())
    assert document["schema"] == 1
    assert document["made_by"] == "fitgpt prepare texts --name=mine --tokenizer=bytes --seed=5"
    assert document["settings"]["val_fraction"] == 0.005
