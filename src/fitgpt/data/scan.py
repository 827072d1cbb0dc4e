"""What only reading the tokens can tell: the largest token of a headerless file, and whether val repeats train."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from ..core.units import GiB, MiB, show_bytes
from .header import ITEM_BYTES, ShardFile

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_CHUNK_BYTES = 8 * MiB
_WORTH_SAYING_BYTES = 1 * GiB   # a scan that may be felt
_PROBE_TOKENS = 64              # long enough that chance and stock phrases do not repeat it
_PROBES_PER_END = 4
_PROBE_DISTINCT = 8             # a run of spaces or zeros proves nothing
_PROBED_BYTES = 8 * MiB         # of train, from each end, that are searched


def max_token(shard: ShardFile, say: Callable[[str], None] | None = None) -> int:
    """From the header, else from a cache beside the user's other caches, else from a scan of the file."""
    if shard.max_token is not None:
        return shard.max_token
    note = _cache_file(shard)
    try:
        remembered = json.loads(note.read_text())
        if isinstance(remembered, int) and remembered >= 0:
            return remembered
    except (OSError, ValueError):
        pass
    if say and shard.size >= _WORTH_SAYING_BYTES:
        say(f"Scanning {shard.path} ({show_bytes(shard.size)}) once for its largest token.")
    largest = _scan(shard)
    _remember(note, largest)
    return largest


def _scan(shard: ShardFile) -> int:
    largest = 0
    try:
        with open(shard.path, "rb", buffering=0) as file:
            file.seek(shard.start)
            while chunk := file.read(_CHUNK_BYTES):
                whole = len(chunk) - len(chunk) % ITEM_BYTES[shard.dtype]
                if whole != len(chunk):
                    file.seek(whole - len(chunk), os.SEEK_CUR)
                    if not whole:
                        break
                largest = max(largest, int(np.frombuffer(chunk[:whole], NUMPY_DTYPES[shard.dtype]).max()))
    except OSError as error:
        raise DataError(f"{shard.path} cannot be read: {error.strerror}.",
                        "Check the disk it is on, then run the command again.") from error
    return largest


def _cache_file(shard: ShardFile) -> Path:
    key = f"{os.path.realpath(shard.path)}\n{shard.size}\n{shard.mtime_ns}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return root / "fitgpt" / "max-token" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.json"


def _remember(note: Path, largest: int) -> None:
    """A cache that cannot be written costs a scan next time and nothing else."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=note.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{largest}\n")
        os.replace(temporary, note)
    except OSError:
        pass


def overlap_notes(train: Sequence[ShardFile], val: Sequence[ShardFile]) -> tuple[str, ...]:
    """A sentence if val is train, or if most of a few passages of val stand at either end of train word for word."""
    if any(os.path.samefile(one.path, other.path) for one in train[:1] for other in val[:1]):
        return (f"val and train are the same file ({val[0].path}): the val loss will say nothing about new text.",)
    probes = [probe for probe in _probes(val) if len(np.unique(probe)) >= _PROBE_DISTINCT]
    searched = [_read(train[0], 0, _PROBED_BYTES).tobytes(), _read(train[-1], -1, _PROBED_BYTES).tobytes()]
    found = sum(any(probe.tobytes() in text for text in searched) for probe in probes)
    if not probes or 2 * found < len(probes):
        return ()
    return (f"val overlaps train: {found} of {len(probes)} passages taken from val stand word for word in train, "
            "so the val loss flatters the model.",)


def _probes(val: Sequence[ShardFile]) -> list[NDArray[np.unsignedinteger]]:
    probes = []
    for shard, end in ((val[0], 0), (val[-1], -1)):
        # Half of what is searched in train: a val that is a piece cut from an end of train shows too.
        tokens = _read(shard, end, _PROBED_BYTES // 2)
        for place in np.linspace(0, len(tokens) - _PROBE_TOKENS, _PROBES_PER_END).astype(int):
            if place >= 0:
                probes.append(tokens[place:place + _PROBE_TOKENS])
    return probes


def _read(shard: ShardFile, end: int, nbytes: int) -> NDArray[np.unsignedinteger]:
    """Up to `nbytes` of tokens from the first (0) or the last (-1) end of a shard."""
    dtype = NUMPY_DTYPES[shard.dtype]
    tokens = min(shard.tokens, nbytes // dtype.itemsize)
    first = 0 if end == 0 else shard.tokens - tokens
    return np.fromfile(shard.path, dtype, count=tokens, offset=shard.start + first * dtype.itemsize)
