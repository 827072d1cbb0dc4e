"""Tokens → shards in a dataset's folder, and the saved state from which a stopped `prepare` resumes.

Every file is written under a temporary name, synced and renamed, so a stop at any moment corrupts nothing. The saved
state (progress.json and carry-N.bin) holds the tokens that do not fill a shard yet and the next document to read. The
tokens depend on nothing else, so the result is the same to the byte however often `prepare` was stopped.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError, SystemFault, UsageError
from ..core.files import MAX_JSON_BYTES, open_own, read_limited, replace_file, seal_json, try_lock, unseal_json
from .shards import (
    HEADER_BYTES,
    MANIFEST_NAME,
    PROGRESS_NAME,
    SPLITS,
    Manifest,
    ShardEntry,
    ShardHeader,
    pack,
    read_header,
    shard_entry,
)
from .sources import HubMark

Tokens = NDArray[np.uint16]
DTYPE = "uint16"   # both tokenizers of `prepare` have fewer than 65,536 tokens
_SCHEMA = 1
_LOCK = ".prepare.lock"
_WRITTEN = re.compile(r"(?:\.tmp-)?(?:(?:train|val)-\d{5,}\.shard|carry-\d+\.bin|progress\.json|manifest\.json)")


# ---- the folder

def check_not_nanogpt(folder: Path) -> None:
    """UsageError if the folder holds nanoGPT's files: `prepare` neither replaces nor hides them."""
    for name in ("train.bin", "val.bin"):
        if (folder / name).exists():
            raise UsageError(f"{folder} already holds a dataset in nanoGPT's format ({name}), and fitgpt replaces "
                             "only datasets that it wrote.", "Give the new dataset another --name.")


def create_folder(folder: Path) -> list[Path]:
    """Creates the folder and its parents. Returns those that were missing, the innermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return missing
    except OSError as error:
        raise SystemFault(f"The folder {folder} cannot be created: {error.strerror}.",
                          "Choose another with --out=FOLDER or --name=NAME.") from error


def remove_created(folders: list[Path]) -> None:
    """Removes the folders that `create_folder` returned, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder against a second `prepare`. The system releases the lock however the process ends."""
    path = folder / _LOCK
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise SystemFault(f"The folder {folder} cannot be written: {error.strerror}.",
                          "Make it writable for this user, or choose another with --out=FOLDER.") from error
    try:
        try:
            may_write = try_lock(descriptor)
        except OSError:
            may_write = True  # a network disk without locks
        if not may_write:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
            raise SystemFault(f"Another `fitgpt prepare` (process {holder or 'unknown'}) is writing to {folder}.",
                              "Wait until it is done, or give this one another --name.")
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def remove_written(folder: Path, finished: Manifest | None = None) -> None:
    """Deletes every file that `prepare` writes, except those of a finished dataset: its manifest and shards."""
    kept = {MANIFEST_NAME, *(shard.file for shards in finished.shards.values() for shard in shards)} if finished else ()
    for path in folder.iterdir():
        if _WRITTEN.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Writes the file atomically: after a failure the previous content is still there."""
    try:
        replace_file(path, path.with_name(f".tmp-{path.name}"), *parts)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise SystemFault(
            f"Cannot write {path}: {error.strerror or error}.",
            ("Free some space there" if full else "Make the folder writable") + " and run the same command again: "
            "it resumes where it stopped. Or choose another folder with --out=FOLDER.") from error


# ---- shards

class SplitWriter:
    """Writes the tokens of one split, in order, to shards of exactly `shard_tokens`; the last one holds the rest."""

    def __init__(self, folder: Path, split: str, tokenizer: str, vocab_size: int, shard_tokens: int) -> None:
        self._folder, self._split = folder, split
        self._tokenizer, self._vocab_size, self._shard_tokens = tokenizer, vocab_size, shard_tokens
        self.shards: list[ShardEntry] = []
        self._pending: list[Tokens] = []
        self._pending_tokens = 0
        self._written_tokens = 0

    @property
    def tokens(self) -> int:
        return self._written_tokens + self._pending_tokens

    @property
    def pending(self) -> Tokens:
        """The tokens that are in no shard yet."""
        if len(self._pending) != 1:
            self._pending = [np.concatenate([np.empty(0, np.uint16), *self._pending])]
        return self._pending[0]

    def add(self, tokens: Tokens) -> None:
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= self._shard_tokens:
            self._write_full_shards()

    def restore(self, shards: list[ShardEntry], pending: Tokens) -> None:
        """Continues after shards that an earlier process wrote."""
        self.shards = list(shards)
        self._written_tokens = sum(shard.tokens for shard in shards)
        self._set_pending(pending)

    def finish(self) -> None:
        """Writes the pending tokens to a last, shorter shard."""
        self._write_full_shards()
        if self._pending_tokens:
            self._write(self.pending)
            self._set_pending(np.empty(0, np.uint16))

    def take_tail(self, tokens: int) -> Tokens:
        """Removes at least the last `tokens` tokens from the split and returns them."""
        while self._pending_tokens < tokens and self.shards:
            entry = self.shards.pop()
            self._written_tokens -= entry.tokens
            written = np.fromfile(self._folder / entry.file, "<u2", offset=HEADER_BYTES)
            self._set_pending(np.concatenate([written, self.pending]))
        tail = self.pending
        self._set_pending(np.empty(0, np.uint16))
        return tail

    def _write_full_shards(self) -> None:
        pending = self.pending
        while len(pending) >= self._shard_tokens:
            self._write(pending[:self._shard_tokens])
            pending = pending[self._shard_tokens:].copy()  # a copy, so that the written tokens are freed
            self._set_pending(pending)

    def _set_pending(self, pending: Tokens) -> None:
        self._pending, self._pending_tokens = [pending], len(pending)

    def _write(self, tokens: Tokens) -> None:
        payload = np.ascontiguousarray(tokens, dtype="<u2").view(np.uint8).data
        digest, largest = hashlib.sha256(payload).hexdigest(), int(tokens.max())
        file = f"{self._split}-{len(self.shards):05d}.shard"
        header = ShardHeader(DTYPE, len(tokens), self._vocab_size, largest, self._tokenizer, digest)
        write_file(self._folder / file, pack(header), payload)
        self.shards.append(ShardEntry(file, len(tokens), digest, largest))
        self._written_tokens += len(tokens)


# ---- the saved state

@dataclass
class ResumeState:
    """What progress.json holds under "progress". `document` and `part` are the next to be read."""

    settings: dict[str, object]
    newest_ns: int                   # modification time of the newest input file: changed input cannot be resumed
    document: int = 0
    part: int = 0
    in_val: bool = False             # the split of the document that `part` belongs to
    text_bytes: int = 0
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    counts: dict[str, int] = field(default_factory=dict)
    hub_marks: list[HubMark] = field(default_factory=list)


def save_state(folder: Path, state: ResumeState, writers: dict[str, SplitWriter]) -> None:
    """Saves where `prepare` stands: the state and the pending tokens of both splits."""
    old = [path for path in folder.glob("carry-*.bin") if path.stem.split("-")[1].isdigit()]
    number = 1 + max((int(path.stem.split("-")[1]) for path in old), default=0)
    carry = folder / f"carry-{number}.bin"
    parts = {split: writers[split].pending.astype("<u2").tobytes() for split in SPLITS}
    write_file(carry, *parts.values())
    document = {
        "schema": _SCHEMA,
        "progress": asdict(state),
        "shards": {split: [asdict(shard) for shard in writers[split].shards] for split in SPLITS},
        "carry": carry.name,
        "carry_bytes": {split: len(part) for split, part in parts.items()},
        "carry_sha256": hashlib.sha256(b"".join(parts.values())).hexdigest(),
    }
    write_file(folder / PROGRESS_NAME, seal_json(document).encode())
    for path in old:
        path.unlink(missing_ok=True)


def load_state(folder: Path, writers: dict[str, SplitWriter]) -> ResumeState | None:
    """The saved state, restored into the writers too; None if it is missing or damaged."""
    path = folder / PROGRESS_NAME
    try:
        document = unseal_json(read_limited(path, MAX_JSON_BYTES))
        if document["schema"] != _SCHEMA:
            return None
        shards = {split: [shard_entry(row, path) for row in document["shards"][split]] for split in SPLITS}
        for entry in (entry for entries in shards.values() for entry in entries):
            header, _ = read_header(folder / entry.file)
            if (header.tokens, header.sha256) != (entry.tokens, entry.sha256):
                return None
        train_bytes, val_bytes = (document["carry_bytes"][split] for split in SPLITS)
        carry = read_limited(folder / Path(document["carry"]).name, train_bytes + val_bytes)
        if hashlib.sha256(carry).hexdigest() != document["carry_sha256"] or len(carry) != train_bytes + val_bytes:
            return None
        state = ResumeState(**document["progress"])
    except (OSError, ValueError, KeyError, TypeError, DataError, RecursionError):
        return None
    pending = np.frombuffer(carry, "<u2").astype(np.uint16)
    writers["train"].restore(shards["train"], pending[:train_bytes // 2])
    writers["val"].restore(shards["val"], pending[train_bytes // 2:])
    return state
