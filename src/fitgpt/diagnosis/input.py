"""Bytes that were pasted, piped or logged → text around the first message, without colours, prefixes and line wraps."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

READ_WHOLE = 256 * 1024  # bytes; an input up to this size is parsed as a whole
BEFORE, AFTER = 64 * 1024, 16 * 1024  # bytes kept of a larger input: traceback before its message, figures after
NEAR = 400               # bytes; the longest message is about four times as long
MAX_MISSES = 200
CHUNK = 1024 * 1024

# Lower-case parts of every message in oom_message.py. A large input is searched for them before anything is parsed.
HINTS = (b"out of memory", b"outofmemory", b"tried to allocate", b"total capac", b"reserved in total", b"_alloc_failed",
         b"_not_initialized", b"cpuallocator", b"not enough memory", b"unable to allocate", b"paging file",
         b"winerror 1455", b"memoryerror", b"bad_alloc", b"killed", b"oom-kill", b"oom_kill", b"code 137",
         b"status 137", b"code: 137", b"exitcode: -9", b"exitcode : -9", b"code = -9", b"signal 9", b"sigkill",
         b"posix_memalign", b"ram ran out", b"cannot allocate memory", b"error_out_of_memory", b"errormemoryallocation",
         b"nvidia-smi", b"memory.used")


# ---- clean text

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]")
_LEVEL = r"(?:INFO|WARN(?:ING)?|ERROR|DEBUG|FATAL|CRITICAL)"
_PREFIX = re.compile(
    r"\s*(?:`+|>(?=[\s>])|[|│┃❱](?=\s)|E(?=\s{2,})|\[rank\d+\]:?|\(\w+ pid=\d+[^)]*\)|\d+:(?=\s)"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?"
    rf"|\[?{_LEVEL}\b\]?:?\s*(?:\d\d-\d\d )?(?:\d\d:\d\d:\d\d[.,\d]*)?\s*(?:\[[\w.]+:\d+\])?:?)")
_RANK = re.compile(r"\s*\[rank(\d+)\]")


def clean(text: str) -> str:
    """The text without colours, control characters, and the prefixes of loggers, quotes and terminals."""
    text = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(_without_prefixes(_CONTROL.sub(" ", line)) for line in _first_failed_rank(text.split("\n")))


def _without_prefixes(line: str) -> str:
    for _ in range(6):
        found = _PREFIX.match(line)
        if not found or not found[0].strip():
            break
        line = line[found.end():]
    return line.rstrip(" │┃|")


def _first_failed_rank(lines: list[str]) -> list[str]:
    """Where several ranks wrote into one log, the lines of the rank that ran out of memory first."""
    ranks = [(_RANK.match(line), line) for line in lines]
    first = next((rank[1] for rank, line in ranks if rank and "out of memory" in line.lower()), None)
    if first is None:
        return lines
    return [line for rank, line in ranks if rank is None or rank[1] == first]


class UnwrappedText(NamedTuple):
    """A text without white space, so that a line wrap cannot split a word."""

    text: str
    positions: list[int]  # of each character in the original text


def unwrap(text: str) -> UnwrappedText:
    positions = [position for position, character in enumerate(text) if not character.isspace()]
    return UnwrappedText("".join(text[position] for position in positions), positions)


# ---- inputs of any size


class MessageContext(NamedTuple):
    """A small input as a whole; of a large one, the text around its first message."""

    text: str
    whole: bool
    counts: dict[bytes, int]  # occurrences of each counted word in the whole input


def read_context(stream: BinaryIO, is_message: Callable[[str], bool], counted: Iterable[bytes] = ()) -> MessageContext:
    """Reads the stream to its end and keeps a few MiB of it at most."""
    chunks, head = _utf8_chunks(stream), b""
    for chunk in chunks:
        head += chunk
        if len(head) > READ_WHOLE:
            break
    else:
        low = head.lower()
        return MessageContext(_decode(head), True, {word: low.count(word) for word in counted})
    search = StreamSearch(is_message, counted)
    search.feed(head)
    for chunk in chunks:
        search.feed(chunk)
    search.finish()
    return MessageContext(search.found or _decode(head[:READ_WHOLE]), False, search.counts)


def _utf8_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """The stream in chunks. UTF-16, which PowerShell writes when it redirects, is converted to UTF-8."""
    chunk = stream.read(CHUNK)
    utf16 = chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", errors="replace") if utf16 else chunk
        chunk = stream.read(CHUNK)


class StreamSearch:
    """Reads a stream once: keeps the text around the first message and counts words to the end."""

    def __init__(self, is_message: Callable[[str], bool], counted: Iterable[bytes]) -> None:
        self.found = ""
        self.counts = dict.fromkeys(counted, 0)
        self._is_message = is_message
        self._misses = dict.fromkeys(HINTS, 0)
        self._buffer = b""
        self._searched = 0  # how much of the buffer was searched for hints
        self._tail = b""    # the last bytes counted: a chunk may end inside a word

    def feed(self, chunk: bytes) -> None:
        self._count(chunk.lower())
        if not self.found:
            self._buffer += chunk
            self._search(len(self._buffer) - AFTER)  # a message that begins later may continue in the next chunk
            drop = max(self._searched - BEFORE, 0)
            self._buffer, self._searched = self._buffer[drop:], self._searched - drop

    def finish(self) -> None:
        if not self.found:
            self._misses = dict.fromkeys(HINTS, 0)
            self._search(len(self._buffer))

    def _count(self, low: bytes) -> None:
        for word in self.counts:
            begun = self._tail[-(len(word) - 1):]
            self.counts[word] += (begun + low[:len(word) - 1]).count(word) + low.count(word)
        self._tail = (self._tail + low)[-64:]

    def _search(self, end: int) -> None:
        """Parses the text around every hint before `end`. A hint that missed often is a common word of this log and is
        skipped."""
        low = self._buffer.lower()
        hints = {hint: low.find(hint, self._searched) for hint, misses in self._misses.items() if misses < MAX_MISSES}
        hints = {hint: at for hint, at in hints.items() if 0 <= at < end}
        while hints:
            hint, at = min(hints.items(), key=lambda each: each[1])
            if self._is_message(_decode(self._buffer[max(at - NEAR, 0):at + 5 * NEAR])):
                self.found = _decode(self._buffer[max(at - BEFORE, 0):at + AFTER])
                return
            self._misses[hint] += 1
            self._searched = at + 4 * NEAR
            hints = {each: later for each, place in hints.items() if self._misses[each] < MAX_MISSES
                     and 0 <= (later := place if place >= self._searched else low.find(each, self._searched)) < end}
        self._searched = max(self._searched, end)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
