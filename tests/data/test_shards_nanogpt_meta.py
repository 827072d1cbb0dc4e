"""nanoGPT's meta.pkl is read and checked without being unpickled."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitgpt.core.errors import DataError
from fitgpt.data.shards import MAX_META_BYTES, NanoGPTMeta, read_meta

CHARACTERS = "\n !abcé"


def nanogpt_meta() -> dict[str, Any]:
    return {"vocab_size": len(CHARACTERS), "itos": dict(enumerate(CHARACTERS)),
            "stoi": {character: token for token, character in enumerate(CHARACTERS)}}


def write(content: bytes) -> Path:
    path = Path("meta.pkl")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_file_that_nanogpt_writes_is_read_in_every_protocol(protocol: int) -> None:
    found = read_meta(write(pickle.dumps(nanogpt_meta(), protocol)))
    assert found.vocab_size == 7
    assert "".join(found.itos) == CHARACTERS


def test_a_vocabulary_of_thousands_is_read() -> None:
    characters = [chr(number) for number in range(0x4E00, 0x4E00 + 3500)]
    content = {"vocab_size": 3500, "itos": dict(enumerate(characters)),
               "stoi": {character: token for token, character in enumerate(characters)}}
    assert read_meta(write(pickle.dumps(content))).itos == tuple(characters)


def test_itos_may_be_a_list_and_may_be_absent() -> None:
    content = nanogpt_meta() | {"itos": list(CHARACTERS)}
    assert "".join(read_meta(write(pickle.dumps(content))).itos) == CHARACTERS
    assert read_meta(write(pickle.dumps({"vocab_size": 50304}))) == NanoGPTMeta(50304, ())


class RunsCommand:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


def test_a_file_that_calls_a_function_is_rejected_and_not_run() -> None:
    content = nanogpt_meta() | {"itos": RunsCommand()}
    with pytest.raises(DataError) as raised:
        read_meta(write(pickle.dumps(content)))
    assert "meta.pkl is rejected: it holds something other than dict, list, str and int" in raised.value.what
    assert raised.value.fix.endswith("mv meta.pkl meta.pkl.rejected")
    assert not Path("was-run").exists()


@pytest.mark.parametrize("value", [
    np.int64(65), 65.0, True, None, b"65", (65,), {65}, -1, 0, 2**40, "65", [],
], ids=repr)
def test_a_vocab_size_that_is_not_a_positive_int_is_rejected(value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(DataError):
            read_meta(write(pickle.dumps({"vocab_size": value}, protocol)))


@pytest.mark.parametrize("change", [
    {"vocab_size": 8},
    {"itos": {number + 1: character for number, character in enumerate(CHARACTERS)}},
    {"itos": {**dict(enumerate(CHARACTERS)), 3: 7}},
    {"itos": {**dict(enumerate(CHARACTERS)), 3: "ab"}},
    {"itos": {**dict(enumerate(CHARACTERS)), 3: "b"}},
    {"itos": "abc"},
    {"itos": OrderedDict(enumerate(CHARACTERS))},
    {"stoi": {}},
    {"stoi": {character: 0 for character in CHARACTERS}},
], ids=["count", "shifted", "int", "two characters", "twice", "str", "class", "no inverse", "wrong inverse"])
def test_an_inconsistent_vocabulary_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        read_meta(write(pickle.dumps(nanogpt_meta() | change)))


def test_every_truncation_is_rejected_and_a_flipped_byte_gives_a_value_or_a_data_error() -> None:
    content = pickle.dumps(nanogpt_meta())
    for length in range(len(content)):
        with pytest.raises(DataError):
            read_meta(write(content[:length]))
    for position in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[position] ^= flip
            try:
                read_meta(write(bytes(damaged)))
            except DataError:
                continue


@pytest.mark.parametrize("content", [b"", b"not a pickle at all", b"\x80\x04N."])
def test_a_file_that_is_no_pickle_of_a_dict_is_rejected(content: bytes) -> None:
    with pytest.raises(DataError, match="rejected"):
        read_meta(write(content))


def test_a_file_above_the_size_limit_is_rejected_unread() -> None:
    path = write(b"")
    os.truncate(path, MAX_META_BYTES + 1)
    with pytest.raises(DataError, match="limit"):
        read_meta(path)
