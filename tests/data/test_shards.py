"""Headers, manifests and headerless files: what is read from them, and how damage is reported."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitgpt.core.errors import DataError
from fitgpt.data.shards import (
    HEADER_BYTES,
    MAGIC,
    ShardHeader,
    check_vocab,
    pack,
    padded_vocab,
    read_header,
    summarise,
)

Make = Callable[..., Path]
GOOD = ShardHeader("uint16", 4, 257, 9, "bytes", "ab" * 32)
PAYLOAD = struct.pack("<4H", 1, 9, 2, 3)


def reject(path: Path) -> DataError:
    with pytest.raises(DataError) as raised:
        read_header(path)
    assert str(path) in raised.value.what
    assert raised.value.fix
    return raised.value


def shard(content: bytes) -> Path:
    path = Path("train-00000.shard")
    path.write_bytes(content)
    return path


def with_valid_crc(raw: bytes) -> bytes:
    """The header with the checksum that matches its other bytes."""
    return raw[:HEADER_BYTES - 4] + struct.pack("<I", zlib.crc32(raw[:HEADER_BYTES - 4]))


def test_a_packed_header_is_read_back() -> None:
    found, file = read_header(shard(pack(GOOD) + PAYLOAD))
    assert found == GOOD
    assert (file.tokens, file.dtype, file.start, file.max_token, file.size) == (4, "uint16", 256, 9, 264)


def test_the_layout_of_a_header_never_changes() -> None:
    raw = pack(GOOD)
    assert len(raw) == HEADER_BYTES == 256
    assert MAGIC == b"FITGPT\r\n"
    assert raw[:40].hex() == ("464954475054" "0d0a" "0d0c0b0a" "01000000" "02000000" "01010000"
                              "0900000000000000" "0400000000000000")
    assert raw[40:45] == b"bytes"
    assert raw[72:104].hex() == "ab" * 32


def test_an_empty_shard_is_rejected() -> None:
    assert "is empty (0 bytes)" in reject(shard(b"")).what


def test_a_truncated_or_longer_shard_is_rejected_with_both_sizes() -> None:
    for content, word in ((PAYLOAD[:-1], "truncated"), (b"", "truncated"), (PAYLOAD + b"\0", "too long")):
        message = reject(shard(pack(GOOD) + content)).what
        assert word in message
        assert "264 bytes" in message
        assert f"{256 + len(content):,} bytes" in message
    assert "only 100 bytes" in reject(shard(pack(GOOD)[:100])).what


def test_a_wrong_magic_number_is_shown() -> None:
    assert "starts with b'PK" in reject(shard(b"PK\x03\x04" + bytes(300))).what


def test_a_big_endian_shard_and_a_newer_version_are_rejected() -> None:
    raw = pack(GOOD)
    swapped = with_valid_crc(raw[:8] + raw[8:12][::-1] + raw[12:])
    assert "big-endian" in reject(shard(swapped + PAYLOAD)).what
    newer = with_valid_crc(raw[:12] + struct.pack("<I", 2) + raw[16:])
    assert "version 2" in reject(shard(newer + PAYLOAD)).what


@pytest.mark.parametrize("tokens", [2**40, 2**62, -1, -(2**63), 0])
def test_a_token_count_that_contradicts_the_file_size_is_rejected(tokens: int) -> None:
    raw = pack(GOOD)
    claim = with_valid_crc(raw[:32] + struct.pack("<q", tokens) + raw[40:])
    assert f"{tokens:,}" in reject(shard(claim + PAYLOAD)).what


def test_other_invalid_fields_are_rejected() -> None:
    raw = pack(GOOD)
    for offset, layout, value in ((16, "<I", 3), (24, "<q", 257), (24, "<q", -1), (20, "<I", 0), (8, "<I", 7)):
        size = struct.calcsize(layout)
        reject(shard(with_valid_crc(raw[:offset] + struct.pack(layout, value) + raw[offset + size:]) + PAYLOAD))


def test_a_flipped_bit_anywhere_in_a_header_is_rejected() -> None:
    raw = pack(GOOD)
    for position in range(HEADER_BYTES):
        damaged = bytearray(raw)
        damaged[position] ^= 4
        reject(shard(bytes(damaged) + PAYLOAD))


def test_a_pipe_in_place_of_a_shard_is_rejected_and_does_not_block() -> None:
    os.mkfifo("train-00000.shard")
    with pytest.raises(DataError, match="pipe or a device"):
        read_header(Path("train-00000.shard"))


# ---- datasets

def test_a_prepared_dataset_is_summarised_by_name_and_by_path(make_shards: Make) -> None:
    folder = make_shards(np.arange(2500) % 200, np.arange(300) % 200)
    summary = summarise("made")
    assert summary == summarise(str(folder)) == summarise(str(folder) + "/")
    assert (summary.tokenizer, summary.vocab_size) == ("bytes", 65536)
    assert (summary.train_tokens, summary.val_tokens) == (2500, 300)


def test_the_fingerprint_changes_with_the_data_and_not_with_the_folder(make_shards: Make, make_bins: Make) -> None:
    one = make_shards(np.arange(2500) % 200, np.arange(300), name="one")
    assert summarise("one").fingerprint == summarise(str(one.absolute())).fingerprint
    make_shards(np.arange(2500) % 199, np.arange(300), name="two")
    assert summarise("one").fingerprint != summarise("two").fingerprint
    tokens = np.arange(200_000) % 50_000
    make_bins(tokens, tokens[:999], name="three")
    before = summarise("three").fingerprint
    for position in (0, -1):
        changed = tokens.copy()
        changed[position] += 1
        make_bins(changed, tokens[:999], name="three")
        assert summarise("three").fingerprint != before
    make_bins(tokens, tokens[:999], name="three", characters="ab")
    assert summarise("three").fingerprint != before


def test_nanogpt_files_are_summarised_with_and_without_meta_pkl(make_bins: Make) -> None:
    make_bins(np.zeros(100), np.zeros(10))
    summary = summarise("nano")
    assert (summary.tokenizer, summary.vocab_size) == ("unknown", None)
    assert (summary.train_tokens, summary.val_tokens) == (100, 10)
    make_bins(np.zeros(100), np.zeros(10), characters="abc")
    assert (summarise("nano").tokenizer, summarise("nano").vocab_size) == ("chars", 3)


@pytest.mark.parametrize(("size", "word"), [(0, "empty (0 bytes)"), (7, "7 bytes")])
def test_an_empty_bin_or_one_of_odd_size_is_rejected(make_bins: Make, size: int, word: str) -> None:
    folder = make_bins(np.zeros(100), np.zeros(10))
    (folder / "val.bin").write_bytes(bytes(size))
    with pytest.raises(DataError) as raised:
        summarise("nano")
    assert raised.value.exit_code == 3
    assert "val.bin" in raised.value.what
    assert word in raised.value.what
    assert "uint16" in raised.value.what


@pytest.mark.parametrize("missing", ["train", "val"])
def test_a_missing_split_is_reported_by_file_name(make_bins: Make, make_shards: Make, missing: str) -> None:
    (make_bins(np.zeros(100), np.zeros(10)) / f"{missing}.bin").unlink()
    with pytest.raises(DataError, match=rf"{missing}\.bin is missing"):
        summarise("nano")
    (make_shards(np.arange(100), np.arange(100)) / f"{missing}-00000.shard").unlink()
    with pytest.raises(DataError, match=rf"{missing}-00000\.shard cannot be read: No such file"):
        summarise("made")


def test_a_missing_dataset_lists_the_others_and_the_command_that_creates_it(make_bins: Make) -> None:
    make_bins(np.zeros(10), np.zeros(10), name="shakespeare")
    Path("data/openwebtext").mkdir()  # with nothing but nanoGPT's script
    Path("data/openwebtext/prepare.py").touch()
    with pytest.raises(DataError) as raised:
        summarise("mine")
    assert "data/ holds: shakespeare." in raised.value.what
    assert "fitgpt prepare FILE_OR_FOLDER --name=mine" in raised.value.fix
    with pytest.raises(DataError) as raised:
        summarise("stdlib")
    assert "fitgpt prepare --embedded --name=stdlib --tokenizer=bytes" in raised.value.fix


def test_a_misspelt_name_or_a_bin_file_suggests_the_dataset(make_bins: Make) -> None:
    make_bins(np.zeros(10), np.zeros(10), name="shakespeare")
    for given, meant in (("shakespear", "shakespeare"), ("data/shakespeare/train.bin", "data/shakespeare")):
        with pytest.raises(DataError) as raised:
            summarise(given)
        assert raised.value.fix.startswith(f"Did you mean --dataset={meant}?")
        summarise(meant)


@pytest.mark.parametrize("dataset", ["", "no\0such", "x" * 5000, "../../nowhere", "🙂", "data/../nothing"])
def test_any_unknown_dataset_name_is_a_data_error(dataset: str) -> None:
    with pytest.raises(DataError) as raised:
        summarise(dataset)
    assert "\0" not in str(raised.value)


def test_a_folder_without_data_suggests_its_prepare_script() -> None:
    folder = Path("data/openwebtext")
    folder.mkdir(parents=True)
    with pytest.raises(DataError, match="holds no dataset"):
        summarise("openwebtext")
    (folder / "prepare.py").touch()
    with pytest.raises(DataError) as raised:
        summarise("openwebtext")
    assert "python data/openwebtext/prepare.py" in raised.value.fix


def test_an_unfinished_dataset_is_rejected() -> None:
    Path("data/half").mkdir(parents=True)
    Path("data/half/progress.json").touch()
    with pytest.raises(DataError, match="not finished"):
        summarise("half")


def test_a_shard_renamed_to_train_bin_is_rejected(make_shards: Make) -> None:
    folder = make_shards(np.arange(100), np.arange(100))
    Path("data/moved").mkdir()
    for split in ("train", "val"):
        (folder / f"{split}-00000.shard").rename(f"data/moved/{split}.bin")
    with pytest.raises(DataError, match=r"without its manifest\.json"):
        summarise("moved")


def test_a_shard_of_another_dataset_is_rejected(make_shards: Make) -> None:
    folder = make_shards(np.arange(100), np.arange(100))
    other = make_shards(np.arange(100)[::-1], np.arange(100), name="other")
    (other / "train-00000.shard").rename(folder / "train-00000.shard")
    with pytest.raises(DataError) as raised:
        summarise("made")
    assert "does not belong" in raised.value.what
    assert "fitgpt prepare x --name=made --overwrite" in raised.value.fix


@pytest.mark.parametrize("change", [
    {"schema": 2}, {"schema": None}, {"tokenizer": 5}, {"vocab_size": -1}, {"vocab_size": "257"}, {"splits": []},
    {"splits": {"train": {}}}, {"counts": {"a": "b"}}, {"dtype": None}, {"settings": 3},
    {"tokenizer": "\ud800"},
], ids=ascii)
def test_a_manifest_with_an_invalid_field_is_rejected(make_shards: Make, change: dict[str, Any]) -> None:
    path = make_shards(np.arange(100), np.arange(100)) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=r"manifest\.json"):
        summarise("made")


@pytest.mark.parametrize("row", [
    {"file": "../../etc/passwd"}, {"file": "/etc/passwd"}, {"file": ".."}, {"file": ""}, {"file": "a\\b"},
    {"file": "a\0b"}, {"tokens": -5}, {"tokens": 1e9}, {"tokens": True}, {"sha256": None},
], ids=str)
def test_a_manifest_with_an_invalid_file_name_or_count_is_rejected(make_shards: Make, row: dict[str, Any]) -> None:
    path = make_shards(np.arange(100), np.arange(100)) / "manifest.json"
    document = json.loads(path.read_text())
    document["splits"]["train"]["shards"][0] |= row
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="damaged"):
        summarise("made")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"schema": NaN}'])
def test_a_manifest_that_is_not_json_is_rejected(make_shards: Make, content: bytes) -> None:
    path = make_shards(np.arange(100), np.arange(100)) / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        summarise("made")


def test_a_sparse_bin_of_500_gb_is_summarised_from_its_size(make_bins: Make) -> None:
    path = make_bins(np.zeros(10), np.zeros(10)) / "train.bin"
    os.truncate(path, 500 * 10**9)  # sparse
    assert summarise("nano").train_tokens == 250 * 10**9


def test_reading_headers_loads_neither_numpy_nor_torch() -> None:
    code = "import sys, fitgpt.data.shards; sys.exit(bool({'numpy', 'torch', 'tiktoken'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_models_vocabulary_is_padded_as_in_nanogpt() -> None:
    assert padded_vocab("gpt2", 50257) == padded_vocab("unknown", None) == 50304
    assert (padded_vocab("chars", 65), padded_vocab("bytes", 257)) == (65, 320)


@pytest.mark.parametrize(("tokenizer", "model", "data"), [
    (257, 257, 50257), (50257, 50257, 257), (50257, 257, 50257), (257, 50304, 257), (65, 64, 65), (None, 64, 65),
    (65, 64, None),
])
def test_vocabularies_that_disagree_are_rejected(tokenizer: int | None, model: int, data: int | None) -> None:
    with pytest.raises(DataError) as raised:
        check_vocab(tokenizer, model, data)
    for vocab in (tokenizer, model, data):
        assert (f"{vocab:,}" if vocab else "unknown") in raised.value.what


@pytest.mark.parametrize(("tokenizer", "model", "data"), [
    (50257, 50304, 50257), (50257, 50257, 50257), (257, 320, 257), (65, 65, 65), (None, 50304, None), (65, 65, None),
])
def test_equal_or_padded_vocabularies_are_accepted(tokenizer: int | None, model: int, data: int | None) -> None:
    check_vocab(tokenizer, model, data)
