"""How do several processes tokenize at once, and the result still comes in the order of the text?"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import SystemFault
from ..core.units import MiB
from .text import Piece, Pieces
from .tokenizers import Tokenizer, get

Tokens = NDArray[np.uint16]
_BATCH_BYTES = 1 * MiB
_BATCH_PIECES = 512
_AHEAD = 3            # batches in flight for each process: none waits, and memory stays bounded

_tokenizer: Tokenizer | None = None  # of a worker process, set up once


def cores() -> int:
    """The cores this process may use: its affinity and its control group's quota, where they can be seen."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:
        allowed = os.cpu_count() or 1
    return max(1, min([allowed, *_cgroup_quota()]))


def _cgroup_quota() -> list[int]:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text()
            period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return []
    try:
        return [max(1, round(int(quota) / int(period)))] if int(quota) > 0 else []
    except (ValueError, ZeroDivisionError):  # "max": no quota
        return []


Encoded = Generator[tuple[Piece, Tokens], None, None]


def encode_in_order(pieces: Pieces, tokenizer: Tokenizer, processes: int) -> Encoded:
    """Each piece with its tokens. Bytes need no tokenizing, so sending them to another process would only cost."""
    if processes == 1 or tokenizer.name == "bytes":
        for piece in pieces:
            yield piece, tokenizer.encode_utf8(piece.data)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe beside the threads of pyarrow and rich
    executor = ProcessPoolExecutor(processes, context, _set_up, (tokenizer.name,))
    waiting: deque[tuple[list[Piece], Future[tuple[list[int], Tokens]]]] = deque()
    try:
        for batch in _batches(pieces):
            with _signals_kept_from_children():
                waiting.append((batch, executor.submit(_encode, [piece.data for piece in batch])))
            if len(waiting) >= _AHEAD * processes:
                yield from _collect(*waiting.popleft())
        while waiting:
            yield from _collect(*waiting.popleft())
    except BrokenProcessPool as error:
        raise SystemFault("A tokenizing process died, most likely killed by the system for want of memory.",
                          "Run the same command again with --processes=1; what is done is kept.") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _batches(pieces: Pieces) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        batch.append(piece)
        nbytes += len(piece.data)
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _collect(batch: list[Piece], future: Future[tuple[list[int], Tokens]]) -> Iterator[tuple[Piece, Tokens]]:
    lengths, tokens = future.result()
    start = 0
    for piece, length in zip(batch, lengths, strict=True):
        yield piece, tokens[start:start + length]
        start += length


def _set_up(name: str) -> None:
    """In a worker: Ctrl-C is the parent's to handle, and a parent that is gone is followed."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _tokenizer = get(name)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(texts: list[bytes]) -> tuple[list[int], Tokens]:
    assert _tokenizer is not None
    encoded = [_tokenizer.encode_utf8(text) for text in texts]
    return [len(tokens) for tokens in encoded], np.concatenate(encoded)


@contextmanager
def _signals_kept_from_children() -> Iterator[None]:
    """A process started meanwhile cannot be interrupted before it is set up to leave Ctrl-C to its parent."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
