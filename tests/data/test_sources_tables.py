"""Rows of .jsonl files, parquet files and hub datasets to documents."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fitgpt.config.command_options import PrepareOptions
from fitgpt.core.errors import DataError
from fitgpt.core.extras import install_command
from fitgpt.data import sources
from fitgpt.data.sources import TextSource, open_source
from tests.data.read_documents import counts, documents, files, reject, write

# ---- .jsonl

def test_jsonl_gives_one_document_per_line() -> None:
    path = write("a.jsonl", '{"text": "one", "id": 1}\n\n{"text": null}\n{"id": 2, "text": "t\\u00e9"}')
    assert documents(files(path)) == {0: b"one", 1: b"", 2: b"", 3: "té".encode()}
    assert counts(files(path).chunks(0)) == {"empty_documents": 2}


def test_lone_surrogates_are_replaced_and_counted_and_pairs_are_characters() -> None:
    path = write("a.jsonl", r'{"text": "\ud83d\ude00 \ud83d x \udc00"}')
    assert documents(files(path)) == {0: "😀 \ufffd x \ufffd".encode()}
    assert counts(files(path).chunks(0)) == {"lone_surrogates_replaced": 2}


@pytest.mark.parametrize(("line", "word"), [
    ('{"text": "a"', "line 2 is not JSON"), ("[1]", "not a JSON object but list"),
    ('{"body": "a", "id": 1}', "'body', 'id'"),
    ('{"text": ["a"]}', "holds list"), ('{"text": 5}', "holds int"), ("[" * 100_000, "line 2"),
    ('{"n": ' + "9" * 5000 + "}", "line 2"),
], ids=["cut", "list", "column", "nested", "int", "deep", "long number"])
def test_an_invalid_line_is_reported_by_number(line: str, word: str) -> None:
    assert word in reject(write("a.jsonl", '{"text": "fine"}\n' + line + "\n")).what


def test_a_line_above_the_size_limit_is_rejected(monkeypatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    assert "line 1 is longer" in reject(write("a.jsonl", json.dumps({"text": "x" * 200}))).what


# ---- parquet

def table(name: str, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), name)
    return Path(name)


def test_parquet_gives_one_document_per_row() -> None:
    path = table("a.parquet", id=[1, 2, 3], text=["one", None, "thrée"])
    source = files(path)
    assert documents(source) == {0: b"one", 1: b"", 2: "thrée".encode()}
    assert source.text_bytes is not None
    assert source.text_bytes > 0
    assert documents(files(table("b.parquet", content=["x"]), column="content")) == {0: b"x"}


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_large_string_and_dictionary_columns_are_read(kind: pyarrow.DataType) -> None:
    path = table("a.parquet", text=pyarrow.array(["a", "b", "a", None]).cast(kind))
    assert documents(files(path)) == {0: b"a", 1: b"b", 2: b"a", 3: b""}


def test_a_missing_column_lists_the_columns_of_the_file() -> None:
    message = reject(table("a.parquet", id=[1], content=["x"])).what
    assert "has no 'text'" in message
    assert "'id', 'content'" in message


class Uuid(pyarrow.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pyarrow.string(), "fitgpt.test")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, data: bytes) -> Uuid:
        return cls()


def test_columns_that_are_not_strings_are_rejected_with_their_types() -> None:
    for column in (pyarrow.array([["a"], ["b"]]), pyarrow.array([{"a": "b"}]), pyarrow.array([1, 2]),
                   pyarrow.array([b"raw"])):
        message = reject(table("a.parquet", text=column)).what
        assert "not text" in message
        assert f"text ({str(column.type)[:4]}" in message
    pyarrow.register_extension_type(Uuid())
    try:
        reject(table("a.parquet", text=pyarrow.ExtensionArray.from_storage(Uuid(), pyarrow.array(["a"]))))
    finally:
        pyarrow.unregister_extension_type("fitgpt.test")


def test_invalid_utf8_in_parquet_is_replaced_and_counted() -> None:
    column = pyarrow.array([b"ok \xff", b"fine"]).view(pyarrow.string())
    source = files(table("a.parquet", text=column))
    assert documents(source) == {0: "ok \ufffd".encode(), 1: b"fine"}
    assert counts(source.chunks(0)) == {"invalid_utf8_replaced": 1}


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet_is_rejected(content: bytes) -> None:
    assert "a.parquet cannot be read as parquet" in reject(write("a.parquet", content)).what


def test_a_truncated_or_damaged_parquet_file_is_rejected() -> None:
    content = table("a.parquet", text=["some text " * 50] * 500).read_bytes()
    reject(write("a.parquet", content[:len(content) // 2]))
    damaged = bytearray(content)
    damaged[10:40] = bytes(30)
    reject(write("a.parquet", bytes(damaged)))


def test_a_parquet_decompression_bomb_is_rejected(monkeypatch) -> None:
    monkeypatch.setattr(sources, "_ALWAYS_ALLOWED_BYTES", 100_000)
    monkeypatch.setattr(sources, "MAX_EXPANSION", 10)
    packed = pyarrow.table({"text": ["\0" * 1_000_000] * 20})
    pyarrow.parquet.write_table(packed, "plain.parquet", compression="gzip", use_dictionary=False)
    assert "over 10 times its size" in reject("plain.parquet").what
    # One long value in the dictionary, named again and again: the claimed sizes look harmless.
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 50_000] * 500}), "named.parquet")
    source = files("named.parquet")
    with pytest.raises(DataError, match="over 10 times its size"):
        list(source.chunks(0))
    monkeypatch.setattr(sources, "_MAX_ROW_GROUP_BYTES", 10)
    assert "row group 0 claims" in reject("named.parquet").what


def test_without_pyarrow_the_fix_is_the_install_command(monkeypatch) -> None:
    path = table("a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "[parquet]" in reject(path).fix


# ---- the Hugging Face hub

class Rows:
    """As much of a streamed dataset as is used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


def hub(monkeypatch: pytest.MonkeyPatch, load: Any) -> TextSource:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    return open_source(PrepareOptions(hub="some/dataset", hub_config="small"))


def test_a_hub_dataset_is_streamed_from_any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(path: str, **options: Any) -> Rows:
        calls.append((path, options))
        return Rows([{"text": "one"}, {"text": "two"}, {"text": None}])

    source = hub(monkeypatch, load)
    assert documents(source) == {0: b"one", 1: b"two", 2: b""}
    assert documents(source, 1) == {1: b"two", 2: b""}
    assert calls[0] == ("some/dataset", {"name": "small", "split": "train", "streaming": True})
    assert source.text_bytes is None


def test_hub_errors_are_data_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, **options: Any) -> Rows:
        raise RuntimeError("Connection raised\nand a page of details")

    with pytest.raises(DataError) as raised:
        list(hub(monkeypatch, load).chunks(0))
    assert "Connection raised" in raised.value.what
    assert "details" not in raised.value.what
    with pytest.raises(DataError, match="'body'"):
        list(hub(monkeypatch, lambda path, **options: Rows([{"body": "x"}])).chunks(0))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError) as raised:
        list(open_source(PrepareOptions(hub="some/dataset")).chunks(0))
    assert install_command("datasets") in raised.value.fix
