"""PrepareOptions → a source of text: files and folders, a Hugging Face dataset, or Python's standard library.

A source lists what it will read before it reads, always in the same order, and numbers its documents, so that a
stopped `prepare` can resume from any of them. A document is a text file, a line of a .jsonl file, or a row of a parquet
file or of a Hugging Face dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import DataError
from ..core.extras import install_command
from ..core.units import GiB, KiB, MiB, show_bytes
from .text import CHUNK_BYTES, TextChunks, binary_fraction, split_document, utf8_of

if TYPE_CHECKING:
    from ..config.command_options import PrepareOptions

EMBEDDED_BYTES = 8_000_000   # of the standard library: enough to train on, prepared in a second or two
MAX_LINE_BYTES = 256 * MiB   # of a .jsonl file
MAX_EXPANSION = 1000         # text compresses 20 times at best; beyond this a parquet file is a decompression bomb
_ALWAYS_ALLOWED_BYTES = 1 * GiB
_MAX_ROW_GROUP_BYTES = 8 * GiB
_ROWS_PER_BATCH = 32         # bounds memory whatever the row group's size
ROWS_PER_MARK = 10_000       # of a hub dataset
_MARKS = 50                  # kept: reading is ahead of writing by at most some batches per process
_READ_BYTES = 8 * MiB
_SNIFF_BYTES = 8 * KiB
_MAX_BINARY = 0.1  # fraction of a file's first bytes; Latin-1 prose, which is read and repaired, has half of that
_JSONL, _PARQUET = (".jsonl", ".ndjson"), (".parquet", ".pq")
_MARKUP = (".json", ".csv", ".tsv")  # read as plain text: their structure is not known
_UNPACK = {".gz": "gunzip -k", ".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zst": "unzstd", ".zip": "unzip",
           ".tar": "tar xf", ".tgz": "tar xf", ".7z": "7z x", ".rar": "unrar x"}
_COMPRESSED = tuple(_UNPACK)
_TARS = (".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_NOT_EMBEDDED = frozenset({  # folders of the standard library: tests, third-party packages, generated tables
    "__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "turtledemo",
    "lib2to3", "ensurepip", "encodings", "pydoc_data", "lib-dynload"})


@dataclass(frozen=True)
class InputFile:
    """One file to read. `name` is relative to the given folder, so that the digest does not depend on its location."""

    path: Path
    name: str
    kind: str   # "text", "jsonl", "parquet"
    size: int
    mtime_ns: int


HubMark = tuple[int, dict[str, Any]]  # a document's number, and the state of the stream that continues with it


@dataclass(frozen=True)
class TextSource:
    """Documents in a fixed order, to be read from any of them on: those of files, or of a dataset of the hub."""

    description: str
    column: str                            # of .jsonl, parquet and hub datasets
    files: tuple[InputFile, ...] = ()
    hub: str = ""
    hub_config: str = ""
    hub_marks: list[HubMark] = field(default_factory=list, compare=False)  # filled while reading; for a resume
    text_bytes: int | None = None          # approximate size of the text; None if unknown before it is read
    skipped: dict[str, int] = field(default_factory=dict)
    binary_files: tuple[str, ...] = ()     # the names of those that were skipped

    @property
    def digest(self) -> str:
        """A hash of the names and sizes of the files; empty if there are none."""
        listing = hashlib.sha256()
        for file in self.files:
            listing.update(os.fsencode(f"{file.name}\0{file.size}\n"))
        return listing.hexdigest() if self.files else ""

    @property
    def newest_ns(self) -> int:
        """Modification time of the newest file."""
        return max((file.mtime_ns for file in self.files), default=0)

    def chunks(self, first: int) -> TextChunks:
        """The chunks of every document from number `first` on."""
        if self.hub:
            yield from _read_hub(self.hub, self.hub_config, self.column, first, self.hub_marks)
        before, skip = 0, first  # documents in earlier files; documents to skip in this one
        for file in self.files:
            try:
                if skip and skip >= (documents := _documents_in(file, self.column)):
                    before, skip = before + documents, skip - documents
                    continue
                after = before
                for chunk in _read_file(file, self.column, before, skip):
                    after = chunk.document + 1
                    yield chunk
            except OSError as error:
                raise _unreadable(file.path, error) from error
            before, skip = after, 0


def open_source(options: PrepareOptions) -> TextSource:
    """The source that the options name; DataError if it has no readable text."""
    if options.hub:
        config = f" ({options.hub_config})" if options.hub_config else ""
        return TextSource(f"hub dataset {options.hub}{config}", options.text_column, hub=options.hub,
                          hub_config=options.hub_config)
    if options.embedded:
        return _standard_library()
    return _list_files(options.input, options.text_column)


# ---- which files

def _list_files(inputs: tuple[str, ...], column: str) -> TextSource:
    """Files and folders as the user gave them → the files that will be read."""
    files: list[InputFile] = []
    skipped: Counter[str] = Counter()
    binary: list[str] = []
    for given in inputs:
        path = Path(given)
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the name contains a NUL"
            raise DataError(f"The input {given!r} cannot be read: {reason}.",
                            "Check the path: fitgpt prepare FILE_OR_FOLDER --name=NAME") from error
        if stat.S_ISDIR(status.st_mode):
            files += _walk(path, skipped, binary)
        else:
            files.append(_given_file(path, status))
    if not files:
        left_out = ", ".join(describe_count(*each) for each in sorted(skipped.items()))
        raise DataError(f"There is no text in {', '.join(inputs)}" + (f": {left_out}." if left_out else "."),
                        "Give text, .jsonl or .parquet files, or a folder that holds some.")
    if markup := sum(file.path.suffix.lower() in _MARKUP for file in files):
        skipped["json_or_csv_files_read_as_plain_text,_markup_and_all"] = markup
    text_bytes = sum(ParquetReader(file.path, column).text_bytes if file.kind == "parquet" else file.size
                     for file in files)
    if not any(file.size for file in files):
        raise DataError(f"There is no text in {', '.join(inputs)}: "
                        f"{'it is empty' if len(files) == 1 else f'all {len(files)} files are empty'}.",
                        "Give files that hold text: fitgpt prepare FILE_OR_FOLDER --name=NAME")
    return TextSource(", ".join(inputs), column, tuple(files), text_bytes=text_bytes, skipped=dict(skipped),
                      binary_files=tuple(sorted(binary)))


def _given_file(path: Path, status: os.stat_result) -> InputFile:
    """A file that the user named. It is read whatever its suffix; DataError if it cannot be text."""
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"The input {path} is neither a file nor a folder.", "Write the text to a file first.")
    if path.suffix.lower() in _COMPRESSED:
        unpack = "tar xf" if path.name.lower().endswith(_TARS) else _UNPACK[path.suffix.lower()]
        raise DataError(f"The input {path} is compressed ({path.suffix}).",
                        f"Unpack it first, and give its contents: {unpack} {shlex.quote(str(path))}")
    try:
        with open(path, "rb") as file:
            start = file.read(_SNIFF_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    converted = f"-t UTF-8 {shlex.quote(str(path))} > {shlex.quote(f'{path.stem}.utf8{path.suffix}')}"
    if start[:5] == b"%PDF-":
        text = shlex.quote(f"{path.stem}.txt")
        raise DataError(f"The input {path} is a PDF, not text.", f"pdftotext {shlex.quote(str(path))} {text}")
    if start[:2] in _UTF16:
        raise DataError(f"The input {path} is UTF-16; text must be UTF-8.", f"iconv -f UTF-16 {converted}")
    if _kind(path) == "text" and (binary := binary_fraction(start)) > _MAX_BINARY:
        raise DataError(f"The input {path} is not text in UTF-8: {binary:.0%} of its first bytes are invalid UTF-8 or "
                        "NUL. It is binary, or text in another encoding.",
                        f"If it is text, convert it from its encoding: iconv -f WINDOWS-1252 {converted}\n"
                        f"To keep each byte as one character: iconv -f LATIN1 {converted}")
    return _input_file(path, path.name, status)


def describe_count(what: str, count: int) -> str:
    """1 binary file skipped, 2 binary files skipped: of ("binary_files_skipped", count)."""
    words = what.replace("_", " ")
    if count == 1:
        words = re.sub(r"(file|folder|document|character|surrogate)s\b", r"\1", words)
    return f"{count:,} {words}"


def _walk(root: Path, skipped: Counter[str], binary: list[str]) -> list[InputFile]:
    """Every file below `root` that can be text, sorted by its path. Adds the others to `skipped`, by reason, and the
    names of binary ones to `binary`."""
    files = []
    for folder, inner, names in os.walk(root):
        visible = [name for name in inner if not name.startswith(".")]
        skipped["hidden_files_or_folders_skipped"] += len(inner) - len(visible)
        inner[:] = visible
        for name in names:
            path = Path(folder, name)
            try:
                reason = _reason_to_skip(path)
                if not reason:
                    files.append(_input_file(path, path.relative_to(root).as_posix(), path.stat()))
            except OSError:
                reason = "unreadable_files_skipped"
            if reason:
                skipped[reason] += 1
            if reason == "binary_files_skipped":
                binary.append(str(path))
    skipped += Counter()  # drops zero counts
    return sorted(files, key=lambda file: os.fsencode(file.name))


def _reason_to_skip(path: Path) -> str:
    """Why a file found in a folder is skipped; empty if it is not."""
    if path.name.startswith("."):
        return "hidden_files_or_folders_skipped"
    if not path.is_file():  # reading a pipe or a socket could block for ever
        return "special_files_skipped"
    with open(path, "rb") as file:
        start = file.read(_SNIFF_BYTES)
    if _kind(path) == "text" and (
            b"\0" in start or path.suffix.lower() in _COMPRESSED or binary_fraction(start) > _MAX_BINARY):
        return "binary_files_skipped"
    return ""


def _input_file(path: Path, name: str, status: os.stat_result) -> InputFile:
    return InputFile(path, name, _kind(path), status.st_size, status.st_mtime_ns)


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return "jsonl" if suffix in _JSONL else "parquet" if suffix in _PARQUET else "text"


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}.",
                     "Make it readable for this user, or leave it out. The tokens written so far are kept.")


def _standard_library() -> TextSource:
    """The first 8 MB of the standard library's source code, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[InputFile] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_EMBEDDED and not name.startswith(("config-", "."))]
        for name in names:
            # _sysconfigdata_… holds the build settings of this machine.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                with suppress(OSError):
                    files.append(_input_file(path, path.relative_to(root).as_posix(), path.stat()))
    files = [file for file in files if file.size]
    files.sort(key=lambda file: os.fsencode(file.name))
    total, kept = 0, 0
    while kept < len(files) and total < EMBEDDED_BYTES:
        total += files[kept].size
        kept += 1
    if not kept:
        raise DataError(f"This Python has no source code of its standard library in {root}.",
                        "Give your own text: fitgpt prepare FILE_OR_FOLDER --name=NAME --tokenizer=bytes")
    description = f"the source text of Python's standard library in {root}"
    return TextSource(description, "", tuple(files[:kept]), text_bytes=total)


# ---- files to documents

def _documents_in(file: InputFile, column: str) -> int:
    if file.kind == "parquet":
        return ParquetReader(file.path, column).rows
    if file.kind == "text":
        return 1
    lines, last = 0, b"\n"
    with open(file.path, "rb") as opened:
        while block := opened.read(_READ_BYTES):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")  # an unterminated last line included


def _read_file(file: InputFile, column: str, first_document: int, skip: int) -> TextChunks:
    """The documents of a file without the first `skip`; the first of all is number `first_document`."""
    if file.kind == "parquet":
        yield from ParquetReader(file.path, column).read(first_document, skip)
    elif file.kind == "jsonl":
        yield from _read_jsonl(file.path, column, first_document, skip)
    else:
        with open(file.path, "rb") as opened:
            yield from split_document(first_document, iter(partial(opened.read, CHUNK_BYTES), b""), bom=True)


def _read_jsonl(path: Path, column: str, first_document: int, skip: int) -> TextChunks:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where, document = f"{path}, line {number:,}", first_document + number - 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{where} is longer than {show_bytes(MAX_LINE_BYTES)}.",
                                "Split its text into several lines of JSON.")
            if number <= skip:
                continue
            if not line.strip():
                yield from split_document(document, ())
                continue
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON: {error}.",
                                "Correct the line; each line of a .jsonl file is one JSON object.") from error
            if not isinstance(row, dict):
                raise DataError(f"{where} is not a JSON object but {type(row).__name__}.",
                                'Each line must look like {"text": "…"}.')
            yield from _row_chunks(document, row, column, where)


def _row_chunks(document: int, row: Mapping[str, Any], column: str, where: str) -> TextChunks:
    """The chunks of the text in one column of a row; `where` names the row in errors."""
    if column not in row:
        raise _no_column(where, column, list(row))
    value = "" if row[column] is None else row[column]
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} holds {type(value).__name__}, not text.",
                        "Give the field that holds the text: --text_column=NAME")
    data, surrogates = utf8_of(value)
    for chunk in split_document(document, (data,)):
        if surrogates and not chunk.part:
            chunk.counts["lone_surrogates_replaced"] = surrogates
        yield chunk


def _no_column(where: str, column: str, present: list[str]) -> DataError:
    names = ", ".join(map(repr, present[:20])) + (" …" if len(present) > 20 else "")
    return DataError(f"{where} has no {column!r}; it has {names or 'no columns'}.",
                     "Give the column that holds the text: --text_column=NAME")


class ParquetReader:
    """The text column of one parquet file, read a few rows at a time."""

    def __init__(self, path: Path, column: str) -> None:
        """Opens the file and checks its column and sizes, before anything is read."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise DataError("Reading parquet needs the package pyarrow, which is not installed.",
                            install_command("parquet")) from error
        self._path, self._column, self._arrow = path, column, pyarrow
        try:
            self._file = parquet.ParquetFile(path)
            self._size = path.stat().st_size
            schema = self._file.schema_arrow
            if schema.get_field_index(column) < 0:
                raise _no_column(str(path), column, list(schema.names))
            kind, types = schema.field(column).type, pyarrow.types
            inner = kind.value_type if types.is_dictionary(kind) else kind
            if not (types.is_string(inner) or types.is_large_string(inner)):  # an extension type is neither
                columns = ", ".join(f"{each.name} ({each.type})" for each in schema)
                raise DataError(f"{path}: the column {column!r} is {kind}, not text. Columns: {columns}.",
                                "Give a column that holds strings: --text_column=NAME")
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise self._unreadable(error) from error
        metadata = self._file.metadata
        self.rows: int = metadata.num_rows
        self.text_bytes = 0  # as the file claims
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            sizes = (row_group.column(index) for index in range(row_group.num_columns))
            nbytes = sum(each.total_uncompressed_size for each in sizes if each.path_in_schema == column)
            if not 0 <= nbytes <= _MAX_ROW_GROUP_BYTES:
                raise DataError(f"{path}: row group {group} claims {nbytes:,} bytes of text; the limit is "
                                f"{show_bytes(_MAX_ROW_GROUP_BYTES)}.", "Write the file again with smaller row groups.")
            self.text_bytes += nbytes
        self._check_expansion(self.text_bytes)

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
                    self._check_expansion(total)
                    yield from split_document(first_document + row, (data,))
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

    def _check_expansion(self, nbytes: int) -> None:
        if nbytes > max(_ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * self._size):
            raise DataError(
                f"{self._path} has {show_bytes(self._size)} and decompresses to {show_bytes(nbytes)} or more, over "
                f"{MAX_EXPANSION} times its size: it is damaged, or a decompression bomb.",
                "Leave this file out, or write it again from its source.")

    def _unreadable(self, error: Exception) -> DataError:
        first = str(error).splitlines()[0] if str(error) else repr(error)
        return DataError(f"{self._path} cannot be read as parquet: {first}",
                         "Copy or download it again; if it is not parquet, give it another suffix.")


def _read_hub(name: str, config: str, column: str, skip: int, marks: list[HubMark]) -> TextChunks:
    """The train split of a hub dataset, streamed, from row `skip` on. Code in the dataset's repository is not run.

    Starts at the last of `marks` before that row, so that files before it are not downloaded again, and adds new ones.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError("Streaming a dataset from the hub needs the package datasets, which is not installed.",
                        install_command("datasets")) from error
    try:
        rows = datasets.load_dataset(name, name=config or None, split="train", streaming=True)
        document, state = max((mark for mark in marks if mark[0] <= skip), default=(0, {}), key=lambda mark: mark[0])
        if state:
            rows.load_state_dict(state)
        for row in rows:
            if document >= skip:
                yield from _row_chunks(document, row, column, f"hub dataset {name}, row {document:,}")
            document += 1
            if document % ROWS_PER_MARK == 0:
                marks.append((document, rows.state_dict()))
                del marks[:-_MARKS]
    except DataError:
        raise
    except Exception as error:  # network, authentication, unknown name: there is no common base class
        first = str(error).splitlines()[0].rstrip(".") if str(error) else repr(error)
        raise DataError(f"The hub dataset {name!r} could not be read: {type(error).__name__}: {first}.",
                        "Check the name, --hub_config and the network; then run the same command again: "
                        "it resumes where it stopped.") from error
