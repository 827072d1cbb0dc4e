"""Rows of .jsonl files, parquet files and Hugging Face datasets to documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import DataError
from ..core.units import GiB, MiB, show_bytes
from .text import TextChunks, split_document, utf8_of

MAX_LINE_BYTES = 256 * MiB
MAX_EXPANSION = 1000             # text compresses 20 times at best; beyond this a file is a decompression bomb
_ALWAYS_ALLOWED_BYTES = 1 * GiB
_MAX_ROW_GROUP_BYTES = 8 * GiB
_ROWS_PER_BATCH = 32             # bounds memory whatever the row group's size
_READ_BYTES = 8 * MiB


# ---- .jsonl

def count_lines(path: Path) -> int:
    """The number of lines of a file, an unterminated last one included."""
    lines, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


def read_jsonl(path: Path, column: str, first_document: int, skip: int) -> TextChunks:
    """One document per line, without the first `skip`; line 1 is document `first_document`."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{path}, line {number:,} is longer than {show_bytes(MAX_LINE_BYTES)}.",
                                "Split its text into several lines of JSON.")
            if number > skip:
                data, surrogates = _json_text(line, path, number, column)
                yield from _row_chunks(first_document + number - 1, data, surrogates)


def _json_text(line: bytes, path: Path, number: int, column: str) -> tuple[bytes, int]:
    if not line.strip():
        return b"", 0
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number:,} is not JSON: {error}.",
                        "Correct the line; each line of a .jsonl file is one JSON object.") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number:,} is not a JSON object but {type(row).__name__}.",
                        'Each line must look like {"text": "…"}.')
    return _row_text(row, column, f"{path}, line {number:,}")


def _row_text(row: dict[str, Any], column: str, where: str) -> tuple[bytes, int]:
    """The text of a row as UTF-8, and the number of lone surrogates replaced in it."""
    if column not in row:
        raise _no_column(where, column, list(row))
    value = row[column]
    if value is None:
        return b"", 0
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} holds {type(value).__name__}, not text.",
                        "Give the field that holds the text: --text_column=NAME")
    return utf8_of(value)


def _row_chunks(document: int, data: bytes, surrogates: int = 0) -> TextChunks:
    for chunk in split_document(document, (data,)):
        if surrogates and not chunk.part:
            chunk.counts["lone_surrogates_replaced"] = surrogates
        yield chunk


def _no_column(where: str, column: str, present: list[str]) -> DataError:
    names = ", ".join(map(repr, present[:20])) + (" …" if len(present) > 20 else "")
    return DataError(f"{where} has no {column!r}; it has {names or 'no columns'}.",
                     "Give the column that holds the text: --text_column=NAME")


# ---- parquet

class ParquetReader:
    """The text column of one parquet file, read a few rows at a time."""

    def __init__(self, path: Path, column: str) -> None:
        self._path, self._column = path, column
        self._arrow, parquet = _pyarrow()
        try:
            self._file = parquet.ParquetFile(path)
            self._size = path.stat().st_size
            self._check_column()
        except (OSError, ValueError, self._arrow.ArrowException) as error:
            raise self._unreadable(error) from error
        self.rows: int = self._file.metadata.num_rows
        self.text_bytes = self._check_sizes()

    def read(self, first_document: int, skip: int) -> TextChunks:
        """One document per row, without the first `skip`; row 0 is document `first_document`."""
        row, total = 0, 0
        for group in range(self._file.metadata.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if row + rows <= skip:
                row += rows
                continue
            for data in self._texts(group):
                if row >= skip:
                    total += len(data)
                    if total > max(_ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * self._size):
                        raise self._bomb(total)
                    yield from _row_chunks(first_document + row, data)
                row += 1

    def _texts(self, group: int) -> Iterator[bytes]:
        arrow = self._arrow
        try:
            for batch in self._file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=[self._column]):
                values = batch.column(0)
                if arrow.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                # As bytes: Arrow does not check that its strings are valid UTF-8.
                for value in values.cast(arrow.large_binary()):
                    yield value.as_py() or b""
        except (OSError, ValueError, arrow.ArrowException) as error:
            raise self._unreadable(error) from error

    def _check_column(self) -> None:
        schema = self._file.schema_arrow
        if schema.get_field_index(self._column) < 0:
            raise _no_column(str(self._path), self._column, list(schema.names))
        kind, types = schema.field(self._column).type, self._arrow.types
        inner = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(inner) or types.is_large_string(inner)):  # an extension type is neither
            columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
            raise DataError(f"{self._path}: the column {self._column!r} is {kind}, not text. Columns: {columns}.",
                            "Give a column that holds strings: --text_column=NAME")

    def _check_sizes(self) -> int:
        """The size of the text that the file claims; DataError for a decompression bomb, before anything is read."""
        total = 0
        for group in range(self._file.metadata.num_row_groups):
            metadata = self._file.metadata.row_group(group)
            columns = (metadata.column(index) for index in range(metadata.num_columns))
            nbytes = sum(column.total_uncompressed_size for column in columns
                           if column.path_in_schema == self._column)
            if not 0 <= nbytes <= _MAX_ROW_GROUP_BYTES:
                raise DataError(
                    f"{self._path}: row group {group} claims {nbytes:,} bytes of text; the limit is "
                    f"{show_bytes(_MAX_ROW_GROUP_BYTES)}.", "Write the file again with smaller row groups.")
            total += nbytes
        if total > max(_ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * self._size):
            raise self._bomb(total)
        return total

    def _bomb(self, nbytes: int) -> DataError:
        return DataError(
            f"{self._path} has {show_bytes(self._size)} and decompresses to {show_bytes(nbytes)} or more, over "
            f"{MAX_EXPANSION} times its size: it is damaged, or a decompression bomb.",
            "Leave this file out, or write it again from its source.")

    def _unreadable(self, error: Exception) -> DataError:
        first = str(error).splitlines()[0] if str(error) else repr(error)
        return DataError(f"{self._path} cannot be read as parquet: {first}",
                         "Copy or download it again; if it is not parquet, give it another suffix.")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("Reading parquet needs the package pyarrow, which is not installed.",
                        "pip install -e '.[parquet]'") from error
    return pyarrow, parquet


# ---- the Hugging Face hub

def read_hub(name: str, config: str, column: str, skip: int) -> TextChunks:
    """The train split of a hub dataset, streamed, from row `skip` on. Code in the dataset's repository is not run."""
    try:
        import datasets
    except ImportError as error:
        raise DataError("Streaming a dataset from the hub needs the package datasets, which is not installed.",
                        "pip install -e '.[datasets]'") from error
    try:
        rows = datasets.load_dataset(name, name=config or None, split="train", streaming=True)
        document = skip
        for row in rows.skip(skip) if skip else rows:
            data, surrogates = _row_text(row, column, f"hub dataset {name}, row {document:,}")
            yield from _row_chunks(document, data, surrogates)
            document += 1
    except DataError:
        raise
    except Exception as error:  # network, authentication, unknown name: there is no common base class
        first = str(error).splitlines()[0] if str(error) else repr(error)
        raise DataError(f"The hub dataset {name!r} could not be read: {type(error).__name__}: {first}",
                        "Check the name, --hub_config and the network; then run the same command again: "
                        "it resumes where it stopped.") from error
