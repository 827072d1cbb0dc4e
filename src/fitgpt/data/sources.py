"""Where does the text come from? Files, folders, tables, the hub, or Python's own standard library.

A source lists what it will read before it reads, always in the same order, and hands out documents by number,
so that a stopped preparation can go on from any of them.
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
from .tables import Parquet, count_lines, read_hub, read_jsonl
from .text import PIECE_BYTES, Pieces, foreign_share, pieces_of

if TYPE_CHECKING:
    from ..config.command_options import PrepareOptions

EMBEDDED_BYTES = 8_000_000   # of the standard library: enough to learn from, prepared in a second or two
_SNIFF_BYTES = 8 * KiB
_FOREIGN = 0.1  # of a file's beginning: Latin-1 prose, which is read and mended, has half of that
_JSONL, _PARQUET = (".jsonl", ".ndjson"), (".parquet", ".pq")
_MARKUP = (".json", ".csv", ".tsv")  # tables, but of no shape that can be told
_UNPACK = {".gz": "gunzip -k", ".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zst": "unzstd", ".zip": "unzip",
           ".tar": "tar xf", ".tgz": "tar xf", ".7z": "7z x", ".rar": "unrar x"}
_PACKED = tuple(_UNPACK)
_TARS = (".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_NOT_PROSE = frozenset({  # of the standard library: tests, other people's packages, generated tables
    "__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "turtledemo",
    "lib2to3", "ensurepip", "encodings", "pydoc_data", "lib-dynload"})


class Source(Protocol):
    @property
    def description(self) -> str: ...
    @property
    def text_bytes(self) -> int | None:
        """About how much text there is; None where only reading it can tell."""
        ...
    @property
    def digest(self) -> str:
        """Changes when the list of what will be read does: names and sizes."""
        ...
    @property
    def newest_ns(self) -> int: ...
    @property
    def skipped(self) -> dict[str, int]: ...
    def pieces(self, first: int) -> Pieces:
        """The pieces of every document from number `first` on."""
        ...


def open_source(options: PrepareOptions) -> Source:
    if options.hub:
        return Hub(options.hub, options.hub_config, options.text_column)
    if options.embedded:
        return _embedded()
    return _files(options.input, options.text_column)


@dataclass(frozen=True)
class Hub:
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

    def pieces(self, first: int) -> Pieces:
        return read_hub(self.name, self.config, self.column, first)


# ---- files

@dataclass(frozen=True)
class Item:
    """One file to read. `name` is relative to what the user gave, so that the digest does not depend on where it is."""

    path: Path
    name: str
    kind: str   # "text", "jsonl", "parquet"
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Files:
    description: str
    items: tuple[Item, ...]
    column: str
    skipped: dict[str, int]
    text_bytes: int | None

    @property
    def digest(self) -> str:
        listing = hashlib.sha256()
        for item in self.items:
            listing.update(os.fsencode(f"{item.name}\0{item.size}\n"))
        return listing.hexdigest()

    @property
    def newest_ns(self) -> int:
        return max(item.mtime_ns for item in self.items)

    def pieces(self, first: int) -> Pieces:
        before, skip = 0, first
        for item in self.items:
            try:
                if skip and skip >= (documents := _documents_in(item, self.column)):
                    before, skip = before + documents, skip - documents
                    continue
                after = before
                for piece in _read(item, self.column, before, skip):
                    after = piece.document + 1
                    yield piece
            except OSError as error:
                raise _unreadable(item.path, error) from error
            before, skip = after, 0


def _documents_in(item: Item, column: str) -> int:
    if item.kind == "jsonl":
        return count_lines(item.path)
    return Parquet(item.path, column).rows if item.kind == "parquet" else 1


def _read(item: Item, column: str, first_document: int, skip: int) -> Pieces:
    if item.kind == "jsonl":
        return read_jsonl(item.path, column, first_document, skip)
    if item.kind == "parquet":
        return Parquet(item.path, column).read(first_document, skip)
    return pieces_of(first_document, _chunks(item.path), bom=True)


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(PIECE_BYTES):
            yield chunk


def _files(inputs: tuple[str, ...], column: str) -> Files:
    items: list[Item] = []
    skipped: Counter[str] = Counter()
    for given in inputs:
        path = Path(given)
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the name holds a NUL"
            raise DataError(f"The input {given!r} cannot be read: {reason}.",
                            "Check the path: fitgpt prepare FILE_OR_FOLDER --name=NAME") from error
        if stat.S_ISDIR(status.st_mode):
            items += _walk(path, skipped)
        else:
            items.append(_given(path, status))
    if not items:
        left_out = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in sorted(skipped.items()))
        raise DataError(f"There is no text in {', '.join(inputs)}" + (f": {left_out}." if left_out else "."),
                        "Give text, .jsonl or .parquet files, or a folder that holds some.")
    if markup := sum(item.path.suffix.lower() in _MARKUP for item in items):
        skipped["json_or_csv_files_read_as_plain_text,_markup_and_all"] = markup
    text_bytes = sum(Parquet(item.path, column).text_bytes if item.kind == "parquet" else item.size for item in items)
    if not any(item.size for item in items):
        raise DataError(f"There is no text in {', '.join(inputs)}: "
                        f"{'it is empty' if len(items) == 1 else f'all {len(items)} files are empty'}.",
                        "Give files that hold text: fitgpt prepare FILE_OR_FOLDER --name=NAME")
    return Files(", ".join(inputs), tuple(items), column, dict(skipped), text_bytes)


def _given(path: Path, status: os.stat_result) -> Item:
    """A file the user named is read whatever its suffix, unless it cannot be text."""
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"The input {path} is neither a file nor a folder.", "Write the text to a file first.")
    if path.suffix.lower() in _PACKED:
        unpack = "tar xf" if path.name.lower().endswith(_TARS) else _UNPACK[path.suffix.lower()]
        raise DataError(f"The input {path} is packed ({path.suffix}).",
                        f"Unpack it first, and give what was in it: {unpack} {shlex.quote(str(path))}")
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
    if _kind(path) == "text" and (foreign := foreign_share(start)) > _FOREIGN:
        raise DataError(f"The input {path} is not text in UTF-8: {foreign:.0%} of its beginning is what no such text "
                        "holds. It is binary, or text in another encoding.",
                        f"If it is text, say in which: iconv -f WINDOWS-1252 {converted}\n"
                        f"If each byte is to count as it is: iconv -f LATIN1 {converted}")
    return Item(path, path.name, _kind(path), status.st_size, status.st_mtime_ns)


def _walk(root: Path, skipped: Counter[str]) -> list[Item]:
    """Every file below `root` that can be text, sorted by its path. What is left out is counted."""
    items = []
    for folder, inner, names in os.walk(root):
        hidden = [name for name in inner if name.startswith(".")]
        skipped["hidden_files_or_folders_skipped"] += len(hidden)
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            item = None if (reason := _unfit(path)) else _item(path, path.relative_to(root).as_posix())
            if item:
                items.append(item)
            else:
                skipped[reason or "unreadable_files_skipped"] += 1
    skipped += Counter()  # drops what was counted zero times
    return sorted(items, key=lambda item: os.fsencode(item.name))


def _item(path: Path, name: str) -> Item | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return Item(path, name, _kind(path), status.st_size, status.st_mtime_ns)


def _unfit(path: Path) -> str:
    """Why a file met in a folder is left out; empty if it is not."""
    if path.name.startswith("."):
        return "hidden_files_or_folders_skipped"
    try:
        if not path.is_file():  # a pipe or a socket would be waited for for ever
            return "special_files_skipped"
        with open(path, "rb") as file:
            start = file.read(_SNIFF_BYTES)
    except OSError:
        return "unreadable_files_skipped"
    if _kind(path) == "text" and (b"\0" in start or path.suffix.lower() in _PACKED or foreign_share(start) > _FOREIGN):
        return "binary_files_skipped"
    return ""


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return "jsonl" if suffix in _JSONL else "parquet" if suffix in _PARQUET else "text"


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}.",
                     "Make it readable for this user, or leave it out; what is done is kept.")


# ---- the embedded corpus

def _embedded() -> Files:
    root = Path(sysconfig.get_path("stdlib"))
    items: list[Item] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_PROSE and not name.startswith(("config-", "."))]
        for name in names:
            # _sysconfigdata_… is this machine's build settings.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                item = _item(path, path.relative_to(root).as_posix())
                items += [item] if item and item.size else []
    items.sort(key=lambda item: os.fsencode(item.name))
    total, kept = 0, 0
    while kept < len(items) and total < EMBEDDED_BYTES:
        total += items[kept].size
        kept += 1
    if not kept:
        raise DataError(f"This Python keeps no source text of its standard library in {root}.",
                        "Give text of your own: fitgpt prepare FILE_OR_FOLDER --name=NAME --tokenizer=bytes")
    description = f"the source text of Python's standard library in {root}"
    return Files(description, tuple(items[:kept]), "", {}, total)
