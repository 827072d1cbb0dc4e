"""nanoGPT's meta.pkl is read without ever being unpickled."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fitgpt.core.errors import DataError
from fitgpt.data import meta

CHARACTERS = "\n !abcé"


def nanogpt_meta() -> dict[str, Any]:
    return {"vocab_size": len(CHARACTERS), "itos": dict(enumerate(CHARACTERS)),
            "stoi": {character: token for token, character in enumerate(CHARACTERS)}}


def write(content: bytes) -> Path:
    path = Path("meta.pkl")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_nanogpt_writes_is_read_in_every_protocol(protocol: int) -> None:
    found = meta.read(write(pickle.dumps(nanogpt_meta(), protocol)))
    assert found.vocab_size == 7
    assert "".join(found.itos) == CHARACTERS


def test_a_vocabulary_of_thousands_is_read() -> None:
    """The pickler writes large dicts in batches of a thousand."""
    characters = [chr(number) for number in range(0x4E00, 0x4E00 + 3500)]
    content = {"vocab_size": 3500, "itos": dict(enumerate(characters)),
               "stoi": {character: token for token, character in enumerate(characters)}}
    assert meta.read(write(pickle.dumps(content))).itos == tuple(characters)


def test_itos_may_be_a_list_and_may_be_absent() -> None:
    content = nanogpt_meta() | {"itos": list(CHARACTERS)}
    assert "".join(meta.read(write(pickle.dumps(content))).itos) == CHARACTERS
    assert meta.read(write(pickle.dumps({"vocab_size": 50304}))) == meta.Meta(50304, ())


class Runs:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_a_command_is_refused_and_the_command_not_run(protocol: int) -> None:
    content = nanogpt_meta() | {"itos": Runs(os.system, "touch was-run")}
    with pytest.raises(DataError) as refused:
        meta.read(write(pickle.dumps(content, protocol)))
    assert "meta.pkl is refused" in refused.value.what
    assert not Path("was-run").exists()


@pytest.mark.parametrize("content", [
    b"cos\nsystem\n(S'touch was-run'\ntR.",
    b"(S'touch was-run'\nios\nsystem\n.",
    b"(cos\nsystem\nS'touch was-run'\no.",
    b"Pwas-run\n.",
    b"\x80\x02X\x01\x00\x00\x00aQ.",
    b"\x80\x02\x82\x01.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
], ids=["global", "inst", "obj", "persid", "binpersid", "ext", "stack_global"])
def test_no_way_to_name_code_is_admitted(content: bytes) -> None:
    with pytest.raises(DataError):
        meta.read(write(content))
    assert not Path("was-run").exists()


@pytest.mark.parametrize("value", [
    np.int64(65), 65.0, True, None, b"65", (65,), {65}, -1, 0, 2**40, "65", [],
], ids=repr)
def test_a_vocab_size_that_is_no_count_is_refused(value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(DataError):
            meta.read(write(pickle.dumps({"vocab_size": value}, protocol)))


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
def test_a_vocabulary_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        meta.read(write(pickle.dumps(nanogpt_meta() | change)))


def test_every_truncation_and_every_flipped_byte_ends_in_a_sentence_or_a_value() -> None:
    content = pickle.dumps(nanogpt_meta())
    for length in range(len(content)):
        with pytest.raises(DataError):
            meta.read(write(content[:length]))
    for place in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[place] ^= flip
            try:
                meta.read(write(bytes(damaged)))
            except DataError:
                continue


@pytest.mark.parametrize("content", [
    b"", b"not a pickle at all", b".", b"\x80\x04N.", b"((((.", b"}(.", b"0.", b"h\x05."])
def test_what_is_no_pickle_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="refused"):
        meta.read(write(content))


def test_claimed_lengths_allocate_nothing() -> None:
    claims = [b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",   # BINUNICODE8
              b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"a.",   # BINUNICODE
              b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"a."]  # LONG4
    for content in claims:
        with pytest.raises(DataError):
            meta.read(write(content))


def test_deep_nesting_and_loops_are_refused() -> None:
    for depth in (10, 100_000):
        with pytest.raises(DataError, match="deep"):
            meta.read(write(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(DataError):
        meta.read(write(pickle.dumps({"vocab_size": endless})))


def test_a_file_above_the_limit_is_refused_unread() -> None:
    path = write(b"")
    os.truncate(path, meta.MAX_BYTES + 1)
    with pytest.raises(DataError, match="limit"):
        meta.read(path)


def test_the_reader_agrees_with_pickle_on_plain_values() -> None:
    value = {"a": [1, -1, 2**31, 2**80, "é\ud800", [], {}], 7: {"b": "b" * 300}}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        content = pickletools.optimize(pickle.dumps(value, protocol))
        assert meta.plain_value(content) == value
        assert meta.plain_value(pickle.dumps(value, protocol)) == value
