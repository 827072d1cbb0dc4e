"""A dataset's name → its splits; sample numbers → the tokens they read.

A split is a sequence of shards. Each shard is divided into windows of `block` tokens that do not overlap. A window
is read with the token that follows it, so that inputs and targets come from the same block + 1 tokens. The tokens
that do not fill a window are the slack of a shard; in each epoch its windows start at another offset within the
slack, so that their edges move.

Files are read with read(), not mmap: if a shard is truncated during training, a read returns fewer bytes and can be
reported, while access to a memory map would kill the process (SIGBUS). They are opened for every batch, so that a
dataset of thousands of shards needs few file descriptors; each time it is checked that the file is still the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError, SystemFault
from ..core.files import home, open_regular, read_json_object, write_atomically
from ..core.units import GiB, MiB, show_bytes
from .sample_order import I64, hash_of, window_of
from .shards import PREPARE_AGAIN, SPLITS, DataSummary, ShardFile, block_too_long, list_shards

Notify = Callable[[str], None]  # shows a sentence to the user
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_DO_NOT_CHANGE = ("Do not change the data while a run uses it: restore the shard, or prepare the dataset again "
                  "(`fitgpt prepare … --overwrite`). Then resume from the last checkpoint.")

_SCAN_BYTES = 8 * MiB            # per read
_LARGE_BYTES = 1 * GiB           # takes longer than a second to verify
_SHOWN_EVERY_S = 5.0
_NAMED = 5                       # damaged shards in an error
_WIDE_ZEROS = 0.99               # share of zeros and ones in the upper halves of 4-byte tokens below 131,072
_FEW_TOKENS = 64                 # too few to tell
_PROBE_TOKENS = 64               # long enough that passages do not repeat by chance
_PROBES_PER_END = 4
_PROBE_DISTINCT = 8              # a run of spaces or zeros is not evidence of overlap
_SEARCHED_BYTES = 8 * MiB        # at each end of train


@dataclass(frozen=True)
class Dataset:
    """An open dataset."""

    summary: DataSummary
    splits: dict[str, Split]
    notes: tuple[str, ...]   # warnings for the user, each a sentence

    def split(self, name: str) -> Split:
        return self.splits[name]

    def verify(self, vocab_size: int, notify: Notify = lambda sentence: None, splits: Sequence[str] = SPLITS, *,
               reading: Callable[[], None] = lambda: None, fresh: bool = False) -> None:
        """Raises DataError if a shard does not match its checksum, or if a token is ≥ vocab_size. See ShardScans."""
        scans = ShardScans(self.summary.path, notify, reading, fresh=fresh)
        for name in splits:
            self.splits[name].check_tokens(vocab_size, scans)


def open_dataset(dataset: str) -> Dataset:
    """A name under data/ or a path, prepared by fitgpt or by nanoGPT → the open dataset."""
    summary, shards = list_shards(dataset)
    splits = {name: Split(name, files) for name, files in shards.items()}
    return Dataset(summary, splits, _overlap_notes(shards["train"], shards["val"]))


class Split:
    """The windows of one split. Several threads may read at once."""

    def __init__(self, name: str, shards: Sequence[ShardFile]) -> None:
        self.name = name
        self.shards = tuple(shards)
        self._lengths = np.array([shard.tokens for shard in shards], dtype=np.int64)
        self.tokens = int(self._lengths.sum())
        self._dtype = _NUMPY_DTYPES[shards[0].dtype]
        self._token_limit = 0  # set by check_tokens: every token is below it

    def windows(self, block: int) -> int:
        """The number of windows of `block` tokens in an epoch; the same in every epoch."""
        return int(self._window_ends(block)[-1])

    def read(self, samples: I64, block: int, seed: int, stream: str = "train") -> I64:
        """Sample numbers, counted through the whole run → their tokens, [n, block + 1]."""
        ends = self._window_ends(block)
        windows = int(ends[-1])
        shard, index = self._locate(window_of(samples, windows, seed, stream), ends)
        epoch = (samples // windows).astype(np.uint64)
        slack = ((self._lengths[shard] - 1) % block).astype(np.uint64)
        shift = hash_of(seed, stream + " shift", epoch, shard.astype(np.uint64)) % (slack + np.uint64(1))
        return self._gather(shard, index * block + shift.astype(np.int64), block + 1)

    def read_fixed(self, indices: I64, block: int, seed: int) -> I64:
        """Numbers of evaluation windows, 0 to windows(block) - 1 → their tokens, [n, block + 1].

        Every call returns the same tokens for a number. All windows together cover the split once.
        """
        ends = self._window_ends(block)
        shard, index = self._locate(window_of(indices, int(ends[-1]), seed, "eval"), ends)
        return self._gather(shard, index * block, block + 1)

    def recheck(self) -> None:
        """Raises DataError if a shard changed since the dataset was opened. Fast enough for every epoch."""
        for shard in self.shards:
            with _opened(shard):
                pass

    def check_tokens(self, vocab_size: int, scans: ShardScans) -> None:
        """Raises DataError if a shard is damaged or a token ≥ vocab_size; from then on every read that returns one
        raises too.

        Call this before any work on a GPU: there an index out of range is a device-side assert, after which the
        process cannot use CUDA any more.
        """
        for shard, largest in zip(self.shards, scans.largest_tokens(self.shards), strict=True):
            if largest >= vocab_size:
                raise DataError(
                    f"{shard.path} holds the token {largest:,}, and the model's vocabulary is {vocab_size:,}: "
                    f"tokens must be from 0 to {vocab_size - 1:,}.",
                    f"Use --vocab_size={largest + 1} or more, or prepare the data with the tokenizer of the model.")
        self._token_limit = vocab_size

    def _window_ends(self, block: int) -> I64:
        """For each shard, the number of windows up to its end (cumulative sum)."""
        ends: I64 = np.cumsum((self._lengths - 1) // block)
        if not ends[-1]:
            longest = int(self._lengths.max())
            raise DataError(
                block_too_long(block, self.name, longest, len(self.shards)),
                (f"--block_size={longest - 1}" if longest > 1 else "Prepare more text") if self.name == "train"
                else f"Prepare the data again with a larger --val_fraction, or --eval_block_size={max(longest - 1, 1)}")
        return ends

    def _locate(self, windows: I64, ends: I64) -> tuple[I64, I64]:
        """The shard of each window, and the window's number within that shard."""
        shard = np.searchsorted(ends, windows, side="right").astype(np.int64)
        return shard, windows - np.append(0, ends)[shard]

    def _gather(self, shards: I64, starts: I64, length: int) -> I64:
        """`length` tokens from each shard and start, [n, length]. A shard is opened once, whatever its rows."""
        rows: NDArray[np.unsignedinteger] = np.empty((len(starts), length), dtype=self._dtype)
        for number in np.unique(shards).tolist():
            shard = self.shards[number]
            with _opened(shard) as file:
                for index in np.flatnonzero(shards == number).tolist():
                    row = rows[index].view(np.uint8).data
                    file.seek(shard.start + int(starts[index]) * self._dtype.itemsize)
                    got = 0
                    while got < len(row) and (more := file.readinto(row[got:])):
                        got += more
                    if got < len(row):
                        raise DataError(
                            f"{shard.path} was truncated while it was read: {len(row):,} bytes were requested at "
                            f"token {int(starts[index]):,}, and only {got:,} could be read.", _DO_NOT_CHANGE)
        if self._token_limit and rows.size and int(rows.max()) >= self._token_limit:
            row_number = int(np.argmax(rows.max(axis=1)))
            raise DataError(
                f"{self.shards[int(shards[row_number])].path} now holds the token {int(rows.max()):,}, but all of its "
                f"tokens were below {self._token_limit:,}: it was damaged or changed.", _DO_NOT_CHANGE)
        return rows.astype(np.int64)


@contextmanager
def _opened(shard: ShardFile) -> Iterator[FileIO]:
    """The file of a shard; DataError if it cannot be read, or if it is not as it was when the dataset was opened."""
    try:
        with open_regular(shard.path) as file:
            status = os.fstat(file.fileno())
            if status.st_size < shard.size:
                raise DataError(f"{shard.path} was truncated: {shard.size:,} bytes when it was opened, "
                                f"{status.st_size:,} now.", _DO_NOT_CHANGE)
            if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
                raise DataError(f"{shard.path} was changed after it was opened: its size or modification time differs "
                                f"({shard.size:,} bytes then, {status.st_size:,} now).", _DO_NOT_CHANGE)
            yield cast(FileIO, file.raw)  # windows are read one by one: a buffer would read more than they need
    except OSError as error:
        raise DataError(f"{shard.path} is missing or can no longer be read: {error.strerror or error}.",
                        _DO_NOT_CHANGE) from error


# ---- the content of shards, read once

class ShardScans:
    """The largest token of each shard of a dataset. A shard's file is read once: it must match its checksum, and the
    result is remembered in the user's cache until the file's size, modification time or inode changes.

    `fresh`: reads every file, whatever is remembered. `notify`: shows a sentence to the user, for large datasets.
    `reading`: called every few MiB; it may raise an error to stop.
    """

    def __init__(self, folder: str, notify: Notify, reading: Callable[[], None] = lambda: None, *,
                 fresh: bool = False) -> None:
        self._notify, self._reading = notify, reading
        root = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache")
        name = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
        self._cache = root / "fitgpt" / "scanned" / f"{name}.json"
        self._known = {} if fresh else read_json_object(self._cache)

    def largest_tokens(self, shards: Sequence[ShardFile]) -> list[int]:
        """Of each shard; DataError that names all that do not match their checksum, or have none and look like uint32.
        """
        new = [shard for shard in shards if self._remembered(shard) is None]
        nbytes, done, shown = sum(shard.size for shard in new), 0, time.monotonic()
        errors: list[DataError] = []

        def was_read(more: int) -> None:
            nonlocal done, shown
            self._reading()
            done += more
            if time.monotonic() - shown > _SHOWN_EVERY_S:
                self._notify(f"{done / nbytes:4.0%} verified, {show_bytes(done)} of {show_bytes(nbytes)}")
                shown = time.monotonic()

        if nbytes > _LARGE_BYTES:
            self._notify(f"Verifying {show_bytes(nbytes)} of {os.path.dirname(new[0].path)}. This is done once, and "
                         "again for files that change.")
        try:
            for shard in new:
                try:
                    self._known[os.path.basename(shard.path)] = [*_stamp(shard), _scan(shard, was_read)]
                except DataError as error:
                    errors.append(error)
        finally:
            if new:
                with suppress(OSError, SystemFault):  # a cache that cannot be written costs another scan next time
                    self._cache.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(self._cache, json.dumps(self._known))
        if errors:
            hidden = len(errors) - _NAMED
            raise DataError(" ".join([*(error.what for error in errors[:_NAMED]),
                                      *([f"So are {hidden:,} more."] if hidden > 0 else [])]), errors[0].fix)
        return [self._remembered(shard) or 0 for shard in shards]

    def _remembered(self, shard: ShardFile) -> int | None:
        match self._known.get(os.path.basename(shard.path)):
            case [*stamp, int(largest)] if stamp == _stamp(shard) and largest >= 0:
                return largest
        return None


def _stamp(shard: ShardFile) -> list[Any]:
    return [shard.size, shard.mtime_ns, shard.inode, shard.sha256]


def _scan(shard: ShardFile, was_read: Callable[[int], None]) -> int:
    """The largest token of a file, all of which is read. `was_read` is called with the bytes of each part."""
    dtype = _NUMPY_DTYPES[shard.dtype]
    digest, largest, small = hashlib.sha256(), 0, np.zeros(2, np.int64)  # small: tokens below 2, at even and odd places
    with _opened(shard) as file:
        file.seek(shard.start)
        while len(tokens := np.fromfile(file, dtype, _SCAN_BYTES // dtype.itemsize)):
            was_read(tokens.nbytes)
            largest = max(largest, int(tokens.max()))
            if shard.sha256:
                digest.update(tokens.data)
            else:
                small += [np.count_nonzero(tokens[place::2] < 2) for place in (0, 1)]
    if shard.sha256 and digest.hexdigest() != shard.sha256:
        raise DataError(f"The shard {shard.path} is damaged: its tokens do not match their checksum.", PREPARE_AGAIN)
    even, odd = (2 * small / shard.tokens).tolist()
    if odd >= _WIDE_ZEROS > even and shard.tokens % 2 == 0 and shard.tokens >= _FEW_TOKENS:
        narrow = f"import numpy as np; f={shard.path!r}; np.fromfile(f, 'u4').astype('u2').tofile(f)"
        raise DataError(
            f"{shard.path} looks like tokens of 4 or 8 bytes: {odd:.0%} of every second 2 bytes are 0 or 1. Files "
            "without a header hold uint16 tokens.", f"Write it as uint16: python -c {shlex.quote(narrow)}")
    return largest


# ---- overlap of val and train

def _overlap_notes(train: Sequence[ShardFile], val: Sequence[ShardFile]) -> tuple[str, ...]:
    """A sentence if val and train are one file, or if most passages sampled from val occur at either end of train."""
    if os.path.samefile(train[0].path, val[0].path):
        return (f"val and train are the same file ({val[0].path}): the val loss will not measure generalisation.",)
    probes = []
    for shard, end in ((val[0], 0), (val[-1], -1)):
        # Half of what is searched in train, so that a val cut from an end of train is found too.
        tokens = _read_end(shard, end, _SEARCHED_BYTES // 2)
        for start in np.linspace(0, len(tokens) - _PROBE_TOKENS, _PROBES_PER_END).astype(int):
            probe = tokens[start:start + _PROBE_TOKENS]
            if start >= 0 and len(np.unique(probe)) >= _PROBE_DISTINCT:
                probes.append(probe.tobytes())
    searched = [_read_end(train[0], 0, _SEARCHED_BYTES).tobytes(), _read_end(train[-1], -1, _SEARCHED_BYTES).tobytes()]
    found = sum(any(probe in text for text in searched) for probe in probes)
    if not probes or 2 * found < len(probes):
        return ()
    return (f"val overlaps train: {found} of {len(probes)} passages sampled from val occur verbatim in train, "
            "so the val loss is too low.",)


def _read_end(shard: ShardFile, end: int, nbytes: int) -> NDArray[np.unsignedinteger]:
    """Up to `nbytes` of tokens from the start (0) or the end (-1) of a shard."""
    dtype = _NUMPY_DTYPES[shard.dtype]
    tokens = min(shard.tokens, nbytes // dtype.itemsize)
    first = 0 if end == 0 else shard.tokens - tokens
    return np.fromfile(shard.path, dtype, count=tokens, offset=shard.start + first * dtype.itemsize)
