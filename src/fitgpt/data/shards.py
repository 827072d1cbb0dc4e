"""How does a number become a batch? Datasets open, windows counted, and read without a map that could fault.

A split is a row of shards. Each shard is divided into windows of `block` tokens that do not overlap; a window
is read with the one token that follows it, so that inputs and targets come from the same block + 1 tokens.
What does not fill a window at the end of a shard is slack, and in each epoch the windows of a shard start at
another offset within it, so that their edges move.

Files are read with plain reads and not mapped: where a shard is truncated during training, a read comes back
short and can be reported, while a map would kill the process (SIGBUS).
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from ..nouns import DataSummary
from .header import ShardFile, take_inventory, too_long
from .order import I64, hash_of, window_of
from .scan import NUMPY_DTYPES, max_token, overlap_notes

_OPEN_FILES = 32  # well under any limit of descriptors, whatever the number of shards
_CHANGED = ("Leave the data alone while a run uses it: bring the shard back, or prepare the dataset again "
            "(`fitgpt prepare … --overwrite`); the last checkpoint can be resumed.")


@dataclass(frozen=True)
class Dataset:
    summary: DataSummary
    splits: dict[str, Split]
    notes: tuple[str, ...]   # what a person should know about this data, each a sentence

    def split(self, name: str) -> Split:
        return self.splits[name]

    def close(self) -> None:
        for split in self.splits.values():
            split.close()


def open_dataset(dataset: str) -> Dataset:
    """`dataset` is a name under data/ or a path; prepared by fitgpt or by nanoGPT."""
    inventory = take_inventory(dataset)
    splits = {name: Split(name, shards) for name, shards in inventory.shards.items()}
    return Dataset(inventory.summary, splits, overlap_notes(inventory.shards["train"], inventory.shards["val"]))


class Split:
    """The windows of one split. Reading is safe from several threads at once."""

    def __init__(self, name: str, shards: Sequence[ShardFile]) -> None:
        self.name = name
        self.shards = tuple(shards)
        self._lengths = np.array([shard.tokens for shard in shards], dtype=np.int64)
        self.tokens = int(self._lengths.sum())
        self._dtype = NUMPY_DTYPES[shards[0].dtype]
        self._files = _OpenFiles(self.shards)
        self._ceiling = 1 + max((shard.max_token for shard in shards if shard.max_token is not None), default=-1)
        self._layout = lru_cache(maxsize=8)(self._lay_out)

    def windows(self, block: int) -> int:
        """How many windows of `block` tokens an epoch has; the same in every epoch."""
        return int(self._layout(block)[-1])

    def read(self, samples: I64, block: int, seed: int, stream: str = "train") -> I64:
        """[n, block + 1] tokens for samples numbered through the whole run."""
        samples = np.atleast_1d(samples)
        ends = self._layout(block)
        windows = int(ends[-1])
        shard, place = self._locate(window_of(samples, windows, seed, stream), ends)
        epoch = (samples // windows).astype(np.uint64)
        slack = ((self._lengths[shard] - 1) % block).astype(np.uint64)
        shift = hash_of(seed, stream + " shift", epoch, shard.astype(np.uint64)) % (slack + np.uint64(1))
        return self._gather(shard, place * block + shift.astype(np.int64), block + 1)

    def read_fixed(self, indices: I64, block: int, seed: int) -> I64:
        """[n, block + 1] tokens of evaluation windows 0 to windows(block) - 1, the same on every call: the first
        k of them are a prefix of the first k + 1, and all of them together are the whole split once."""
        indices = np.atleast_1d(indices)
        ends = self._layout(block)
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < int(ends[-1]):
            raise IndexError(f"evaluation windows go from 0 to {int(ends[-1]) - 1}")
        shard, place = self._locate(window_of(indices, int(ends[-1]), seed, "eval"), ends)
        return self._gather(shard, place * block, block + 1)

    def recheck(self) -> None:
        """Refuses to go on if any shard changed since it was opened. Cheap enough for every epoch."""
        for shard in self.shards:
            _check_unchanged(shard)

    def close(self) -> None:
        self._files.close()

    def limit_tokens(self, vocab_size: int, say: Callable[[str], None] | None = None) -> None:
        """Refuses a split that holds a token ≥ vocab_size, and from now on any read that returns one."""
        for shard in self.shards:
            largest = max_token(shard, say)
            if largest >= vocab_size:
                raise DataError(
                    f"{shard.path} holds the token {largest:,}, and the model's vocabulary is {vocab_size:,}: "
                    f"tokens must be from 0 to {vocab_size - 1:,}.",
                    f"A model with --vocab_size={largest + 1} or more, or prepare the data with the "
                    "tokenizer the model was made for.")
        self._ceiling = vocab_size

    def _lay_out(self, block: int) -> I64:
        """For each shard, the number of windows up to its end."""
        if block < 1:
            raise ValueError(f"a window has at least 1 token, not {block}")
        ends: I64 = np.cumsum((self._lengths - 1) // block)
        if not ends[-1]:
            longest = int(self._lengths.max())
            raise DataError(
                too_long(block, self.name, longest, len(self.shards)),
                (f"--block_size={longest - 1}" if longest > 1 else "Prepare more text") if self.name == "train"
                else f"Prepare the data again with a larger --val_fraction, or --eval_block_size={max(longest - 1, 1)}")
        return ends

    def _locate(self, windows: I64, ends: I64) -> tuple[I64, I64]:
        """The shard of each window, and its place among the windows of that shard."""
        shard = np.searchsorted(ends, windows, side="right").astype(np.int64)
        before = np.where(shard > 0, ends[np.maximum(shard - 1, 0)], 0)
        return shard, windows - before

    def _gather(self, shards: I64, starts: I64, length: int) -> I64:
        rows: NDArray[np.unsignedinteger] = np.empty((len(starts), length), dtype=self._dtype)
        for row, number, start in zip(rows, shards.tolist(), starts.tolist(), strict=True):
            shard = self.shards[number]
            got = self._files.read_into(number, shard.start + start * self._dtype.itemsize, row)
            if got != row.nbytes:
                _check_unchanged(shard)
                raise DataError(f"{shard.path} was truncated during training: {row.nbytes:,} bytes were asked for at "
                                f"{start:,} tokens from its start, and only {got:,} came.", _CHANGED)
        if self._ceiling and rows.size and int(rows.max()) >= self._ceiling:
            place = int(np.argmax(rows.max(axis=1)))
            raise DataError(
                f"{self.shards[int(shards[place])].path} now holds the token {int(rows.max()):,}, though all of its "
                f"tokens were below {self._ceiling:,}: it was damaged or changed.", _CHANGED)
        return rows.astype(np.int64)


def check_tokens(split: Split, vocab_size: int, say: Callable[[str], None] | None = None) -> None:
    """To be called before any work on a GPU, where a token beyond the vocabulary is a fault that sticks."""
    split.limit_tokens(vocab_size, say)


def _check_unchanged(shard: ShardFile) -> None:
    try:
        status = os.stat(shard.path)
    except OSError as error:
        raise DataError(f"{shard.path} is gone or out of reach: {error.strerror}.", _CHANGED) from error
    if status.st_size < shard.size:
        raise DataError(f"{shard.path} was truncated: {shard.size:,} bytes when it was opened, "
                        f"{status.st_size:,} now.", _CHANGED)
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
        raise DataError(f"{shard.path} was changed since it was opened ({shard.size:,} bytes then, "
                        f"{status.st_size:,} now, another time of modification).", _CHANGED)


class _OpenFiles:
    """The few files read last stay open; one thread reads at a time, so that none is closed under another."""

    def __init__(self, shards: Sequence[ShardFile]) -> None:
        self._shards = shards
        self._files: OrderedDict[int, io.FileIO] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, number: int, offset: int, row: NDArray[np.unsignedinteger]) -> int:
        """The number of bytes read: fewer than asked for only at the end of the file."""
        target = row.view(np.uint8).data
        got = 0
        try:
            with self._lock:
                file = self._open(number)
                file.seek(offset)
                while got < len(target):
                    more = file.readinto(target[got:])
                    if not more:
                        break
                    got += more
        except OSError as error:
            path = self._shards[number].path
            raise DataError(f"{path} cannot be read any more: {error.strerror or error}.", _CHANGED) from error
        return got

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _open(self, number: int) -> io.FileIO:
        if number in self._files:
            self._files.move_to_end(number)
            return self._files[number]
        file = io.FileIO(self._shards[number].path, "rb")
        self._files[number] = file
        if len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return file
