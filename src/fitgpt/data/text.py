"""Raw bytes → valid UTF-8 in chunks of bounded size, with a count of each repair.

    invalid UTF-8, lone surrogates   each replaced by U+FFFD
    a byte-order mark                removed from the start of a file
    NUL                              kept: it is a character
    a document above 1 MiB           split into chunks after a newline, else before a space, else between characters;
                                     the chunks stay one document, and only gpt2's tokens at the cut differ
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from ..core.units import MiB

CHUNK_BYTES = 1 * MiB
_BOM = b"\xef\xbb\xbf"
_FEW_INVALID = 16   # fewer invalid bytes than this do not make a file binary
_REPLACEMENT = "\ufffd".encode()
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TextChunk:
    """A document, or a part of a long one. `data` is empty only where the whole document is."""

    document: int
    part: int                                              # number of the chunk within its document
    last: bool
    data: bytes                                            # valid UTF-8
    counts: dict[str, int] = field(default_factory=dict)   # repairs in this chunk


TextChunks = Generator[TextChunk, None, None]


def split_document(document: int, reads: Iterable[bytes], *, bom: bool = False) -> TextChunks:
    """The raw bytes of one document, in reads of any size → its chunks. `bom`: remove a byte-order mark."""
    part, buffer = 0, b""
    counts: dict[str, int] = {}
    for read in reads:
        if not part and not buffer and bom and read.startswith(_BOM):
            read, counts = read[len(_BOM):], {"byte_order_marks": 1}
        buffer += read
        while len(buffer) > CHUNK_BYTES:
            cut = _cut_position(buffer)
            yield _clean(document, part, False, buffer[:cut], counts)
            part, buffer, counts = part + 1, buffer[cut:], {}
    yield _clean(document, part, True, buffer, counts)


def binary_fraction(start: bytes) -> float:
    """The fraction of a file's first bytes that is invalid UTF-8 or NUL; 0 if only a few bytes are invalid."""
    invalid = start.decode("utf-8", "replace").count("\ufffd") - start.count(_REPLACEMENT)
    return (invalid + start.count(0)) / len(start) if invalid >= _FEW_INVALID else 0.0


def utf8_of(text: str) -> tuple[bytes, int]:
    """A string → UTF-8, and the number of lone surrogates replaced. JSON escapes can express them, UTF-8 cannot."""
    try:
        return text.encode(), 0
    except UnicodeEncodeError:
        replaced, count = _SURROGATE.subn("\ufffd", text)
        return replaced.encode(), count


def _cut_position(buffer: bytes) -> int:
    """Where to end a chunk: after a newline, else before a space, else between two characters."""
    newline = buffer.rfind(b"\n", CHUNK_BYTES // 2, CHUNK_BYTES)
    if newline >= 0:
        return newline + 1
    space = buffer.rfind(b" ", CHUNK_BYTES // 2, CHUNK_BYTES)
    if space >= 0:
        return space
    cut = CHUNK_BYTES
    while cut > CHUNK_BYTES - 3 and buffer[cut] & 0xC0 == 0x80:  # inside a character, which has up to 4 bytes
        cut -= 1
    return cut


def _clean(document: int, part: int, last: bool, data: bytes, counts: dict[str, int]) -> TextChunk:
    try:
        data.decode()
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        counts["invalid_utf8_replaced"] = text.count("\ufffd") - data.count(_REPLACEMENT)
        data = text.encode()
    if nuls := data.count(0):
        counts["nul_characters"] = nuls
    if last and not part and not data:
        counts["empty_documents"] = 1
    return TextChunk(document, part, last, data, counts)
