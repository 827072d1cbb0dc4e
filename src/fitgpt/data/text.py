"""How does any run of bytes become clean UTF-8 in pieces of bounded size, with what was mended counted?

    invalid UTF-8, lone surrogates   each replaced by U+FFFD
    a byte-order mark                removed from the start of a file
    NUL                              kept: it is a character
    a document above 1 MiB           handed on in pieces, cut after a newline, else before a space, else between
                                     characters; they stay one document, and only gpt2's tokens at the cut differ
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from ..core.units import MiB

PIECE_BYTES = 1 * MiB
_BOM = b"\xef\xbb\xbf"
_A_FEW = 16
_REPLACEMENT = "\ufffd".encode()
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one; empty only where the whole document is."""

    document: int
    part: int
    last: bool
    data: bytes                                            # valid UTF-8
    counts: dict[str, int] = field(default_factory=dict)   # what was mended here


Pieces = Generator[Piece, None, None]


def pieces_of(document: int, chunks: Iterable[bytes], *, bom: bool = False) -> Pieces:
    """The pieces of one document whose raw bytes come in chunks."""
    part, buffer = 0, b""
    counts: dict[str, int] = {}
    for chunk in chunks:
        if not part and not buffer and bom and chunk.startswith(_BOM):
            chunk, counts = chunk[len(_BOM):], {"byte_order_marks": 1}
        buffer += chunk
        while len(buffer) > PIECE_BYTES:
            cut = _cut_place(buffer)
            yield _clean(document, part, False, buffer[:cut], counts)
            part, buffer, counts = part + 1, buffer[cut:], {}
    yield _clean(document, part, True, buffer, counts)


def foreign_share(start: bytes) -> float:
    """How much of a file's first bytes no UTF-8 text holds, NULs among them included. A few of them prove nothing."""
    invalid = start.decode("utf-8", "replace").count("\ufffd") - start.count(_REPLACEMENT)
    return (invalid + start.count(0)) / len(start) if invalid >= _A_FEW else 0.0


def utf8_of(text: str) -> tuple[bytes, int]:
    """UTF-8, and the number of lone surrogates replaced (JSON escapes can spell them, UTF-8 cannot)."""
    try:
        return text.encode(), 0
    except UnicodeEncodeError:
        mended, count = _SURROGATE.subn("\ufffd", text)
        return mended.encode(), count


def _cut_place(buffer: bytes) -> int:
    newline = buffer.rfind(b"\n", PIECE_BYTES // 2, PIECE_BYTES)
    if newline >= 0:
        return newline + 1
    space = buffer.rfind(b" ", PIECE_BYTES // 2, PIECE_BYTES)
    if space >= 0:
        return space
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 3 and buffer[cut] & 0xC0 == 0x80:  # inside a character of up to 4 bytes
        cut -= 1
    return cut


def _clean(document: int, part: int, last: bool, data: bytes, counts: dict[str, int]) -> Piece:
    counts = dict(counts)
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
    return Piece(document, part, last, data, counts)
