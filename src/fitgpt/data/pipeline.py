"""PrepareOptions → a dataset on disk: text is read, tokenized and written to shards. A stopped run can be resumed.

A hash of a document's text and the seed decides whether it belongs to train or val, so copies of a document are
never in both splits. If there are too few documents for val to get its share that way, the end of the larger split
is moved to the other one: cut at the end of a document if there is one nearby, else within a document.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.fields import plain_name
from ..core.errors import DataError, FitError, Interrupted, SystemFault, UsageError
from ..core.units import KiB, MiB, parse_count, show_bytes, show_count, show_seconds
from ..core.worker_process import begin_worker, sigint_blocked
from .dataset import open_dataset
from .shards import ITEM_BYTES, MANIFEST_NAME, PROGRESS_NAME, SPLITS, Manifest, read_manifest
from .sources import TextSource, open_source
from .text import TextChunk
from .tokenizers import Tokenizer, get_tokenizer
from .writer import (
    DTYPE,
    ResumeState,
    SplitWriter,
    Tokens,
    check_not_nanogpt,
    create_folder,
    load_state,
    locked,
    remove_created,
    remove_written,
    save_state,
    write_file,
)

if TYPE_CHECKING:
    from ..config.command_options import PrepareOptions

_SAVE_EVERY_S = 1.0                  # at most, and only after a new shard
_SAMPLE_BYTES = 256 * KiB            # tokenized first, to estimate the number of tokens
_LARGE_DOWNLOAD_TOKENS = 5 * 10**9   # about 20 GB of text
_PROGRESS_LINE_EVERY_S = 5.0
_NAMES_SHOWN = 5
_PROGRESS_BAR_EVERY_S = 0.1
_BATCH_BYTES = 1 * MiB               # sent to a process at once
_BATCH_CHUNKS = 512
_BATCHES_PER_PROCESS = 3             # in flight: no process waits, and memory stays bounded

Writers = dict[str, SplitWriter]     # by split
Notify = Callable[[str], None]       # shows a sentence to the user
Ask = Callable[[str], bool | None]   # asks the user yes or no; None if nobody can answer


@dataclass(frozen=True)
class PrepareJob:
    """What one call of `prepare` has to do."""

    options: PrepareOptions
    folder: Path
    dataset: str                 # as `train --dataset=` takes it
    source: TextSource
    tokenizer: Tokenizer
    processes: int
    max_tokens: int | None
    shard_tokens: int
    settings: dict[str, Any]     # everything the tokens depend on
    command: str                 # the command line that does it again


@dataclass(frozen=True)
class PreparedDataset:
    """The result of `prepare_dataset`."""

    folder: Path
    dataset: str                 # as `train --dataset=` takes it
    manifest: Manifest
    notes: tuple[str, ...]       # warnings for the user, each a sentence
    existed: bool                # already prepared, from the same source and with the same settings


def prepare_dataset(options: PrepareOptions, *, notify: Notify, ask: Ask) -> PreparedDataset:
    """Prepares the dataset that the options describe, or resumes a stopped `prepare` of it.

    Announces the work through `notify` before it starts, and asks before a large download.
    """
    job = _job(options)
    if not options.overwrite and (existing := _existing(job, notify)):
        return existing
    check_not_nanogpt(job.folder)
    _announce(job, notify, ask)
    created = create_folder(job.folder)
    try:
        with locked(job.folder):
            if options.overwrite:
                remove_written(job.folder)
            elif existing := _existing(job, notify):  # another process prepared it meanwhile
                return existing
            tokenizer = job.tokenizer
            writers = {split: SplitWriter(job.folder, split, tokenizer.name, tokenizer.vocab_size, job.shard_tokens)
                       for split in SPLITS}
            state = _resume_or_start(job, writers, notify)
            _tokenize(job, state, writers)
            _finish(job, state, writers)
    except FitError:
        remove_created(created)
        raise
    notes = open_dataset(str(job.folder)).notes
    return PreparedDataset(job.folder, job.dataset, read_manifest(job.folder), notes, existed=False)


# ---- what is to be done

def _job(options: PrepareOptions) -> PrepareJob:
    """The options, checked, with the source opened and the tokenizer loaded."""
    name = options.name or ("stdlib" if options.embedded else "")
    if not name and not options.out:
        name = options.hub.rsplit("/", 1)[-1] if options.hub else Path(options.input[0]).resolve().stem
        if not name or name.startswith(".") or plain_name(name):
            raise UsageError(f"The dataset cannot be named after its source ({name!r}).", "--name=NAME")
    source = open_source(options)
    max_tokens = parse_count(options.max_tokens or "0") or None
    shard_tokens = parse_count(options.shard_tokens)
    settings = {
        "tokenizer": options.tokenizer, "max_tokens": max_tokens, "val_fraction": options.val_fraction,
        "shard_tokens": shard_tokens, "seed": options.seed, "text_column": options.text_column, "hub": options.hub,
        "hub_config": options.hub_config, "embedded": options.embedded, "listing": source.digest,
    }
    words = ["fitgpt", "prepare", *options.input, *(["--embedded"] if options.embedded else [])]
    for key in ("hub", "hub_config", "text_column", "out", "name", "tokenizer", "max_tokens", "val_fraction",
                "shard_tokens", "seed"):
        value = getattr(options, key)
        if value != type(options).__dataclass_fields__[key].default:
            words.append(f"--{key}={value}")
    return PrepareJob(options, Path(options.out) if options.out else Path("data") / name, options.out or name, source,
                      get_tokenizer(options.tokenizer), options.processes or available_cores(), max_tokens,
                      shard_tokens, settings, shlex.join(words))


def _existing(job: PrepareJob, notify: Notify) -> PreparedDataset | None:
    """The finished dataset in the folder, if there is one; UsageError if it was prepared differently, DataError if it
    is damaged."""
    if not (job.folder / MANIFEST_NAME).is_file():
        return None
    manifest = read_manifest(job.folder)
    _check_same_settings(job, manifest.settings, "a dataset")
    open_dataset(str(job.folder)).verify(manifest.vocab_size, notify)
    with suppress(OSError):  # a dataset that this user may only read
        remove_written(job.folder, manifest)
    return PreparedDataset(job.folder, job.dataset, manifest, (), existed=True)


def _check_same_settings(job: PrepareJob, found: dict[str, Any], what: str) -> None:
    differences = [
        "the input files changed" if key == "listing" else f"{key} {found.get(key)!r} then, {value!r} now"
        for key, value in job.settings.items() if found.get(key) != value]
    if differences:
        raise UsageError(f"{job.folder} holds {what} with other settings or input: {'; '.join(differences)}.",
                         f"Replace it: {job.command} --overwrite\nor give the new one another --name.")


def _announce(job: PrepareJob, notify: Notify, ask: Ask) -> None:
    """Announces the work and its size; SystemFault if the disk is too small, UsageError if a download is declined."""
    tokens = _expected_tokens(job)
    text = "" if job.source.text_bytes is None else f", {show_bytes(job.source.text_bytes)} of text"
    workers = "one process" if job.processes == 1 or job.tokenizer.name == "bytes" else f"{job.processes} processes"
    notify(f"Preparing {job.folder} from {job.source.description}{text}, with the tokenizer {job.tokenizer.name} "
           f"in {workers}.")
    if names := job.source.binary_files:
        more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
        notify(f"Skipped, because {'it is' if len(names) == 1 else 'they are'} not text: "
               f"{', '.join(names[:_NAMES_SHOWN])}{more}.")
    parent = next(folder for folder in (job.folder, *job.folder.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if tokens is None:
        notify(f"The number of tokens is not known before the text is read; {show_bytes(free)} are free there.")
    else:
        nbytes = tokens * ITEM_BYTES[DTYPE]
        needed = nbytes + min(nbytes, job.shard_tokens * ITEM_BYTES[DTYPE])  # plus the tokens not in a shard yet
        notify(f"About {show_count(tokens)} tokens: {show_bytes(nbytes)} on disk, where {show_bytes(free)} are free.")
        if needed > free:
            raise SystemFault(
                f"There is not enough space in {parent}: {show_bytes(needed)} are needed and {show_bytes(free)} free.",
                "Choose another disk with --out=FOLDER, or fewer tokens with --max_tokens=COUNT.")
    if job.options.hub and not job.options.yes and (tokens is None or tokens > _LARGE_DOWNLOAD_TOKENS):
        fix = f"{job.command} --yes, or with a limit: --max_tokens=1B"
        answer = ask("This is a large download. Continue?")
        if answer is None:
            raise UsageError(f"{job.source.description} is a large download, and there is no terminal to confirm it.",
                             fix)
        if not answer:
            raise UsageError("Nothing was downloaded.", fix)


def _expected_tokens(job: PrepareJob) -> int | None:
    """An estimate from the first 256 KiB of the text; None if the size of the text is unknown."""
    if job.source.text_bytes is None:
        return job.max_tokens
    sample = b""
    with closing(job.source.chunks(0)) as chunks:
        for chunk in chunks:
            sample += chunk.data[:_SAMPLE_BYTES]
            if len(sample) >= _SAMPLE_BYTES:
                break
    sample = sample.decode("utf-8", "ignore").encode()
    ratio = len(job.tokenizer.encode_utf8(sample)) / max(1, len(sample))
    expected = round(job.source.text_bytes * ratio)
    return min(expected, job.max_tokens) if job.max_tokens else expected


# ---- the work

def _resume_or_start(job: PrepareJob, writers: Writers, notify: Notify) -> ResumeState:
    new = ResumeState(job.settings, job.source.newest_ns, counts=dict(job.source.skipped),
                      hub_marks=job.source.hub_marks)
    if not (job.folder / PROGRESS_NAME).is_file():
        return new
    state = load_state(job.folder, writers)
    if state is None:
        notify("An earlier `prepare` was stopped here, but its saved state is damaged: starting over.")
        remove_written(job.folder)
        return new
    _check_same_settings(job, state.settings, "an unfinished dataset")
    if state.newest_ns != job.source.newest_ns:
        raise UsageError(f"{job.folder} holds an unfinished dataset, and its input files were changed since.",
                         f"Start over: {job.command} --overwrite")
    notify(f"Resuming an earlier `prepare` after {show_count(_total_tokens(writers))} tokens.")
    job.source.hub_marks[:] = state.hub_marks
    state.hub_marks = job.source.hub_marks
    return state


def _tokenize(job: PrepareJob, state: ResumeState, writers: Writers) -> None:
    """Reads, tokenizes and writes every document that is left. Interrupted if a signal asks to stop."""
    end_of_text = np.array([job.tokenizer.end_of_text], dtype=np.uint16)
    left = (job.max_tokens or sys.maxsize) - _total_tokens(writers)
    document, first_part = state.document, state.part
    # A document that was being read is read again from its start, without the parts that are already written.
    chunks = (chunk for chunk in job.source.chunks(document) if chunk.document > document or chunk.part >= first_part)
    encoded = encode_in_order(chunks, job.tokenizer, job.processes)
    saved_at, shards_saved = time.monotonic(), _total_shards(writers)
    progress = Progress(job.source.text_bytes, job.max_tokens, state.text_bytes, _total_tokens(writers))
    with stop_requested() as stop, progress, closing(encoded):
        while left > 0 and (pair := _next_or_save(job, state, writers, encoded)):
            chunk, tokens = pair
            if chunk.part == 0:
                state.in_val = is_validation_document(chunk.data, job.options.seed, job.options.val_fraction)
            split = "val" if state.in_val else "train"
            empty = chunk.part == 0 and chunk.last and not chunk.data
            for part in (tokens, end_of_text) if chunk.last and not empty else (tokens,):
                writers[split].add(part[:left])
                left -= min(left, len(part))
            state.documents[split] += chunk.part == 0 and not empty
            state.document, state.part = (chunk.document + 1, 0) if chunk.last else (chunk.document, chunk.part + 1)
            state.text_bytes += len(chunk.data)
            for name, count in chunk.counts.items():
                state.counts[name] = state.counts.get(name, 0) + count
            progress.show(state.text_bytes, _total_tokens(writers))
            if _total_shards(writers) > shards_saved and time.monotonic() - saved_at > _SAVE_EVERY_S:
                save_state(job.folder, state, writers)
                saved_at, shards_saved = time.monotonic(), _total_shards(writers)
            if stop():
                save_state(job.folder, state, writers)
                raise Interrupted(f"Stopped after {show_count(_total_tokens(writers))} tokens; they are kept in "
                                  f"{job.folder}.", f"To resume: {job.command}")


def _next_or_save(job: PrepareJob, state: ResumeState, writers: Writers,
                  encoded: Iterator[tuple[TextChunk, Tokens]]) -> tuple[TextChunk, Tokens] | None:
    """The next chunk; None at the end. If the hub can no longer be read, saves what was read of it and raises."""
    try:
        return next(encoded, None)
    except DataError as error:
        if not job.source.hub or not _total_tokens(writers):
            raise
        save_state(job.folder, state, writers)
        raise DataError(f"{error.what} The first {show_count(_total_tokens(writers))} tokens are kept in {job.folder}.",
                        error.fix) from error


def is_validation_document(first_chunk: bytes, seed: int, val_fraction: float) -> bool:
    """Whether the document that starts with these bytes belongs to val: decided by a hash of them and the seed."""
    digest = hashlib.blake2b(first_chunk, digest_size=8, key=(seed % 2**64).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def _total_tokens(writers: Writers) -> int:
    return sum(writer.tokens for writer in writers.values())


def _total_shards(writers: Writers) -> int:
    return sum(len(writer.shards) for writer in writers.values())


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C, SIGTERM or SIGHUP came. A second signal raises KeyboardInterrupt."""
    requested = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        print("\nStopping and saving. A second signal stops at once.", file=sys.stderr, flush=True)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # A signal that is ignored from the start stays ignored: nohup, or a background job of a script.
    before = {number: signal.signal(number, handle) for number in numbers
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield requested.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- tokenizing, in several processes

_tokenizer: Tokenizer | None = None  # set once in each worker process


def available_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of cores this process may use: the smaller of its CPU affinity and its cgroup's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of cgroups v2 and v1
        with suppress(OSError, ValueError, ZeroDivisionError):  # ValueError: "max", which means no quota
            quota, period = map(int, " ".join((cgroups / name).read_text() for name in names).split())
            if quota > 0:
                cores = min(cores, max(1, round(quota / period)))
    return cores


def encode_in_order(
    chunks: Iterator[TextChunk], tokenizer: Tokenizer, processes: int
) -> Generator[tuple[TextChunk, Tokens], None, None]:
    """Each chunk with its tokens, in the order of the text.

    The byte tokenizer always runs in this process: sending the text would cost more.
    """
    if processes == 1 or tokenizer.name == "bytes":
        for chunk in chunks:
            yield chunk, tokenizer.encode_utf8(chunk.data)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe: pyarrow and rich start threads
    executor = ProcessPoolExecutor(processes, context, _initialise_worker, (tokenizer.name,))
    pending: deque[tuple[list[TextChunk], Future[list[Tokens]]]] = deque()
    try:
        for batch in _batches(chunks):
            with sigint_blocked():  # submit may start a process
                pending.append((batch, executor.submit(_encode, [chunk.data for chunk in batch])))
            if len(pending) >= _BATCHES_PER_PROCESS * processes:
                batch, encoded = pending.popleft()
                yield from zip(batch, encoded.result(), strict=True)
        for batch, encoded in pending:
            yield from zip(batch, encoded.result(), strict=True)
    except BrokenProcessPool as error:
        raise SystemFault("A tokenizing process died, most likely killed by the system because CPU RAM ran out.",
                          "Run the same command again with --processes=1; it resumes where it stopped.") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _batches(chunks: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
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


def _initialise_worker(name: str) -> None:
    global _tokenizer

    begin_worker()
    _tokenizer = get_tokenizer(name)


def _encode(texts: list[bytes]) -> list[Tokens]:
    assert _tokenizer is not None
    return [_tokenizer.encode_utf8(text) for text in texts]


# ---- the end

def _finish(job: PrepareJob, state: ResumeState, writers: Writers) -> None:
    if _total_tokens(writers) < 2:
        remove_written(job.folder)
        raise DataError(f"{job.source.description} holds no text: {sum(state.documents.values())} documents and "
                        f"{state.counts.get('empty_documents', 0)} empty ones.",
                        "Give files that hold text: fitgpt prepare FILE_OR_FOLDER --name=NAME")
    if _balance(job, state, writers):
        # Moving tokens rewrites shards that the saved state refers to: save the new state first.
        save_state(job.folder, state, writers)
    for writer in writers.values():
        writer.finish()
    manifest = Manifest(job.tokenizer.name, job.tokenizer.vocab_size, DTYPE,
                        {split: tuple(writers[split].shards) for split in SPLITS}, state.documents,
                        dict(sorted(state.counts.items())), job.settings, job.source.description, job.command)
    # A file name that is not valid UTF-8 has surrogates in Python, and "?" in the manifest.
    write_file(job.folder / MANIFEST_NAME, manifest.to_json().encode("utf-8", "replace"))
    remove_written(job.folder, manifest)


def _balance(job: PrepareJob, state: ResumeState, writers: Writers) -> bool:
    """Moves the end of the larger split to the other one if either has less than half of its share.

    With few documents, the hash can assign none or almost all of them to val. Returns whether tokens were moved.
    """
    total, have = _total_tokens(writers), writers["val"].tokens
    wanted = min(max(1, round(total * job.options.val_fraction)), total - 1)
    if wanted / 2 <= have <= min(2 * wanted, (wanted + total) / 2):  # each split has at least half of its share
        return False
    larger, smaller, surplus = ("train", "val", wanted - have) if have < wanted else ("val", "train", have - wanted)
    tail = writers[larger].take_tail(2 * surplus)
    end_of_text = job.tokenizer.end_of_text
    cut = _cut_position(tail, surplus, end_of_text)
    writers[larger].add(tail[:cut])
    writers[smaller].add(tail[cut:])
    moved = int((tail[cut:] == end_of_text).sum()) + int(tail[-1] != end_of_text)
    moved -= int(tail[cut - 1] != end_of_text)  # a document that was cut counts where it begins
    state.documents[smaller] += moved
    state.documents[larger] -= moved
    return True


def _cut_position(tail: Tokens, surplus: int, end_of_text: int | None) -> int:
    """Where to cut so that about `surplus` tokens follow: the best end of a document, else exactly that many."""
    ends = np.flatnonzero(tail == end_of_text) + 1
    after = len(tail) - ends
    near = (after >= surplus / 2) & (after <= surplus * 2) & (after > 0)
    if not near.any():
        return len(tail) - surplus
    return int(ends[near][np.argmin(np.abs(after[near] - surplus))])


# ---- progress

class Progress:
    """The fraction done, the speed and the time left: a bar on a terminal, else a line every few seconds.

    The total is `max_tokens` or the size of the text, whichever is reached first; unknown if neither is given. `read`
    (bytes of text) and `tokens` (written) count from the very beginning, before any stop.
    """

    def __init__(self, text_bytes: int | None, max_tokens: int | None, read: int, tokens: int) -> None:
        self._text_bytes, self._max_tokens = text_bytes, max_tokens
        self._started = self._shown = time.monotonic()
        self._tokens_before, self._fraction_before = tokens, self.fraction(read, tokens) or 0.0
        self._bar: Any = None

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (progress.BarColumn(bar_width=30), progress.TextColumn("{task.description}", markup=False))
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, read: int, tokens: int) -> None:
        """To be called after every chunk."""
        now = time.monotonic()
        if now - self._shown < (_PROGRESS_LINE_EVERY_S if self._bar is None else _PROGRESS_BAR_EVERY_S):
            return
        self._shown = now
        if self._bar is None:
            print(self.describe(read, tokens), file=sys.stderr, flush=True)
        else:
            fraction = self.fraction(read, tokens)
            self._bar.update(self._task, description=self.describe(read, tokens), completed=fraction,
                             total=None if fraction is None else 1.0)

    def fraction(self, read: int, tokens: int) -> float | None:
        parts = [part / whole for part, whole in ((read, self._text_bytes), (tokens, self._max_tokens)) if whole]
        return min(1.0, max(parts)) if parts else None

    def describe(self, read: int, tokens: int) -> str:
        seconds = max(1e-9, time.monotonic() - self._started)
        words = [f"{show_count(tokens)} tokens", f"{show_bytes(read)} of text",
                 f"{show_count(round((tokens - self._tokens_before) / seconds))} tokens/s"]
        fraction = self.fraction(read, tokens)
        if fraction is not None and fraction > self._fraction_before:
            left = seconds * (1 - fraction) / (fraction - self._fraction_before)
            words = [f"{fraction:4.0%}", *words, f"{show_seconds(left)} left"]
        return " · ".join(words)
