"""Documents of files, folders and the standard library: in a fixed order, and from any of them on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fitgpt.config.command_options import PrepareOptions
from fitgpt.core.errors import DataError
from fitgpt.data import sources
from fitgpt.data.sources import open_source
from tests.data.read_documents import documents, files, reject, write

# ---- files

def test_an_empty_file_is_one_empty_document() -> None:
    chunks = list(files(write("a.txt", ""), write("b.txt", "b")).chunks(0))
    assert [(chunk.document, chunk.data, chunk.counts) for chunk in chunks] == [
        (0, b"", {"empty_documents": 1}), (1, b"b", {})]


def test_a_file_of_one_long_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """Reading 64 MB must not add 32 MB to the process."""
    path = tmp_path / "line.txt"
    path.write_bytes(b"x" * 64_000_000)
    code = f"""
import resource
from fitgpt.data.sources import open_source
from fitgpt.config.command_options import PrepareOptions
source = open_source(PrepareOptions(input=({str(path)!r},)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(len(chunk.data) for chunk in source.chunks(0)) == 64_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                               timeout=60).stdout)
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


def test_reading_can_start_at_any_document() -> None:
    for number in range(4):
        write(f"texts/{number}.txt", f"text {number}")
    write("texts/2b.jsonl", "".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(5)))
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"cell {row}" for row in range(7)]}), "texts/1b.parquet",
                                row_group_size=3)
    everything = documents(files("texts"))
    assert len(everything) == 16
    for first in range(17):
        assert documents(files("texts"), first) == {n: data for n, data in everything.items() if n >= first}


def test_the_digest_depends_on_names_and_sizes_and_not_on_the_folder() -> None:
    write("one/a.txt", "abc")
    write("two/a.txt", "xyz")
    assert files("one").digest == files("two").digest
    write("two/a.txt", "xyzz")
    assert files("one").digest != files("two").digest


def test_inputs_that_are_not_text_are_rejected_with_the_command_that_converts_them() -> None:
    assert reject(write("a.zip", b"PK")).fix.endswith(": unzip a.zip")
    assert reject(write("a b.txt.gz", b"PK")).fix.endswith(": gunzip -k 'a b.txt.gz'")
    assert reject(write("a.tar.gz", b"PK")).fix.endswith(": tar xf a.tar.gz")
    assert "iconv -f UTF-16" in reject(write("a.txt", "text".encode("utf-16"))).fix
    os.mkfifo("pipe")
    assert "neither a file nor a folder" in reject("pipe").what
    assert "No such file" in reject("missing.txt").what
    reject("a\0b")


RANDOM = np.random.default_rng(1).bytes(20_000)
RUSSIAN = "Все счастливые семьи похожи друг на друга. ".encode("cp1251") * 50


def test_a_pdf_is_rejected_with_the_command_that_extracts_its_text() -> None:
    assert reject(write("my paper.pdf", b"%PDF-1.4\n" + RANDOM)).fix == "pdftotext 'my paper.pdf' 'my paper.txt'"


def test_tables_that_are_read_as_plain_text_are_counted() -> None:
    write("t/a.json", b'[{"text": "hello"}]')
    write("t/b.csv", b"text\nhello\n")
    write("t/c.txt", b"hello")
    assert files("t").skipped == {"json_or_csv_files_read_as_plain_text,_markup_and_all": 2}
    assert files("t/c.txt").skipped == {}


@pytest.mark.parametrize("data", [RANDOM, RUSSIAN, b"\x7fELF" + RANDOM.replace(b"a", b"\0\0\0")])
def test_binary_files_are_rejected_with_the_command_that_converts_them(data: bytes) -> None:
    error = reject(write("my file.txt", data))
    assert "not text in UTF-8" in error.what
    bytewise = error.fix.splitlines()[1].partition(": ")[2]
    assert bytewise == "iconv -f LATIN1 -t UTF-8 'my file.txt' > 'my file.utf8.txt'"
    subprocess.run(bytewise, shell=True, check=True, timeout=60)
    [chunk] = files("my file.utf8.txt").chunks(0)
    assert chunk.data.decode().encode("latin-1") == data
    write("texts/random.dat", data)
    assert "1 binary file skipped" in reject("texts").what


@pytest.mark.parametrize("data", [
    "日本語 ".encode() * 3000, "Longtemps, je me suis couché à la même heure. ".encode("latin-1") * 400])
def test_prose_in_another_script_or_in_latin_1_is_accepted(data: bytes) -> None:
    [chunk] = files(write("a.txt", data)).chunks(0)
    assert len(chunk.data) >= len(data)


def test_input_of_empty_files_is_rejected() -> None:
    write("texts/a.txt", b"")
    assert "empty" in reject("texts/a.txt").what
    write("texts/b.txt", b"")
    assert "all 2 files are empty" in reject("texts").what


def test_a_folder_without_text_is_rejected_with_counts_of_skipped_files() -> None:
    write("texts/a.bin", b"\0\0")
    assert "1 binary file skipped" in reject("texts").what
    Path("empty").mkdir()
    assert "no text in empty" in reject("empty").what


# ---- the embedded corpus

def test_the_embedded_corpus_is_python_source_of_about_8_mb() -> None:
    source = open_source(PrepareOptions(embedded=True))
    names = [file.name for file in source.files]
    assert names == sorted(names, key=os.fsencode)
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not any({"test", "tests", "site-packages", "idlelib"} & set(name.split("/")) for name in names)
    assert source.text_bytes is not None
    assert 2_000_000 < source.text_bytes < sources.EMBEDDED_BYTES + 500_000


def test_a_python_without_its_source_code_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(DataError, match="no source code"):
        open_source(PrepareOptions(embedded=True))
