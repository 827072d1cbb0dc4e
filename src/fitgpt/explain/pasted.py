"""What people paste, pipe or log, made readable: any size, any encoding, colours, prompts, prefixes and line wraps."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

WHOLE = 256 * 1024       # so much is read at once and looked at as a whole
BEFORE, AFTER = 64 * 1024, 16 * 1024  # of a larger one, this much around its first message: a traceback, its figures
NEAR = 400               # a quarter of the longest message
MOST_MISSES = 200
CHUNK = 1024 * 1024

# Words that a message may hold, in lower case: a large file is searched for them before anything is parsed.
HINTS = (b"out of memory", b"outofmemory", b"tried to allocate", b"total capac", b"reserved in total", b"_alloc_failed",
         b"_not_initialized", b"cpuallocator", b"not enough memory", b"unable to allocate", b"paging file",
         b"winerror 1455", b"memoryerror", b"bad_alloc", b"killed", b"oom-kill", b"oom_kill", b"code 137",
         b"status 137", b"code: 137", b"exitcode: -9", b"exitcode : -9", b"code = -9", b"signal 9", b"sigkill",
         b"posix_memalign", b"ram ran out", b"cannot allocate memory", b"error_out_of_memory", b"errormemoryallocation",
         b"nvidia-smi", b"memory.used")


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]")
_LEVEL = r"(?:INFO|WARN(?:ING)?|ERROR|DEBUG|FATAL|CRITICAL)"
_PREFIX = re.compile(
    r"\s*(?:`+|>(?=[\s>])|[|│┃❱](?=\s)|E(?=\s{2,})|\[rank\d+\]:?|\(\w+ pid=\d+[^)]*\)|\d+:(?=\s)"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?"
    rf"|\[?{_LEVEL}\b\]?:?\s*(?:\d\d-\d\d )?(?:\d\d:\d\d:\d\d[.,\d]*)?\s*(?:\[[\w.]+:\d+\])?:?)")
_RANK = re.compile(r"\s*\[rank(\d+)\]")


def cleaned(text: str) -> str:
    """Without colours, control characters, and what loggers, quoting and terminals put before and after a line."""
    text = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(_bare(_CONTROL.sub(" ", line)) for line in _one_rank(text.split("\n")))


def _bare(line: str) -> str:
    for _ in range(6):
        found = _PREFIX.match(line)
        if not found or not found[0].strip():
            break
        line = line[found.end():]
    return line.rstrip(" │┃|")


def _one_rank(lines: list[str]) -> list[str]:
    """Of the ranks that wrote over each other, the one that ran out first."""
    ranks = [(_RANK.match(line), line) for line in lines]
    first = next((rank[1] for rank, line in ranks if rank and "out of memory" in line.lower()), None)
    if first is None:
        return lines
    return [line for rank, line in ranks if rank is None or rank[1] == first]


class Squashed(NamedTuple):
    """A text without its white space, so that no line wrap can hide a word; `at[i]` is where character i stood."""

    text: str
    at: list[int]


def squashed(text: str) -> Squashed:
    at = [place for place, character in enumerate(text) if not character.isspace()]
    return Squashed("".join(text[place] for place in at), at)


def utf8(stream: BinaryIO) -> Iterator[bytes]:
    """The stream in pieces; what PowerShell redirects is UTF-16 and is turned into UTF-8."""
    first = stream.read(CHUNK)
    if first[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        while first:
            yield first
            first = stream.read(CHUNK)
        return
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    while first:
        yield decoder.decode(first).encode("utf-8", errors="replace")
        first = stream.read(CHUNK)


class Excerpt(NamedTuple):
    text: str           # a small text whole; of a large one, what stands around its first message
    whole: bool
    counts: dict[bytes, int]  # how often each of the counted words stands in all of it


def excerpt(stream: BinaryIO, is_message: Callable[[str], bool], counted: Iterable[bytes] = ()) -> Excerpt:
    """Holds a few MiB at most, however large the stream."""
    pieces, held = utf8(stream), b""
    for piece in pieces:
        held += piece
        if len(held) > WHOLE:
            break
    else:
        low = held.lower()
        return Excerpt(decoded(held), True, {word: low.count(word) for word in counted})
    search = Search(is_message, counted)
    search.feed(held)
    for piece in pieces:
        search.feed(piece)
    search.end()
    return Excerpt(search.found or decoded(held[:WHOLE]), False, search.counts)


class Search:
    """Goes through a stream once: keeps the surroundings of the first message, and counts words to the end."""

    def __init__(self, is_message: Callable[[str], bool], counted: Iterable[bytes]) -> None:
        self.found = ""
        self.counts = dict.fromkeys(counted, 0)
        self._is_message = is_message
        self._misses = dict.fromkeys(HINTS, 0)
        self._held = b""
        self._looked = 0  # how much of `_held` was searched for hints
        self._tail = b""  # the last bytes counted, for a word that the end of a piece cuts

    def feed(self, piece: bytes) -> None:
        self._count(piece.lower())
        if not self.found:
            self._held += piece
            self._look(len(self._held) - AFTER)  # a message that begins later may go on in the next piece
            keep = max(self._looked - BEFORE, 0)
            self._held, self._looked = self._held[keep:], self._looked - keep

    def end(self) -> None:
        if not self.found:
            self._misses = dict.fromkeys(HINTS, 0)
            self._look(len(self._held))

    def _count(self, low: bytes) -> None:
        for word in self.counts:
            begun = self._tail[-(len(word) - 1):]
            self.counts[word] += (begun + low[:len(word) - 1]).count(word) + low.count(word)
        self._tail = (self._tail + low)[-64:]

    def _look(self, end: int) -> None:
        """Tries every hint before `end`. One that has missed often is a word of this log, and is passed over."""
        low = self._held.lower()
        hints = {hint: low.find(hint, self._looked) for hint, misses in self._misses.items() if misses < MOST_MISSES}
        hints = {hint: place for hint, place in hints.items() if 0 <= place < end}
        while hints:
            hint, at = min(hints.items(), key=lambda each: each[1])
            if self._is_message(decoded(self._held[max(at - NEAR, 0):at + 5 * NEAR])):
                self.found = decoded(self._held[max(at - BEFORE, 0):at + AFTER])
                return
            self._misses[hint] += 1
            self._looked = at + 4 * NEAR
            hints = {each: later for each, place in hints.items() if self._misses[each] < MOST_MISSES
                     and 0 <= (later := place if place >= self._looked else low.find(each, self._looked)) < end}
        self._looked = max(self._looked, end)


def decoded(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
