"""Text chunks to tokens in several processes, with the results in the order of the text."""

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
from .text import TextChunk, TextChunks
from .tokenizers import Tokenizer, get_tokenizer

Tokens = NDArray[np.uint16]
_BATCH_BYTES = 1 * MiB
_BATCH_CHUNKS = 512
_BATCHES_PER_PROCESS = 3   # in flight: no process waits, and memory stays bounded

_tokenizer: Tokenizer | None = None  # set once in each worker process


def available_cores() -> int:
    """The number of cores this process may use: the smaller of its CPU affinity and its cgroup's quota."""
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
    except (ValueError, ZeroDivisionError):  # "max" means no quota
        return []


EncodedChunks = Generator[tuple[TextChunk, Tokens], None, None]


def encode_in_order(chunks: TextChunks, tokenizer: Tokenizer, processes: int) -> EncodedChunks:
    """Each chunk with its tokens. The byte tokenizer always runs in this process: sending the text would cost more."""
    if processes == 1 or tokenizer.name == "bytes":
        for chunk in chunks:
            yield chunk, tokenizer.encode_utf8(chunk.data)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe: pyarrow and rich start threads
    executor = ProcessPoolExecutor(processes, context, _initialise_worker, (tokenizer.name,))
    pending: deque[tuple[list[TextChunk], Future[tuple[list[int], Tokens]]]] = deque()
    try:
        for batch in _batches(chunks):
            with _sigint_blocked():
                pending.append((batch, executor.submit(_encode, [chunk.data for chunk in batch])))
            if len(pending) >= _BATCHES_PER_PROCESS * processes:
                yield from _collect(*pending.popleft())
        while pending:
            yield from _collect(*pending.popleft())
    except BrokenProcessPool as error:
        raise SystemFault("A tokenizing process died, most likely killed by the system because CPU RAM ran out.",
                          "Run the same command again with --processes=1; it resumes where it stopped.") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _batches(chunks: TextChunks) -> Iterator[list[TextChunk]]:
    batch: list[TextChunk] = []
    nbytes = 0
    for chunk in chunks:
        batch.append(chunk)
        nbytes += len(chunk.data)
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_CHUNKS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _collect(batch: list[TextChunk], future: Future[tuple[list[int], Tokens]]) -> Iterator[tuple[TextChunk, Tokens]]:
    lengths, tokens = future.result()
    start = 0
    for chunk, length in zip(batch, lengths, strict=True):
        yield chunk, tokens[start:start + length]
        start += length


def _initialise_worker(name: str) -> None:
    """Runs in a worker process: ignore Ctrl-C, which the parent handles, and exit when the parent does."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _tokenizer = get_tokenizer(name)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(texts: list[bytes]) -> tuple[list[int], Tokens]:
    assert _tokenizer is not None
    encoded = [_tokenizer.encode_utf8(text) for text in texts]
    return [len(tokens) for tokens in encoded], np.concatenate(encoded)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started inside inherit the block, so Ctrl-C cannot interrupt them before they ignore it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
