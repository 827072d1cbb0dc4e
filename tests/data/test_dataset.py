"""Sample numbers to tokens, and how files that change during a run are reported."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fitgpt.core.errors import DataError
from fitgpt.data import dataset
from fitgpt.data.dataset import ShardScans, Split, open_dataset
from fitgpt.data.sample_order import positions_for, window_of
from fitgpt.data.shards import ShardFile

Make = Callable[..., Path]


def distinct(count: int) -> np.ndarray:
    """Tokens whose value is their position."""
    return np.arange(count)


def train_split(make_bins: Make, tokens: np.ndarray) -> Split:
    make_bins(tokens, np.arange(100))
    return open_dataset("nano").split("train")


def check_tokens(split: Split, vocab_size: int) -> None:
    split.check_tokens(vocab_size, ShardScans(os.path.dirname(split.shards[0].path), print))


def test_windows_lie_within_shards_and_do_not_overlap(make_shards: Make) -> None:
    make_shards(distinct(257), distinct(30), shard_tokens=100)  # 100, 100, 57
    split = open_dataset("made").split("train")
    assert split.tokens == 257
    assert split.windows(10) == 9 + 9 + 5  # one token more than a window is read
    assert split.windows(99) == 2
    assert split.windows(56) == 1 + 1 + 1
    assert split.windows(1) == 99 + 99 + 56


def test_a_window_is_block_plus_one_consecutive_tokens(make_bins: Make) -> None:
    split = train_split(make_bins, distinct(1000))
    rows = split.read(np.arange(50), 16, seed=1)
    assert rows.shape == (50, 17)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, rows[:, :1] + np.arange(17))


@pytest.mark.parametrize("shard_tokens", [10**9, 100, 61])
def test_an_epoch_reads_every_window_once(make_shards: Make, shard_tokens: int) -> None:
    make_shards(distinct(250), distinct(30), shard_tokens=shard_tokens)
    split = open_dataset("made").split("train")
    windows = split.windows(12)
    for epoch in range(3):
        rows = split.read(np.arange(epoch * windows, (epoch + 1) * windows), 12, seed=1)
        inputs = rows[:, :-1].ravel()
        assert len(np.unique(inputs)) == inputs.size == windows * 12


def test_the_edges_of_windows_move_from_epoch_to_epoch(make_bins: Make) -> None:
    split = train_split(make_bins, distinct(1000))
    windows = split.windows(100)  # 9 windows, slack 99
    shifts = {int(split.read(np.arange(epoch * windows, (epoch + 1) * windows), 100, seed=1).min())
              for epoch in range(40)}
    assert len(shifts) > 20
    assert max(shifts) <= 99
    assert split.read(np.arange(9 * 1000), 100, seed=1).max() == 999  # the last token is read in some epoch


def test_a_batch_across_two_epochs_reads_the_same_as_single_samples(make_shards: Make) -> None:
    make_shards(distinct(250), distinct(30), shard_tokens=70)
    split = open_dataset("made").split("train")
    samples = np.arange(split.windows(8) - 5, split.windows(8) + 5)
    together = split.read(samples, 8, seed=3)
    alone = np.concatenate([split.read(np.array([sample]), 8, seed=3) for sample in samples])
    assert np.array_equal(together, alone)


def test_samples_are_read_in_the_order_of_sample_order(make_bins: Make) -> None:
    split = train_split(make_bins, distinct(1601))  # no slack at block 16
    samples = positions_for(3, 1, batch_size=4, accumulation=2)
    rows = split.read(samples, 16, seed=5, stream="train")
    assert np.array_equal(rows[:, 0], window_of(samples, 100, 5, "train") * 16)


def test_shards_and_a_headerless_bin_of_equal_tokens_give_equal_batches(make_shards: Make, make_bins: Make) -> None:
    tokens = np.random.default_rng(0).integers(0, 257, 5000)
    make_shards(tokens, tokens[:100], shard_tokens=10**9)
    make_bins(tokens, tokens[:100])
    samples = np.arange(1000)
    ours, theirs = (open_dataset(name).split("train").read(samples, 32, seed=2) for name in ("made", "nano"))
    assert np.array_equal(ours, theirs)


def test_evaluation_windows_are_fixed_and_cover_the_split_once(make_shards: Make) -> None:
    make_shards(distinct(30), distinct(250), shard_tokens=100)
    split = open_dataset("made").split("val")
    windows = split.windows(7)
    everything = split.read_fixed(np.arange(windows), 7, seed=1)
    assert np.array_equal(split.read_fixed(np.arange(5), 7, seed=1), everything[:5])
    assert np.array_equal(everything, split.read_fixed(np.arange(windows), 7, seed=1))
    starts = everything[:, 0]
    assert len(np.unique(starts)) == windows
    assert np.all(starts % 100 % 7 == 0)  # no shift
    assert not np.array_equal(starts, np.sort(starts))
    assert not np.array_equal(starts, split.read_fixed(np.arange(windows), 7, seed=2)[:, 0])


def test_a_block_longer_than_the_data_is_rejected_with_both_lengths(make_bins: Make, make_shards: Make) -> None:
    split = train_split(make_bins, distinct(64))
    assert split.windows(63) == 1
    with pytest.raises(DataError) as raised:
        split.windows(64)
    assert raised.value.exit_code == 3
    assert "block_size = 64 needs 64 + 1 = 65 tokens" in raised.value.what
    assert "the train split has 64" in raised.value.what
    assert raised.value.fix == "--block_size=63"
    make_shards(distinct(100), distinct(100), shard_tokens=50)
    with pytest.raises(DataError, match="longest of the 2 train shards has 50"):
        open_dataset("made").split("train").read(np.arange(3), 60, seed=1)


# ---- tokens beyond the vocabulary

def test_a_token_beyond_the_vocabulary_is_rejected(make_bins: Make, make_shards: Make) -> None:
    tokens = distinct(1000) % 65
    tokens[777] = 65
    split = train_split(make_bins, tokens)
    check_tokens(split, 66)
    with pytest.raises(DataError) as raised:
        check_tokens(split, 65)
    assert "train.bin holds the token 65" in raised.value.what
    assert "vocabulary is 65" in raised.value.what
    make_shards(tokens, tokens, shard_tokens=100)
    with pytest.raises(DataError, match=r"train-00007\.shard holds the token 65"):
        check_tokens(open_dataset("made").split("train"), 65)


def test_a_headerless_bin_is_scanned_once_and_again_after_a_change(
    make_bins: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = []
    original = dataset._scan
    monkeypatch.setattr(dataset, "_scan", lambda shard, was_read: scans.append(shard.path) or original(shard, was_read))
    check_tokens(train_split(make_bins, distinct(1000)), 1000)
    check_tokens(open_dataset("nano").split("train"), 1000)
    assert len(scans) == 1
    tokens = distinct(1000)
    tokens[0] = 5000
    split = train_split(make_bins, tokens)
    with pytest.raises(DataError, match="5,000"):
        check_tokens(split, 1000)
    assert len(scans) == 2


@pytest.mark.parametrize("content", ["", "null", "-1", "[]", "{"])
def test_a_damaged_or_unwritable_cache_only_costs_a_scan(
    make_bins: Make, monkeypatch: pytest.MonkeyPatch, content: str, tmp_path: Path
) -> None:
    split = train_split(make_bins, distinct(1000))
    check_tokens(split, 1000)
    for cached in (tmp_path / "cache").rglob("*.json"):
        cached.write_text(content)
    with pytest.raises(DataError, match="999"):
        check_tokens(split, 999)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="999"):
        check_tokens(split, 999)


def flip(shard: ShardFile) -> None:
    """Flips one bit of a token, and leaves no trace in the file's times."""
    with open(shard.path, "r+b") as file:
        file.seek(shard.start + 100)
        byte = file.read(1)[0]
        file.seek(shard.start + 100)
        file.write(bytes([byte ^ 1]))
    os.utime(shard.path, ns=(shard.mtime_ns, shard.mtime_ns))


def test_damaged_shards_are_all_named_before_they_are_used(make_shards: Make) -> None:
    folder = make_shards(distinct(500), distinct(100), shard_tokens=100)
    shards = open_dataset("made").split("train").shards
    flip(shards[1])
    flip(shards[4])
    for _ in range(2):  # it is not remembered as good
        with pytest.raises(DataError, match=r"train-00001\.shard is damaged.*train-00004\.shard is damaged"):
            open_dataset(str(folder)).verify(65536)
    open_dataset(str(folder)).verify(65536, splits=["val"])


def test_a_verified_shard_is_read_again_only_after_a_change_or_on_request(
    make_shards: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scans = make_shards(distinct(300), distinct(100), shard_tokens=100), []
    original = dataset._scan
    monkeypatch.setattr(dataset, "_scan", lambda shard, was_read: scans.append(shard.path) or original(shard, was_read))
    for fresh, expected in ((False, 4), (False, 4), (True, 8)):
        open_dataset(str(folder)).verify(65536, fresh=fresh)
        assert len(scans) == expected
    copied = folder / "copy"
    shutil.copy2(folder / "train-00000.shard", copied)  # the same size and times, another inode
    os.replace(copied, folder / "train-00000.shard")
    open_dataset(str(folder)).verify(65536)
    assert len(scans) == 9


def test_verifying_can_be_stopped_and_resumes_after_the_shards_it_has_read(make_shards: Make) -> None:
    folder, parts = make_shards(distinct(300), distinct(100), shard_tokens=100), []

    def stopping() -> None:
        parts.append(len(parts))
        if len(parts) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_dataset(str(folder)).verify(65536, reading=stopping)
    open_dataset(str(folder)).verify(65536, reading=stopping)
    assert len(parts) == 5  # the third and fourth shard


def test_tokens_of_more_than_two_bytes_without_a_header_are_an_error(make_bins: Make) -> None:
    tokens = np.random.default_rng(0).integers(2, 60_000, 2000)
    folder = make_bins(tokens, tokens)
    open_dataset("nano").verify(60_000)
    for wide in ("<u4", "<i8"):
        tokens.astype(wide).tofile(folder / "train.bin")
        with pytest.raises(DataError, match=r"train\.bin looks like tokens of 4 or 8 bytes"):
            open_dataset("nano").verify(60_000)
    np.zeros(2000, "<u2").tofile(folder / "train.bin")  # both halves are alike: uint16
    open_dataset("nano").verify(60_000)


def test_a_token_damaged_on_disk_after_opening_is_rejected_when_read(make_shards: Make, make_bins: Make) -> None:
    for folder, start in ((make_shards(distinct(200), distinct(30)), 256), (make_bins(distinct(200), distinct(30)), 0)):
        split = open_dataset(folder.name).split("train")
        check_tokens(split, 257)
        shard = split.shards[0]
        with open(shard.path, "r+b") as file:
            file.seek(start + 100 * 2 + 1)
            file.write(b"\xff")
        os.utime(shard.path, ns=(shard.mtime_ns, shard.mtime_ns))  # a bit that flipped on disk changes no time
        with pytest.raises(DataError, match=r"damaged or changed"):
            split.read(np.arange(split.windows(4)), 4, seed=1)


# ---- files that change during a run

def test_a_shard_truncated_during_training_is_a_data_error(make_shards: Make) -> None:
    make_shards(distinct(20_000), distinct(30), shard_tokens=20_000)
    split = open_dataset("made").split("train")
    samples = np.arange(split.windows(64))
    split.read(samples, 64, seed=1)
    os.truncate(split.shards[0].path, 5000)
    with pytest.raises(DataError) as raised:
        split.read(samples, 64, seed=1)
    assert raised.value.exit_code == 3
    assert "train-00000.shard was truncated: 40,256 bytes when it was opened, 5,000 now" in raised.value.what
    with pytest.raises(DataError, match="truncated"):
        split.recheck()


def test_a_shard_replaced_within_an_epoch_is_rejected_when_read(make_shards: Make) -> None:
    folder = make_shards(distinct(300), distinct(30), shard_tokens=100)
    split = open_dataset("made").split("train")
    samples = np.arange(split.windows(9))
    split.read(samples, 9, seed=1)
    path = folder / "train-00001.shard"
    other = path.with_suffix(".new")
    other.write_bytes((folder / "train-00002.shard").read_bytes())  # a valid shard of the same size
    mtime_ns = path.stat().st_mtime_ns + 10**9
    os.utime(other, ns=(mtime_ns, mtime_ns))
    other.replace(path)
    with pytest.raises(DataError) as raised:
        split.read(samples, 9, seed=1)
    assert "train-00001.shard was changed after it was opened" in raised.value.what
    assert "fitgpt prepare" in raised.value.fix


def test_recheck_rejects_a_changed_or_deleted_shard(make_shards: Make) -> None:
    folder = make_shards(distinct(300), distinct(30), shard_tokens=100)
    split = open_dataset("made").split("train")
    split.recheck()
    path = folder / "train-00001.shard"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"train-00001\.shard was changed"):
        split.recheck()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    split.recheck()
    path.unlink()
    with pytest.raises(DataError, match=r"train-00001\.shard is missing"):
        split.recheck()
    with pytest.raises(DataError, match=r"train-00001\.shard"):
        split.read(np.arange(split.windows(9)), 9, seed=1)


def test_a_thousand_shards_need_few_file_descriptors(make_bins: Make, make_shards: Make, monkeypatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    make_shards(distinct(9000) % 256, distinct(30), shard_tokens=9)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    try:
        split = open_dataset("made").split("train")
        assert len(split.shards) == 1000
        rows = split.read(np.arange(split.windows(4)), 4, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert np.array_equal(rows, (rows[:, :1] + np.arange(5)) % 256)


def test_offsets_beyond_32_bits_are_read(make_bins: Make) -> None:
    folder = make_bins(distinct(10), distinct(30))
    os.truncate(folder / "train.bin", 500 * 10**9)  # sparse: half a terabyte of zeros
    windows = (250 * 10**9 - 1) // 1024
    last = (windows - 1) * 1024
    with open(folder / "train.bin", "r+b") as file:
        file.seek(2 * last)
        file.write(np.arange(1, 1026, dtype="<u2").tobytes())
    split = open_dataset("nano").split("train")
    assert split.windows(1024) == windows
    row = split._gather(np.array([0]), np.array([last]), 1025)
    assert np.array_equal(row[0], np.arange(1, 1026))
    assert split.read(np.arange(64), 1024, seed=1).shape == (64, 1025)


def test_several_threads_read_the_same_as_one(make_shards: Make) -> None:
    make_shards(distinct(2000), distinct(30), shard_tokens=100)
    split = open_dataset("made").split("train")
    samples = np.arange(100)
    expected = split.read(samples, 16, seed=1)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.extend(
        np.array_equal(split.read(samples, 16, seed=1), expected) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


# ---- overlap of val and train

def test_val_that_overlaps_train_is_noted(make_bins: Make, make_shards: Make) -> None:
    text = np.random.default_rng(0).integers(0, 200, 50_000)
    make_bins(text[:45_000], text[45_000:])
    assert open_dataset("nano").notes == ()
    for train, val in ((text, text), (text, text[45_000:]), (text, text[:3000]), (text, text[20_000:30_000])):
        make_bins(train, val)
        assert "val overlaps train" in open_dataset("nano").notes[0]
    make_shards(text, text[45_000:], shard_tokens=20_000)
    assert "val overlaps train" in open_dataset("made").notes[0]


def test_val_and_train_as_one_file_are_noted(make_bins: Make) -> None:
    folder = make_bins(distinct(1000), distinct(10))
    (folder / "val.bin").unlink()
    os.link(folder / "train.bin", folder / "val.bin")
    assert "same file" in open_dataset("nano").notes[0]


def test_a_few_common_phrases_are_no_overlap(make_bins: Make) -> None:
    random = np.random.default_rng(0)
    phrase = random.integers(0, 200, 500)
    train = np.concatenate([phrase, random.integers(0, 200, 20_000)])
    val = np.concatenate([phrase[:80], random.integers(0, 200, 5000)])
    make_bins(train, val)
    assert open_dataset("nano").notes == ()
    make_bins(np.zeros(1000), np.zeros(1000))  # a run of one token is no evidence
    assert open_dataset("nano").notes == ()
