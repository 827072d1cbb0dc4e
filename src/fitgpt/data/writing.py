"""How do streams of tokens become shards, so that a stop at any moment loses little and corrupts nothing?

Shards, and the record of progress, are written beside their place, synced and renamed. The record holds the
tokens that do not fill a shard yet and the place in the source from which to go on; since the streams of
tokens depend on nothing else, the result is the same to the byte however often the work was stopped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError, SystemFault
from ..core.files import replace_file
from . import manifest
from .header import HEADER_BYTES, PROGRESS_NAME, ShardHeader, pack, read_header
from .manifest import SPLITS, ShardEntry

Tokens = NDArray[np.uint16]
DTYPE = "uint16"   # both tokenizers have fewer than 65,536 tokens
_SCHEMA = 1
_OURS = re.compile(r"(?:\.tmp-)?(?:(?:train|val)-\d{5,}\.shard|carry-\d+\.bin|progress\.json|manifest\.json)")
_LEFTOVER = re.compile(r"\.tmp-.*|(?:train|val)-\d{5,}\.shard|carry-\d+\.bin|progress\.json")


def put(path: Path, *parts: bytes | memoryview) -> None:
    """The whole file, or the one that was there before."""
    try:
        replace_file(path, path.with_name(f".tmp-{path.name}"), *parts)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise SystemFault(
            f"Cannot write {path}: {error.strerror or error}.",
            ("Free some space there" if full else "Make the folder writable") + " and run the same command again, "
            "which goes on where it stopped; or choose another place with --out=FOLDER.") from error


class SplitWriter:
    """The tokens of one split, in the order they come, to shards of exactly `shard_tokens` (the last: the rest)."""

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
        """Tokens that are in no shard yet."""
        if len(self._pending) != 1:
            self._pending = [np.concatenate([np.empty(0, np.uint16), *self._pending])]
        return self._pending[0]

    def add(self, tokens: Tokens) -> None:
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= self._shard_tokens:
            self._write_full_shards()

    def restore(self, shards: list[ShardEntry], pending: Tokens) -> None:
        self.shards = list(shards)
        self._written_tokens = sum(shard.tokens for shard in shards)
        self._keep(pending)

    def finish(self) -> None:
        self._write_full_shards()
        if self._pending_tokens:
            self._write(self.pending)
            self._keep(np.empty(0, np.uint16))

    def take_tail(self, tokens: int) -> Tokens:
        """Gives back at least the last `tokens` tokens, unwritten, and forgets them."""
        while self._pending_tokens < tokens and self.shards:
            entry = self.shards.pop()
            self._written_tokens -= entry.tokens
            written = np.fromfile(self._folder / entry.file, "<u2", offset=HEADER_BYTES)
            self._keep(np.concatenate([written, self.pending]))
        tail = self.pending
        self._keep(np.empty(0, np.uint16))
        return tail

    def _write_full_shards(self) -> None:
        pending = self.pending
        while len(pending) >= self._shard_tokens:
            self._write(pending[:self._shard_tokens])
            pending = pending[self._shard_tokens:].copy()  # lets go of what is written
            self._keep(pending)

    def _keep(self, pending: Tokens) -> None:
        self._pending, self._pending_tokens = [pending], len(pending)

    def _write(self, tokens: Tokens) -> None:
        payload = np.ascontiguousarray(tokens, dtype="<u2").view(np.uint8).data
        digest, largest = hashlib.sha256(payload).hexdigest(), int(tokens.max())
        file = f"{self._split}-{len(self.shards):05d}.shard"
        header = ShardHeader(DTYPE, len(tokens), self._vocab_size, largest, self._tokenizer, digest)
        put(self._folder / file, pack(header), payload)
        self.shards.append(ShardEntry(file, len(tokens), digest, largest))
        self._written_tokens += len(tokens)


# ---- the record of progress

@dataclass
class Progress:
    """Where the work stands. `document` and `part` are the next to be read."""

    settings: dict[str, object]
    newest_ns: int                   # the time of the newest input file: changed inputs cannot be gone on with
    document: int = 0
    part: int = 0
    in_val: bool = False             # the side of the document that `part` continues
    text_bytes: int = 0
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    counts: dict[str, int] = field(default_factory=dict)


def save_progress(folder: Path, progress: Progress, writers: dict[str, SplitWriter]) -> None:
    old = _carry_files(folder)
    number = 1 + max((int(path.stem.split("-")[1]) for path in old), default=0)
    carry = folder / f"carry-{number}.bin"
    parts = {split: writers[split].pending.astype("<u2").tobytes() for split in SPLITS}
    put(carry, *parts.values())
    document = {
        "schema": _SCHEMA,
        "progress": asdict(progress),
        "shards": {split: [asdict(shard) for shard in writers[split].shards] for split in SPLITS},
        "carry": carry.name,
        "carry_bytes": {split: len(part) for split, part in parts.items()},
        "carry_sha256": hashlib.sha256(b"".join(parts.values())).hexdigest(),
    }
    put(folder / PROGRESS_NAME, json.dumps(document).encode())
    for path in old:
        path.unlink(missing_ok=True)


def load_progress(folder: Path, writers: dict[str, SplitWriter]) -> Progress | None:
    """The last record, with the writers set to it; None if there is none, or none that can be trusted."""
    path = folder / PROGRESS_NAME
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != _SCHEMA:
            return None
        shards = {split: [manifest.shard_entry(row, path) for row in document["shards"][split]] for split in SPLITS}
        for entry in (entry for entries in shards.values() for entry in entries):
            header, _ = read_header(folder / entry.file)
            if (header.tokens, header.sha256) != (entry.tokens, entry.sha256):
                return None
        carry = (folder / Path(document["carry"]).name).read_bytes()
        train_bytes, val_bytes = (document["carry_bytes"][split] for split in SPLITS)
        if hashlib.sha256(carry).hexdigest() != document["carry_sha256"] or len(carry) != train_bytes + val_bytes:
            return None
        progress = Progress(**document["progress"])
    except (OSError, ValueError, KeyError, TypeError, DataError, RecursionError):
        return None
    pending = np.frombuffer(carry, "<u2").astype(np.uint16)
    writers["train"].restore(shards["train"], pending[:train_bytes // 2])
    writers["val"].restore(shards["val"], pending[train_bytes // 2:])
    return progress


def remove_ours(folder: Path) -> None:
    """Everything `prepare` writes, and nothing else."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()


def remove_leftovers(folder: Path, finished: manifest.Manifest) -> None:
    """What a finished dataset does not need: the record of progress, and shards it does not name."""
    kept = {shard.file for shards in finished.shards.values() for shard in shards}
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def _carry_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("carry-*.bin") if path.stem.split("-")[1].isdigit()]
