"""Pickles are parsed without being unpickled: plain values only, and no allocation that the file merely claims."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core import safe_pickle
from fitgpt.core.safe_pickle import UnsafePickleError, parse

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def reject(content: bytes, match: str | None = None) -> None:
    with pytest.raises(UnsafePickleError, match=match):
        parse(content, max_depth=8)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_equal_those_of_pickle(protocol: int) -> None:
    value = {"a": [1, -1, 2**31, 2**80, "é\ud800", [], {}], 7: {"b": "b" * 300}}
    assert parse(pickle.dumps(value, protocol), max_depth=8) == value
    assert parse(pickletools.optimize(pickle.dumps(value, protocol)), max_depth=8) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dict_of_thousands_of_items_is_parsed(protocol: int) -> None:
    """The pickler writes large dicts in batches of a thousand."""
    value = {number: str(number) for number in range(3500)}
    assert parse(pickle.dumps(value, protocol), max_depth=8) == value


class RunsCommand:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_that_calls_a_function_is_rejected_and_not_run(protocol: int) -> None:
    reject(pickle.dumps({"a": RunsCommand()}, protocol), "other than dict, list, str and int")
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
def test_every_opcode_that_names_code_is_rejected(content: bytes) -> None:
    reject(content)
    assert not Path("was-run").exists()


@pytest.mark.parametrize("value", [1.5, True, None, b"bytes", (1,), {1}, {1.5: 1}, {None: 1}], ids=repr)
def test_other_types_are_rejected(value: Any) -> None:
    for protocol in PROTOCOLS:
        reject(pickle.dumps([value], protocol))


@pytest.mark.parametrize("content", [
    b"", b"not a pickle at all", b".", b"((((.", b"}(.", b"0.", b"h\x05."])
def test_content_that_is_no_pickle_is_rejected(content: bytes) -> None:
    reject(content)


@pytest.mark.parametrize("content", [
    b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",
    b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"a.",
    b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"a.",
], ids=["BINUNICODE8", "BINUNICODE", "LONG4"])
def test_a_claimed_length_beyond_the_file_is_rejected(content: bytes) -> None:
    reject(content, "damaged")


def test_a_large_memo_index_allocates_nothing() -> None:
    """pickle.Unpickler allocates a memo table of that size: 8 GiB."""
    assert parse(b"K\x01r" + struct.pack("<I", 2**29) + b".", max_depth=8) == 1


@pytest.mark.parametrize("depth", [9, 100_000])
def test_values_nested_too_deep_are_rejected(depth: int) -> None:
    reject(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", "nested more than 8 deep")


def test_a_list_that_contains_itself_does_not_loop() -> None:
    itself: list[Any] = []
    itself.append(itself)
    parsed = parse(pickle.dumps(itself), max_depth=8)
    assert parsed[0] is parsed


def test_every_truncation_is_rejected() -> None:
    content = pickle.dumps({"a": [1, 2, "three"]})
    for length in range(len(content)):
        reject(content[:length])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_more_types_are_parsed_on_request_and_nothing_else(protocol: int) -> None:
    value = {"a": ((), (1,), (1, "b"), (1, 2, 3), (1, 2, 3, 4)), "b": [True, False, None, 0.5]}
    assert parse(pickle.dumps(value, protocol), max_depth=8, more_types=True) == value
    for other in (b"bytes", {1}, frozenset({1}), RunsCommand(), 1j):
        with pytest.raises(UnsafePickleError, match="other than dict, list, tuple"):
            parse(pickle.dumps([other], protocol), max_depth=8, more_types=True)


@pytest.mark.parametrize("content", [b"\x80\x02K\x01\x86.", b"\x80\x02(K\x01\x87.", b"\x80\x02t."])
def test_a_tuple_with_missing_items_is_rejected(content: bytes) -> None:
    with pytest.raises(UnsafePickleError):
        parse(content, max_depth=8, more_types=True)


@pytest.mark.parametrize("bomb", [b"]" * 200, b"]" + b"\x94" * 200, b"](" + b"K\x01" * 200, b"]" + b"]a" * 200])
def test_more_objects_than_the_limit_are_rejected(monkeypatch: pytest.MonkeyPatch, bomb: bytes) -> None:
    monkeypatch.setattr(safe_pickle, "MAX_OBJECTS", 100)
    with pytest.raises(UnsafePickleError, match="more than 100 objects"):
        parse(b"\x80\x04" + bomb + b".", max_depth=8)
