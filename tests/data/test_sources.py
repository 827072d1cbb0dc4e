"""Documents out of files, folders and tables: in a fixed order, from any of them on, mended and counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fitgpt.config.command_options import PrepareOptions
from fitgpt.core.errors import DataError
from fitgpt.data import sources, tables, text
from fitgpt.data.sources import Source, open_source
from fitgpt.data.text import Piece, pieces_of


def files(*paths: object, column: str = "text") -> Source:
    return open_source(PrepareOptions(input=tuple(map(str, paths)), text_column=column))


def documents(source: Source, first: int = 0) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for piece in source.pieces(first):
        found[piece.document] = found.get(piece.document, b"") + piece.data
    return found


def counts(pieces: Iterator[Piece]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for piece in pieces:
        total.update(piece.counts)
    return dict(total)


def refuse(*paths: object, column: str = "text") -> DataError:
    with pytest.raises(DataError) as refused:
        list(files(*paths, column=column).pieces(0))
    assert refused.value.exit_code == 3
    assert refused.value.fix
    return refused.value


def write(name: str, content: bytes | str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---- text

def test_invalid_utf8_is_replaced_and_counted() -> None:
    path = write("a.txt", b"ok \xff\xfe ok \xc3( \xe2\x82 end \xed\xa0\x80 and a true \xef\xbf\xbd")
    [piece] = files(path).pieces(0)
    assert piece.data.decode() == "ok \ufffd\ufffd ok \ufffd( \ufffd end \ufffd\ufffd\ufffd and a true \ufffd"
    assert piece.counts == {"invalid_utf8_replaced": 7}


def test_a_byte_order_mark_is_removed_at_the_start_only() -> None:
    path = write("a.txt", "\ufeffone \ufefftwo".encode())
    [piece] = files(path).pieces(0)
    assert piece.data.decode() == "one \ufefftwo"
    assert piece.counts == {"byte_order_marks": 1}


def test_nuls_are_kept_and_counted_in_a_file_that_was_named() -> None:
    [piece] = files(write("a.txt", b"a\0b\0")).pieces(0)
    assert (piece.data, piece.counts) == (b"a\0b\0", {"nul_characters": 2})


def test_line_ends_are_kept_as_they_are() -> None:
    assert documents(files(write("a.txt", "a\r\nb\rc\n"))) == {0: b"a\r\nb\rc\n"}


def test_an_empty_file_is_one_empty_document() -> None:
    pieces = list(files(write("a.txt", ""), write("b.txt", "b")).pieces(0))
    assert [(piece.document, piece.data, piece.counts) for piece in pieces] == [
        (0, b"", {"empty_documents": 1}), (1, b"b", {})]


@pytest.mark.parametrize("unit", ["x", "é", "日", "🙂", "word ", "line\n", "\n", " "])
def test_a_huge_line_is_cut_into_valid_pieces_that_join_to_the_same(monkeypatch, unit: str) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 1000)
    whole = (unit * 5001).encode()
    for chunk in (7, 999, 10**6):
        pieces = list(pieces_of(3, (whole[at:at + chunk] for at in range(0, len(whole), chunk))))
        assert b"".join(piece.data for piece in pieces) == whole
        assert max(len(piece.data) for piece in pieces) <= 1000
        assert [piece.part for piece in pieces] == list(range(len(pieces)))
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert not any(piece.counts for piece in pieces)


def test_pieces_are_cut_after_newlines_and_before_spaces(monkeypatch) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 100)
    lines = [piece.data for piece in pieces_of(0, [b"some words\n" * 50])]
    assert all(data.endswith(b"\n") for data in lines)
    words = [piece.data for piece in pieces_of(0, [b"some words" * 50])]
    assert all(data.startswith(b" ") for data in words[1:])


def test_pieces_do_not_depend_on_how_the_bytes_arrive(monkeypatch) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 100)
    whole = os.urandom(3000)
    expected = [piece.data for piece in pieces_of(0, [whole])]
    assert [piece.data for piece in pieces_of(0, (whole[at:at + 13] for at in range(0, 3000, 13)))] == expected


def test_a_gigabyte_on_one_line_takes_little_memory(tmp_path: Path) -> None:
    """Here 64 MB, in a process that may not hold half of that on top of what it starts with."""
    path = tmp_path / "line.txt"
    path.write_bytes(b"x" * 64_000_000)
    code = f"""
import resource
from fitgpt.data.sources import open_source
from fitgpt.config.command_options import PrepareOptions
source = open_source(PrepareOptions(input=({str(path)!r},)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(len(piece.data) for piece in source.pieces(0)) == 64_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert grown * 1024 < 32_000_000


# ---- folders

def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files() -> None:
    for name, content in (("b/z.txt", "2"), ("a.md", "1"), ("c.py", "3"), ("b/.hidden", "no"), (".git/config", "no"),
                          ("b/image.png", b"\x89PNG\0\0"), ("d.gz", b"\x1f\x8b")):
        write(f"texts/{name}", content)
    os.mkfifo("texts/pipe")
    source = files("texts")
    assert documents(source) == {0: b"1", 1: b"2", 2: b"3"}
    assert source.skipped == {"hidden_files_or_folders_skipped": 2, "binary_files_skipped": 2,
                              "special_files_skipped": 1}
    assert source.text_bytes == 3


def test_the_order_of_a_folder_does_not_depend_on_the_file_system(monkeypatch) -> None:
    for number in range(30):
        write(f"texts/{number % 3}/{number}.txt", str(number))
    expected, real_walk = documents(files("texts")), os.walk

    def shuffled_walk(root: Any) -> Iterator[Any]:
        for folder, inner, names in real_walk(root):
            inner.reverse()
            yield folder, inner, names[::-1]

    monkeypatch.setattr(os, "walk", shuffled_walk)
    assert documents(files("texts")) == expected


def test_reading_can_begin_at_any_document() -> None:
    for number in range(4):
        write(f"texts/{number}.txt", f"text {number}")
    write("texts/2b.jsonl", "".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(5)))
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"cell {row}" for row in range(7)]}), "texts/1b.parquet",
                                row_group_size=3)
    everything = documents(files("texts"))
    assert len(everything) == 16
    for first in range(17):
        assert documents(files("texts"), first) == {n: data for n, data in everything.items() if n >= first}


def test_the_digest_follows_names_and_sizes_and_not_the_place() -> None:
    write("one/a.txt", "abc")
    write("two/a.txt", "xyz")
    assert files("one").digest == files("two").digest
    write("two/a.txt", "xyzz")
    assert files("one").digest != files("two").digest


def test_files_that_cannot_be_text_are_refused_when_named() -> None:
    assert refuse(write("a.zip", b"PK")).fix.endswith(": unzip a.zip")
    assert refuse(write("a b.txt.gz", b"PK")).fix.endswith(": gunzip -k 'a b.txt.gz'")
    assert refuse(write("a.tar.gz", b"PK")).fix.endswith(": tar xf a.tar.gz")
    assert "iconv -f UTF-16" in refuse(write("a.txt", "text".encode("utf-16"))).fix
    os.mkfifo("pipe")
    assert "neither a file nor a folder" in refuse("pipe").what
    assert "No such file" in refuse("missing.txt").what
    refuse("a\0b")


NOISE = np.random.default_rng(1).bytes(20_000)
RUSSIAN = "Все счастливые семьи похожи друг на друга. ".encode("cp1251") * 50


def test_a_pdf_comes_with_the_command_that_takes_its_text_out() -> None:
    assert refuse(write("my paper.pdf", b"%PDF-1.4\n" + NOISE)).fix == "pdftotext 'my paper.pdf' 'my paper.txt'"


def test_tables_that_are_read_as_plain_text_are_counted() -> None:
    write("t/a.json", b'[{"text": "hello"}]')
    write("t/b.csv", b"text\nhello\n")
    write("t/c.txt", b"hello")
    assert files("t").skipped == {"json_or_csv_files_read_as_plain_text,_markup_and_all": 2}
    assert files("t/c.txt").skipped == {}


@pytest.mark.parametrize("data", [NOISE, RUSSIAN, b"\x7fELF" + NOISE.replace(b"a", b"\0\0\0")])
def test_bytes_that_are_no_utf8_text_are_refused_with_a_way_through(data: bytes) -> None:
    error = refuse(write("my file.txt", data))
    assert "not text in UTF-8" in error.what
    bytewise = error.fix.splitlines()[1].partition(": ")[2]
    assert bytewise == "iconv -f LATIN1 -t UTF-8 'my file.txt' > 'my file.utf8.txt'"
    subprocess.run(bytewise, shell=True, check=True)
    [piece] = files("my file.utf8.txt").pieces(0)
    assert piece.data.decode().encode("latin-1") == data
    write("texts/noise.dat", data)
    assert "1 binary files skipped" in refuse("texts").what


@pytest.mark.parametrize("data", [
    "日本語 ".encode() * 3000, "Longtemps, je me suis couché à la même heure. ".encode("latin-1") * 400])
def test_prose_is_no_noise(data: bytes) -> None:
    [piece] = files(write("a.txt", data)).pieces(0)
    assert len(piece.data) >= len(data)


def test_empty_files_hold_no_text() -> None:
    write("texts/a.txt", b"")
    assert "empty" in refuse("texts/a.txt").what
    write("texts/b.txt", b"")
    assert "all 2 files are empty" in refuse("texts").what


def test_a_folder_without_text_says_what_was_left_out() -> None:
    write("texts/a.bin", b"\0\0")
    assert "1 binary files skipped" in refuse("texts").what
    Path("empty").mkdir()
    assert "no text in empty" in refuse("empty").what


# ---- lines of JSON

def test_jsonl_gives_one_document_a_line() -> None:
    path = write("a.jsonl", '{"text": "one", "id": 1}\n\n{"text": null}\n{"id": 2, "text": "t\\u00e9"}')
    assert documents(files(path)) == {0: b"one", 1: b"", 2: b"", 3: "té".encode()}
    assert counts(files(path).pieces(0)) == {"empty_documents": 2}


def test_lone_surrogates_are_replaced_and_counted_and_pairs_are_characters() -> None:
    path = write("a.jsonl", r'{"text": "\ud83d\ude00 \ud83d x \udc00"}')
    assert documents(files(path)) == {0: "😀 \ufffd x \ufffd".encode()}
    assert counts(files(path).pieces(0)) == {"lone_surrogates_replaced": 2}


@pytest.mark.parametrize(("line", "word"), [
    ('{"text": "a"', "line 2 is not JSON"), ("[1]", "no JSON object but list"),
    ('{"body": "a", "id": 1}', "'body', 'id'"),
    ('{"text": ["a"]}', "holds list"), ('{"text": 5}', "holds int"), ("[" * 100_000, "line 2"),
    ('{"n": ' + "9" * 5000 + "}", "line 2"),
], ids=["cut", "list", "column", "nested", "int", "deep", "long number"])
def test_a_bad_line_is_named(line: str, word: str) -> None:
    assert word in refuse(write("a.jsonl", '{"text": "fine"}\n' + line + "\n")).what


def test_a_line_above_the_limit_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 100)
    assert "line 1 is longer" in refuse(write("a.jsonl", json.dumps({"text": "x" * 200}))).what


# ---- parquet

def table(name: str, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), name)
    return Path(name)


def test_parquet_gives_one_document_a_row() -> None:
    path = table("a.parquet", id=[1, 2, 3], text=["one", None, "thrée"])
    source = files(path)
    assert documents(source) == {0: b"one", 1: b"", 2: "thrée".encode()}
    assert source.text_bytes is not None
    assert source.text_bytes > 0
    assert documents(files(table("b.parquet", content=["x"]), column="content")) == {0: b"x"}


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_other_kinds_of_string_columns_are_read(kind: pyarrow.DataType) -> None:
    path = table("a.parquet", text=pyarrow.array(["a", "b", "a", None]).cast(kind))
    assert documents(files(path)) == {0: b"a", 1: b"b", 2: b"a", 3: b""}


def test_a_missing_column_names_those_present() -> None:
    message = refuse(table("a.parquet", id=[1], content=["x"])).what
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


def test_columns_that_are_not_text_are_refused_with_their_types() -> None:
    for column in (pyarrow.array([["a"], ["b"]]), pyarrow.array([{"a": "b"}]), pyarrow.array([1, 2]),
                   pyarrow.array([b"raw"])):
        message = refuse(table("a.parquet", text=column)).what
        assert "not text" in message
        assert f"text ({str(column.type)[:4]}" in message
    pyarrow.register_extension_type(Uuid())
    try:
        refuse(table("a.parquet", text=pyarrow.ExtensionArray.from_storage(Uuid(), pyarrow.array(["a"]))))
    finally:
        pyarrow.unregister_extension_type("fitgpt.test")


def test_invalid_utf8_in_parquet_is_replaced_and_counted() -> None:
    column = pyarrow.array([b"ok \xff", b"fine"]).view(pyarrow.string())
    source = files(table("a.parquet", text=column))
    assert documents(source) == {0: "ok \ufffd".encode(), 1: b"fine"}
    assert counts(source.pieces(0)) == {"invalid_utf8_replaced": 1}


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(100) + b"PAR1"])
def test_what_is_no_parquet_is_named(content: bytes) -> None:
    assert "a.parquet cannot be read as parquet" in refuse(write("a.parquet", content)).what


def test_a_truncated_or_damaged_parquet_is_named() -> None:
    content = table("a.parquet", text=["some text " * 50] * 500).read_bytes()
    refuse(write("a.parquet", content[:len(content) // 2]))
    damaged = bytearray(content)
    damaged[10:40] = bytes(30)
    refuse(write("a.parquet", bytes(damaged)))


def test_a_parquet_bomb_is_refused_before_it_fills_anything(monkeypatch) -> None:
    monkeypatch.setattr(tables, "_HARMLESS_BYTES", 100_000)
    monkeypatch.setattr(tables, "MAX_EXPANSION", 10)
    packed = pyarrow.table({"text": ["\0" * 1_000_000] * 20})
    pyarrow.parquet.write_table(packed, "plain.parquet", compression="gzip", use_dictionary=False)
    assert "over 10 times its size" in refuse("plain.parquet").what
    # One long value in the dictionary, named again and again: the claimed sizes look harmless.
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 50_000] * 500}), "named.parquet")
    source = files("named.parquet")
    with pytest.raises(DataError, match="over 10 times its size"):
        list(source.pieces(0))
    monkeypatch.setattr(tables, "_MAX_ROW_GROUP_BYTES", 10)
    assert "row group 0 claims" in refuse("named.parquet").what


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch) -> None:
    path = table("a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert ".[parquet]" in refuse(path).fix


# ---- the hub

class Rows:
    """As much of a streamed dataset as is used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def skip(self, count: int) -> Rows:
        return Rows(self._rows[count:])


def hub(monkeypatch: pytest.MonkeyPatch, load: Any) -> Source:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    return open_source(PrepareOptions(hub="some/dataset", hub_config="small"))


def test_a_hub_dataset_is_streamed_and_can_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(path: str, **options: Any) -> Rows:
        calls.append((path, options))
        return Rows([{"text": "one"}, {"text": "two"}, {"text": None}])

    source = hub(monkeypatch, load)
    assert documents(source) == {0: b"one", 1: b"two", 2: b""}
    assert documents(source, 1) == {1: b"two", 2: b""}
    assert calls[0] == ("some/dataset", {"name": "small", "split": "train", "streaming": True})
    assert source.text_bytes is None


def test_hub_errors_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, **options: Any) -> Rows:
        raise RuntimeError("Connection refused\nand a page of details")

    with pytest.raises(DataError) as refused:
        list(hub(monkeypatch, load).pieces(0))
    assert "Connection refused" in refused.value.what
    assert "details" not in refused.value.what
    with pytest.raises(DataError, match="'body'"):
        list(hub(monkeypatch, lambda path, **options: Rows([{"body": "x"}])).pieces(0))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError) as refused:
        list(open_source(PrepareOptions(hub="some/dataset")).pieces(0))
    assert ".[datasets]" in refused.value.fix


# ---- the embedded corpus

def test_the_embedded_corpus_is_python_source_of_a_stated_size() -> None:
    source = open_source(PrepareOptions(embedded=True))
    assert isinstance(source, sources.Files)
    names = [item.name for item in source.items]
    assert names == sorted(names, key=os.fsencode)
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not any({"test", "tests", "site-packages", "idlelib"} & set(name.split("/")) for name in names)
    assert source.text_bytes is not None
    assert 2_000_000 < source.text_bytes < sources.EMBEDDED_BYTES + 500_000


def test_a_python_without_its_source_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(DataError, match="no source text"):
        open_source(PrepareOptions(embedded=True))
