"""Text to a dataset that can be trained on."""

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
from fitgpt.core.errors import DataError, SystemFault, UsageError
from fitgpt.data.dataset import open_dataset
from fitgpt.data.pipeline import (
    PreparedDataset,
    Progress,
    available_cores,
    is_validation_document,
    prepare_dataset,
)
from fitgpt.data.shards import read_header, read_manifest, summarise
from fitgpt.data.tokenizers import get_tokenizer
from fitgpt.data.writer import locked

END = 256


def prepare(*inputs: str, **options: Any) -> PreparedDataset:
    settings = {"name": "" if "out" in options else "mine", "tokenizer": "bytes", "processes": 1} | options
    return prepare_dataset(PrepareOptions(input=inputs, **settings), notify=lambda text: None,
                           ask=lambda question: None)


def corpus(documents: int = 200, folder: str = "texts") -> list[str]:
    """Different texts of 50 to 1,000 characters."""
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


# ---- the result

def test_every_document_is_in_one_split_once_and_ends_with_end_of_text() -> None:
    texts = corpus()
    prepare("texts", val_fraction=0.1)
    train, val = documents_of("train"), documents_of("val")
    assert sorted(train + val) == sorted(texts)
    assert 8 <= len(val) <= 36
    assert train == [text for text in texts if text in set(train)]  # in the order of the files


def test_shards_have_the_requested_size_and_correct_headers() -> None:
    corpus()
    prepare("texts", val_fraction=0.1, shard_tokens="10k")
    made = read_manifest(Path("data/mine"))
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
    prepare("texts", val_fraction=0.1, name="one")
    prepare("texts", val_fraction=0.1, name="many", shard_tokens="1234")
    for split in ("train", "val"):
        assert np.array_equal(tokens_of(split, "one"), tokens_of(split, "many"))


def test_copies_of_a_document_are_never_in_both_splits() -> None:
    texts = corpus(100)
    for number, text in enumerate(texts):
        Path("texts", f"copy-{number}.txt").write_text(text)
    prepare("texts", val_fraction=0.2)
    assert not set(documents_of("train")) & set(documents_of("val"))


def test_the_seed_selects_the_validation_documents() -> None:
    corpus()
    prepare("texts", val_fraction=0.1, name="one", seed=1)
    prepare("texts", val_fraction=0.1, name="two", seed=2)
    assert documents_of("val", "one") != documents_of("val", "two")


@pytest.mark.parametrize("documents", [1, 2, 3, 5, 20])
def test_with_few_documents_val_still_gets_its_share(documents: int) -> None:
    texts = corpus(documents)
    prepare("texts", val_fraction=0.1, shard_tokens="500")
    train, val = tokens_of("train"), tokens_of("val")
    total = sum(len(text) + 1 for text in texts)
    assert len(train) + len(val) == total
    assert 0.05 <= len(val) / total <= 0.2
    made = read_manifest(Path("data/mine"))
    assert made.documents["train"] >= 1
    assert sum(made.documents.values()) == documents  # one that was cut is not counted twice


def test_one_document_is_split_near_its_end() -> None:
    Path("input.txt").write_text("to be or not to be " * 1000)
    prepare("input.txt", val_fraction=0.1, shard_tokens="3k")
    assert len(tokens_of("train")) == 17_101
    assert len(tokens_of("val")) == 1900
    both = np.concatenate([tokens_of("train"), tokens_of("val")])
    assert bytes(both[:-1].astype(np.uint8)) == b"to be or not to be " * 1000


def test_a_single_document_assigned_to_val_is_divided_too() -> None:
    Path("input.txt").write_text("".join(map(str, range(3000))))
    for seed in range(10):  # about half of the seeds assign the document to val
        prepare("input.txt", val_fraction=0.5, name=f"seed{seed}", seed=seed, shard_tokens="1k")
        assert abs(len(tokens_of("val", f"seed{seed}")) / 10_891 - 0.5) < 0.01
        both = np.concatenate([tokens_of("train", f"seed{seed}"), tokens_of("val", f"seed{seed}")])
        assert len(both) == 10_891


def test_max_tokens_is_exact() -> None:
    corpus()
    prepare("texts", val_fraction=0.1, max_tokens="12345")
    assert len(tokens_of("train")) + len(tokens_of("val")) == 12_345
    prepare("texts", val_fraction=0.1, max_tokens="0", name="all")
    assert len(tokens_of("train", "all")) > 12_345


def test_repairs_and_skipped_files_are_counted() -> None:
    corpus(30)
    Path("texts/a.txt").write_bytes(b"bad \xff byte")
    Path("texts/b.txt").write_bytes(b"")
    Path("texts/c.png").write_bytes(b"\0")
    prepare("texts")
    counts = read_manifest(Path("data/mine")).counts
    assert counts == {"binary_files_skipped": 1, "empty_documents": 1, "invalid_utf8_replaced": 1}
    assert sum(read_manifest(Path("data/mine")).documents.values()) == 31


def test_input_without_text_is_rejected_and_leaves_no_files() -> None:
    Path("empty.txt").write_bytes(b"")
    Path("blank.jsonl").write_bytes(b'{"text": ""}\n')
    for source in ("empty.txt", "blank.jsonl"):
        with pytest.raises(DataError, match="no text"):
            prepare(source)
        assert not Path("data").exists()
    Path("data").mkdir()
    with pytest.raises(DataError, match="no text"):
        prepare("blank.jsonl")
    assert list(Path("data").iterdir()) == []


def test_an_overlap_of_val_and_train_is_noted() -> None:
    """Two copies of one text, and nothing else: part of it has to be in both splits."""
    text = " ".join(map(str, np.random.default_rng(0).integers(0, 10**6, 3000)))
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(text)
    assert "val overlaps train" in prepare("a.txt", "b.txt", val_fraction=0.1).notes[0]


def test_one_and_two_processes_give_the_same_gpt2_tokens(gpt2: None) -> None:
    texts = corpus(300)
    prepare("texts", tokenizer="gpt2", val_fraction=0.1, name="one", processes=1, shard_tokens="20k")
    prepare("texts", tokenizer="gpt2", val_fraction=0.1, name="two", processes=2, shard_tokens="20k")
    one, two = files_in(Path("data/one")), files_in(Path("data/two"))
    assert {name: data for name, data in one.items() if name.endswith("shard")} == \
        {name: data for name, data in two.items() if name.endswith("shard")}
    tokenizer = get_tokenizer("gpt2")
    first = tokenizer.encode(texts[0])
    split = "train" if tokens_of("train", "one")[:len(first)].tolist() == first else "val"
    assert tokens_of(split, "one")[len(first)] == 50256
    assert summarise("one").vocab_size == 50257


def test_the_embedded_corpus_gives_a_dataset() -> None:
    prepare(embedded=True, out="data/stdlib")
    assert open_dataset("stdlib").split("train").windows(128) > 10_000
    assert open_dataset("stdlib").split("val").windows(128) > 100


@pytest.mark.parametrize(("inputs", "options", "folder"), [
    (("texts",), {"name": ""}, "data/texts"), (("texts/00000.txt",), {"name": ""}, "data/00000"),
    (("texts",), {"out": "elsewhere/deep"}, "elsewhere/deep"), (("texts",), {"name": "x"}, "data/x"),
])
def test_out_name_or_input_gives_the_folder(inputs: tuple[str, ...], options: dict[str, str], folder: str) -> None:
    corpus(20)
    prepare(*inputs, **options)
    assert summarise(folder).train_tokens > 0


# ---- existing datasets

def test_a_second_call_with_the_same_settings_changes_nothing() -> None:
    corpus(50)
    assert not prepare("texts").existed
    before = {path: path.stat().st_mtime_ns for path in Path("data/mine").iterdir()}
    assert prepare("texts").existed
    assert {path: path.stat().st_mtime_ns for path in Path("data/mine").iterdir()} == before


def test_other_settings_or_input_need_overwrite() -> None:
    corpus(50)
    prepare("texts", val_fraction=0.1)
    with pytest.raises(UsageError) as raised:
        prepare("texts", val_fraction=0.2)
    assert "val_fraction 0.1 then, 0.2 now" in raised.value.what
    assert "fitgpt prepare texts --name=mine --tokenizer=bytes --val_fraction=0.2 --overwrite" in raised.value.fix
    Path("texts/new.txt").write_text("new")
    with pytest.raises(UsageError, match="the input files changed"):
        prepare("texts", val_fraction=0.1)
    prepare("texts", val_fraction=0.2, shard_tokens="5k", overwrite=True)
    assert any(text == "new" for text in documents_of("train") + documents_of("val"))


def test_overwrite_removes_the_old_shards_and_no_other_files() -> None:
    corpus(100)
    prepare("texts", shard_tokens="2k")
    Path("data/mine/notes.md").write_text("mine")
    assert len(list(Path("data/mine").glob("*.shard"))) > 10
    prepare("texts", overwrite=True)
    assert sorted(path.name for path in Path("data/mine").iterdir()) == [
        "manifest.json", "notes.md", "train-00000.shard", "val-00000.shard"]


def test_nanogpt_files_are_never_replaced(make_bins: Callable[..., Path]) -> None:
    corpus(10)
    make_bins(np.arange(10), np.arange(10), name="mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="nanoGPT"):
            prepare("texts", overwrite=overwrite)
    assert summarise("mine").train_tokens == 10


def test_a_damaged_dataset_is_rejected() -> None:
    corpus(50)
    prepare("texts")
    os.truncate("data/mine/train-00000.shard", 1000)
    with pytest.raises(DataError) as raised:
        prepare("texts")
    assert "truncated" in raised.value.what
    assert "fitgpt prepare texts --name=mine --tokenizer=bytes --overwrite" in raised.value.fix
    prepare("texts", overwrite=True)


# ---- errors

def test_a_full_disk_is_an_error_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(50)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(SystemFault) as raised:
        prepare("texts")
    assert raised.value.exit_code == 7
    assert "1000 B free" in raised.value.what
    assert not Path("data").exists()


def test_after_the_disk_filled_up_the_same_command_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(100)
    real_fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemFault) as raised:
        prepare("texts", shard_tokens="5k")
    assert "No space left" in raised.value.what
    assert "run the same command again" in raised.value.fix
    monkeypatch.setattr(os, "fsync", real_fsync)
    assert not list(Path("data/mine").glob(".tmp-*"))
    prepare("texts", shard_tokens="5k")
    prepare("texts", shard_tokens="5k", name="other")
    assert np.array_equal(tokens_of("train"), tokens_of("train", "other"))


def test_a_file_in_place_of_the_folder_is_an_error() -> None:
    corpus(10)
    Path("data").mkdir()
    Path("data/mine").touch()
    with pytest.raises(SystemFault, match="cannot be created"):
        prepare("texts")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error() -> None:
    corpus(10)
    Path("data").mkdir(mode=0o500)
    with pytest.raises(SystemFault):
        prepare("texts")


def test_a_second_process_cannot_write_to_the_same_folder() -> None:
    corpus(10)
    Path("data/mine").mkdir(parents=True)
    with locked(Path("data/mine")), pytest.raises(SystemFault) as raised:
        prepare("texts")
    assert f"process {os.getpid()}" in raised.value.what


def test_a_link_in_place_of_the_lock_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / ".prepare.lock").symlink_to(tmp_path / "notes")
    with pytest.raises(SystemFault, match=r"\.prepare\.lock is a symbolic link"), locked(tmp_path):
        pass
    assert not (tmp_path / "notes").exists()



def test_empty_files_are_rejected_and_leave_no_files() -> None:
    Path("texts").mkdir()
    for number in range(3):
        Path(f"texts/{number}.txt").touch()
    with pytest.raises(DataError, match="all 3 files are empty"):
        prepare("texts")
    assert not list(Path("data/mine").glob("*.json"))


def test_the_number_of_processes_respects_affinity_and_cgroup_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    cgroups = Path("cgroups")
    assert available_cores(cgroups) == 4
    (cgroups / "cpu").mkdir(parents=True)
    for quota, cores in (("max 100000", 4), ("200000 100000", 2), ("10000 100000", 1), ("900000 100000", 4)):
        (cgroups / "cpu.max").write_text(f"{quota}\n")
        assert available_cores(cgroups) == cores
    (cgroups / "cpu.max").unlink()
    for quota, cores in (("-1", 4), ("200000", 2)):  # version 1
        (cgroups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert available_cores(cgroups) == cores


def test_the_manifest_holds_the_command_that_creates_the_dataset() -> None:
    corpus(20)
    prepare("texts", seed=5)
    document = json.loads(Path("data/mine/manifest.json").read_text())
    assert document["schema"] == 1
    assert document["made_by"] == "fitgpt prepare texts --name=mine --tokenizer=bytes --seed=5"
    assert document["settings"]["val_fraction"] == 0.005


@pytest.mark.parametrize(("answer", "message"), [(None, "no terminal to confirm"), (False, "Nothing was downloaded")])
def test_a_large_download_needs_a_confirmation(answer: bool | None, message: str) -> None:
    options = PrepareOptions(hub="some/dataset", tokenizer="bytes")
    with pytest.raises(UsageError, match=message) as raised:
        prepare_dataset(options, notify=lambda text: None, ask=lambda question: answer)
    assert "--yes" in raised.value.fix
    assert "--max_tokens" in raised.value.fix


def test_a_document_is_assigned_to_val_by_its_text_and_the_seed() -> None:
    texts = [f"document {number}".encode() for number in range(2000)]
    val = [is_validation_document(text, 1337, 0.1) for text in texts]
    assert 150 <= sum(val) <= 250
    assert val == [is_validation_document(text, 1337, 0.1) for text in texts]
    assert val != [is_validation_document(text, 1, 0.1) for text in texts]


def test_progress_shows_the_fraction_done_and_the_time_left() -> None:
    assert Progress(None, None, 0, 0).fraction(10, 10) is None
    assert Progress(1000, 50, 0, 0).fraction(100, 10) == 0.2  # whichever total is reached first
    assert Progress(1000, None, 0, 0).fraction(2000, 10) == 1.0
    resumed = Progress(1000, None, 500, 100)
    assert resumed.describe(500, 100).startswith("100 tokens · 500 B of text")
    assert resumed.describe(750, 150).startswith(" 75% · 150 tokens · 750 B of text")
    assert resumed.describe(750, 150).endswith(" left")


def test_the_speed_in_the_docs_is_the_recorded_one() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/prepare.md").read_text(encoding="utf-8")
    recorded = json.loads((root / "bench/results/prepare_speed.json").read_text(encoding="utf-8"))
    for row in recorded["rows"]:
        rates = row["tokens_per_cpu_s"], row["tokens_per_s"]
        cells = [f"{rate / 1e6:.2f}M | {6e9 / rate / 3600:.2f} h" for rate in rates]
        assert f"| {row['processes']} | {' | '.join(cells)} |" in page
    assert recorded["date"] in page


def test_an_input_whose_name_is_not_utf8_is_prepared_and_found_again() -> None:
    name = os.fsdecode(b"\xed\xa0\x80.txt")
    Path(name).write_text("text\n" * 1000)
    assert not prepare(name).existed
    assert prepare(name).existed
