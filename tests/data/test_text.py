"""Raw bytes to chunks of valid UTF-8, with a count of each repair."""

from __future__ import annotations

import os

import pytest

from fitgpt.data import text
from fitgpt.data.text import TextChunk, split_document


def only_chunk(data: bytes) -> TextChunk:
    [chunk] = split_document(0, [data], bom=True)
    return chunk


def test_invalid_utf8_is_replaced_and_counted() -> None:
    chunk = only_chunk(b"ok \xff\xfe ok \xc3( \xe2\x82 end \xed\xa0\x80 and a true \xef\xbf\xbd")
    assert chunk.data.decode() == "ok \ufffd\ufffd ok \ufffd( \ufffd end \ufffd\ufffd\ufffd and a true \ufffd"
    assert chunk.counts == {"invalid_utf8_replaced": 7}


def test_a_byte_order_mark_is_removed_at_the_start_only() -> None:
    chunk = only_chunk("\ufeffone \ufefftwo".encode())
    assert chunk.data.decode() == "one \ufefftwo"
    assert chunk.counts == {"byte_order_marks": 1}


def test_nul_characters_are_kept_and_counted() -> None:
    chunk = only_chunk(b"a\0b\0")
    assert (chunk.data, chunk.counts) == (b"a\0b\0", {"nul_characters": 2})


def test_line_ends_are_kept() -> None:
    assert only_chunk(b"a\r\nb\rc\n").data == b"a\r\nb\rc\n"


@pytest.mark.parametrize("unit", ["x", "é", "日", "🙂", "word ", "line\n", "\n", " "])
def test_a_long_line_is_split_into_valid_chunks_that_join_to_the_same_text(monkeypatch, unit: str) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 1000)
    whole = (unit * 5001).encode()
    for chunk in (7, 999, 10**6):
        chunks = list(split_document(3, (whole[at:at + chunk] for at in range(0, len(whole), chunk))))
        assert b"".join(chunk.data for chunk in chunks) == whole
        assert max(len(chunk.data) for chunk in chunks) <= 1000
        assert [chunk.part for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert not any(chunk.counts for chunk in chunks)


def test_chunks_end_after_newlines_or_before_spaces(monkeypatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 100)
    lines = [chunk.data for chunk in split_document(0, [b"some words\n" * 50])]
    assert all(data.endswith(b"\n") for data in lines)
    chunks = [chunk.data for chunk in split_document(0, [b"some words" * 50])]
    assert all(data.startswith(b" ") for data in chunks[1:])


def test_chunks_do_not_depend_on_the_size_of_the_reads(monkeypatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 100)
    whole = os.urandom(3000)
    expected = [chunk.data for chunk in split_document(0, [whole])]
    assert [chunk.data for chunk in split_document(0, (whole[at:at + 13] for at in range(0, 3000, 13)))] == expected
