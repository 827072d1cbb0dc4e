"""PrepareOptions to a source of text: files and folders, a Hugging Face dataset, or Python's standard library.

A source lists what it will read before it reads, always in the same order, and numbers its documents, so that a
stopped `prepare` can resume from any of them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..core.errors import DataError
from ..core.units import KiB
from .table_readers import ParquetReader, count_lines, read_hub, read_jsonl
from .text import CHUNK_BYTES, TextChunks, binary_fraction, split_document

if TYPE_CHECKING:
    from ..config.command_options import PrepareOptions

EMBEDDED_BYTES = 8_000_000   # of the standard library: enough to train on, prepared in a second or two
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


class TextSource(Protocol):
    """Documents in a fixed order, to be read from any of them on."""

    @property
    def description(self) -> str: ...
    @property
    def text_bytes(self) -> int | None:
        """Approximate size of the text; None if it is unknown before it is read."""
        ...
    @property
    def digest(self) -> str:
        """A hash of the names and sizes of the files; empty if there are none."""
        ...
    @property
    def newest_ns(self) -> int:
        """Modification time of the newest file."""
        ...
    @property
    def skipped(self) -> dict[str, int]: ...
    def chunks(self, first: int) -> TextChunks:
        """The chunks of every document from number `first` on."""
        ...


def open_source(options: PrepareOptions) -> TextSource:
    """The source that the options name; DataError if it has no readable text."""
    if options.hub:
        return HubSource(options.hub, options.hub_config, options.text_column)
    if options.embedded:
        return _standard_library()
    return _list_files(options.input, options.text_column)


@dataclass(frozen=True)
class HubSource:
    """A dataset of the Hugging Face hub, streamed."""

    name: str
    config: str
    column: str
    text_bytes: int | None = None
    newest_ns: int = 0

    @property
    def description(self) -> str:
        return f"hub dataset {self.name}" + (f" ({self.config})" if self.config else "")

    @property
    def digest(self) -> str:
        return ""

    @property
    def skipped(self) -> dict[str, int]:
        return {}

    def chunks(self, first: int) -> TextChunks:
        return read_hub(self.name, self.config, self.column, first)


# ---- files

@dataclass(frozen=True)
class InputFile:
    """One file to read. `name` is relative to the given folder, so that the digest does not depend on its location."""

    path: Path
    name: str
    kind: str   # "text", "jsonl", "parquet"
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class FileSource:
    """Text, .jsonl and parquet files, in order."""

    description: str
    files: tuple[InputFile, ...]
    column: str
    skipped: dict[str, int]
    text_bytes: int | None

    @property
    def digest(self) -> str:
        listing = hashlib.sha256()
        for file in self.files:
            listing.update(os.fsencode(f"{file.name}\0{file.size}\n"))
        return listing.hexdigest()

    @property
    def newest_ns(self) -> int:
        return max(file.mtime_ns for file in self.files)

    def chunks(self, first: int) -> TextChunks:
        before, skip = 0, first
        for file in self.files:
            try:
                if skip and skip >= (documents := _documents_in(file, self.column)):
                    before, skip = before + documents, skip - documents
                    continue
                after = before
                for chunk in _read(file, self.column, before, skip):
                    after = chunk.document + 1
                    yield chunk
            except OSError as error:
                raise _unreadable(file.path, error) from error
            before, skip = after, 0


def _documents_in(file: InputFile, column: str) -> int:
    if file.kind == "jsonl":
        return count_lines(file.path)
    return ParquetReader(file.path, column).rows if file.kind == "parquet" else 1


def _read(file: InputFile, column: str, first_document: int, skip: int) -> TextChunks:
    if file.kind == "jsonl":
        return read_jsonl(file.path, column, first_document, skip)
    if file.kind == "parquet":
        return ParquetReader(file.path, column).read(first_document, skip)
    return split_document(first_document, _read_blocks(file.path), bom=True)


def _read_blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(CHUNK_BYTES):
            yield block


def _list_files(inputs: tuple[str, ...], column: str) -> FileSource:
    """Files and folders as the user gave them, to the files that will be read."""
    files: list[InputFile] = []
    skipped: Counter[str] = Counter()
    for given in inputs:
        path = Path(given)
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the name contains a NUL"
            raise DataError(f"The input {given!r} cannot be read: {reason}.",
                            "Check the path: fitgpt prepare FILE_OR_FOLDER --name=NAME") from error
        if stat.S_ISDIR(status.st_mode):
            files += _walk(path, skipped)
        else:
            files.append(_given_file(path, status))
    if not files:
        left_out = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in sorted(skipped.items()))
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
    return FileSource(", ".join(inputs), tuple(files), column, dict(skipped), text_bytes)


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
    return InputFile(path, path.name, _kind(path), status.st_size, status.st_mtime_ns)


def _walk(root: Path, skipped: Counter[str]) -> list[InputFile]:
    """Every file below `root` that can be text, sorted by its path. Adds the others to `skipped`, by reason."""
    files = []
    for folder, inner, names in os.walk(root):
        hidden = [name for name in inner if name.startswith(".")]
        skipped["hidden_files_or_folders_skipped"] += len(hidden)
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            reason = _reason_to_skip(path)
            file = None if reason else _input_file(path, path.relative_to(root).as_posix())
            if file:
                files.append(file)
            else:
                skipped[reason or "unreadable_files_skipped"] += 1
    skipped += Counter()  # drops zero counts
    return sorted(files, key=lambda file: os.fsencode(file.name))


def _input_file(path: Path, name: str) -> InputFile | None:
    """None if the file is not readable."""
    try:
        status = path.stat()
    except OSError:
        return None
    return InputFile(path, name, _kind(path), status.st_size, status.st_mtime_ns)


def _reason_to_skip(path: Path) -> str:
    """Why a file found in a folder is skipped; empty if it is not."""
    if path.name.startswith("."):
        return "hidden_files_or_folders_skipped"
    try:
        if not path.is_file():  # reading a pipe or a socket could block for ever
            return "special_files_skipped"
        with open(path, "rb") as file:
            start = file.read(_SNIFF_BYTES)
    except OSError:
        return "unreadable_files_skipped"
    if _kind(path) != "text":
        return ""
    if b"\0" in start or path.suffix.lower() in _COMPRESSED or binary_fraction(start) > _MAX_BINARY:
        return "binary_files_skipped"
    return ""


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return "jsonl" if suffix in _JSONL else "parquet" if suffix in _PARQUET else "text"


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}.",
                     "Make it readable for this user, or leave it out. The tokens written so far are kept.")


# ---- the embedded corpus

def _standard_library() -> FileSource:
    """The first 8 MB of the standard library's source code, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[InputFile] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_EMBEDDED and not name.startswith(("config-", "."))]
        for name in names:
            # _sysconfigdata_… holds the build settings of this machine.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                file = _input_file(path, path.relative_to(root).as_posix())
                files += [file] if file and file.size else []
    files.sort(key=lambda file: os.fsencode(file.name))
    total, kept = 0, 0
    while kept < len(files) and total < EMBEDDED_BYTES:
        total += files[kept].size
        kept += 1
    if not kept:
        raise DataError(f"This Python has no source code of its standard library in {root}.",
                        "Give your own text: fitgpt prepare FILE_OR_FOLDER --name=NAME --tokenizer=bytes")
    description = f"the source text of Python's standard library in {root}"
    return FileSource(description, tuple(files[:kept]), "", {}, total)
