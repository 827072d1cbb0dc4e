"""`fitgpt prepare`: text in, shards out. Says first what it will do; stopped at any moment, it goes on later.

Which side a document falls on is decided by a hash of its text and the seed, so copies of a document are never
on both sides. Where there are too few documents for that to give val its share, the end of the longer side is
moved over: at the end of a document if one lies about there, else in the middle of one.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.fields import plain_name
from ..core.errors import DataError, FitError, Interrupted, SystemFault, UsageError
from ..core.units import KiB, parse_count, show_bytes, show_count
from . import manifest
from .folder import check_free_of_others, locked, make, stop_asked, unmake
from .header import ITEM_BYTES, PROGRESS_NAME, summarise
from .manifest import SPLITS, Manifest
from .progress import Pace, shown
from .shards import open_dataset
from .sources import Source, open_source
from .text import Piece, Pieces
from .tokenizers import Tokenizer, get
from .workers import cores, encode_in_order
from .writing import (
    DTYPE,
    Progress,
    SplitWriter,
    Tokens,
    load_progress,
    put,
    remove_leftovers,
    remove_ours,
    save_progress,
)

if TYPE_CHECKING:
    from ..config.command_options import PrepareOptions

_SAVE_EVERY_S = 1.0              # at most; and only when a shard was finished
_SAMPLE_BYTES = 256 * KiB        # tokenized first, to know how many tokens the text will make
_LARGE_DOWNLOAD_TOKENS = 5 * 10**9   # some 20 GB of text
_SMALL_VAL_TOKENS = 4096         # below this a val loss is mostly chance
_LIKE_THE_DEMO = ("--n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --gradient_accumulation_steps=1 "
                  "--max_iters=1400 --lr_decay_iters=1400 --warmup_iters=100")  # where config/demo.py is not at hand
_ENOUGH_FOR_A_REAL_RUN = 20_000_000  # tokens; below, a GPT of tens of millions of weights learns it by heart


@dataclass(frozen=True)
class Job:
    folder: Path
    dataset: str                 # as `train --dataset=` takes it
    source: Source
    tokenizer: Tokenizer
    max_tokens: int | None
    val_fraction: float
    shard_tokens: int
    processes: int
    seed: int
    settings: dict[str, Any]     # all that the result depends on
    command: str


def prepare(options: PrepareOptions) -> int:
    job = _job(options)
    if not options.overwrite and _is_there(job):
        return 0
    check_free_of_others(job.folder)
    _announce(job, options)
    made = make(job.folder)
    try:
        with locked(job.folder):
            if options.overwrite:
                remove_ours(job.folder)
            elif _is_there(job):  # another process made it meanwhile
                return 0
            _make_dataset(job)
    except FitError:
        unmake(made)
        raise
    _report(job)
    return 0


def _make_dataset(job: Job) -> None:
    writers = {split: SplitWriter(job.folder, split, job.tokenizer.name, job.tokenizer.vocab_size, job.shard_tokens)
               for split in SPLITS}
    progress = _begin(job, writers)
    _tokenize(job, progress, writers)
    _finish(job, progress, writers)


def _job(options: PrepareOptions) -> Job:
    name = options.name or _name_of_source(options)
    folder = Path(options.out) if options.out else Path("data") / name
    source = open_source(options)
    max_tokens = parse_count(options.max_tokens or "0") or None
    shard_tokens = parse_count(options.shard_tokens)
    settings = {
        "tokenizer": options.tokenizer, "max_tokens": max_tokens, "val_fraction": options.val_fraction,
        "shard_tokens": shard_tokens, "seed": options.seed, "text_column": options.text_column, "hub": options.hub,
        "hub_config": options.hub_config, "embedded": options.embedded, "listing": source.digest,
    }
    return Job(folder, name if not options.out else options.out, source, get(options.tokenizer), max_tokens,
               options.val_fraction, shard_tokens, options.processes or cores(), options.seed, settings,
               _command(options))


def _name_of_source(options: PrepareOptions) -> str:
    if options.out:
        return Path(options.out).name
    if options.embedded:
        return "stdlib"
    name = options.hub.rsplit("/", 1)[-1] if options.hub else Path(options.input[0]).resolve().stem
    if not name or name.startswith(".") or plain_name(name):
        raise UsageError(f"The source does not give a name for the dataset ({name!r}).", "--name=NAME")
    return name


def _command(options: PrepareOptions) -> str:
    words = ["fitgpt", "prepare", *options.input]
    words += ["--embedded"] if options.embedded else []
    for key in ("hub", "hub_config", "text_column", "out", "name", "tokenizer", "max_tokens", "val_fraction",
                "shard_tokens", "seed"):
        value = getattr(options, key)
        if value != type(options).__dataclass_fields__[key].default:
            words.append(f"--{key}={value}")
    return shlex.join(words)


# ---- before

def _is_there(job: Job) -> bool:
    if not (job.folder / manifest.NAME).is_file():
        return False
    found = manifest.read(job.folder)
    _refuse_differences(job, found.settings, "holds a dataset made")
    summary = summarise(str(job.folder))
    with suppress(OSError):  # a dataset that others may only read
        remove_leftovers(job.folder, found)
    print(f"{job.folder} is already prepared, from the same source and with the same settings: "
          f"{summary.train_tokens:,} train and {summary.val_tokens:,} val tokens.")
    return True


def _refuse_differences(job: Job, found: dict[str, Any], state: str) -> None:
    differences = [
        "the input files changed" if key == "listing" else f"{key} {found.get(key)!r} then, {value!r} now"
        for key, value in job.settings.items() if found.get(key) != value]
    if differences:
        raise UsageError(f"{job.folder} {state} otherwise: {'; '.join(differences)}.",
                         f"Replace it: {job.command} --overwrite\nor give the new one another --name.")


def _announce(job: Job, options: PrepareOptions) -> None:
    """What will be done, what it takes, and a refusal if the disk has not got it."""
    tokens = _expected_tokens(job)
    text = "" if job.source.text_bytes is None else f", {show_bytes(job.source.text_bytes)} of text"
    workers = "one process" if job.processes == 1 or job.tokenizer.name == "bytes" else f"{job.processes} processes"
    print(f"Preparing {job.folder} from {job.source.description}{text}, with the tokenizer {job.tokenizer.name} "
          f"in {workers}.")
    parent = next(folder for folder in (job.folder, *job.folder.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if tokens is None:
        print(f"How much it will be is not known before it is read; {show_bytes(free)} are free there.", flush=True)
    else:
        nbytes = tokens * ITEM_BYTES[DTYPE]
        needed = nbytes + min(nbytes, job.shard_tokens * ITEM_BYTES[DTYPE])  # and what is not in a shard yet
        print(f"About {show_count(tokens)} tokens: {show_bytes(nbytes)} on disk, where {show_bytes(free)} are free.",
              flush=True)
        if needed > free:
            raise SystemFault(
                f"There is not enough room in {parent}: {show_bytes(needed)} are needed and {show_bytes(free)} free.",
                "Choose another disk with --out=FOLDER, or fewer tokens with --max_tokens=COUNT.")
    if options.hub and not options.yes and (tokens is None or tokens > _LARGE_DOWNLOAD_TOKENS):
        _confirm(job)


def _confirm(job: Job) -> None:
    fix = f"{job.command} --yes, or with a limit: --max_tokens=1B"
    if not sys.stdin.isatty():
        raise UsageError(f"{job.source.description} is a large download, and nobody is there to be asked.", fix)
    if input("This is a large download. Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UsageError("Nothing was downloaded.", fix)


def _expected_tokens(job: Job) -> int | None:
    if job.source.text_bytes is None:
        return job.max_tokens
    sample = b""
    with closing(job.source.pieces(0)) as pieces:
        for piece in pieces:
            sample += piece.data[:_SAMPLE_BYTES]
            if len(sample) >= _SAMPLE_BYTES:
                break
    sample = sample.decode("utf-8", "ignore").encode()
    ratio = len(job.tokenizer.encode_utf8(sample)) / max(1, len(sample))
    expected = round(job.source.text_bytes * ratio)
    return min(expected, job.max_tokens) if job.max_tokens else expected


# ---- the work

def _begin(job: Job, writers: dict[str, SplitWriter]) -> Progress:
    fresh = Progress(job.settings, job.source.newest_ns, counts=dict(job.source.skipped))
    if not (job.folder / PROGRESS_NAME).is_file():
        return fresh
    progress = load_progress(job.folder, writers)
    if progress is None:
        print("An earlier, unfinished preparation is here, but its record is damaged: starting over.")
        remove_ours(job.folder)
        return fresh
    _refuse_differences(job, progress.settings, "holds an unfinished dataset, begun")
    if progress.newest_ns != job.source.newest_ns:
        raise UsageError(f"{job.folder} holds an unfinished dataset, and its input files were changed since.",
                         f"Start over: {job.command} --overwrite")
    print(f"Going on with an earlier preparation, after {show_count(_total(writers))} tokens.", flush=True)
    return progress


def _tokenize(job: Job, progress: Progress, writers: dict[str, SplitWriter]) -> None:
    end_of_text = np.array([job.tokenizer.end_of_text], dtype=np.uint16)
    pace = Pace(job.source.text_bytes, job.max_tokens, progress.text_bytes, _total(writers))
    left = (job.max_tokens or sys.maxsize) - _total(writers)
    pieces = _from_part(job.source.pieces(progress.document), progress.document, progress.part)
    encoded = encode_in_order(pieces, job.tokenizer, job.processes)
    saved, shards_saved = time.monotonic(), _shards(writers)
    with stop_asked() as stop, shown(pace) as told, closing(encoded):
        while left > 0 and (pair := next(encoded, None)):
            piece, tokens = pair
            if piece.part == 0:
                progress.in_val = _falls_to_val(piece.data, job.seed, job.val_fraction)
            split = "val" if progress.in_val else "train"
            empty = piece.part == 0 and piece.last and not piece.data
            for part in (tokens, end_of_text) if piece.last and not empty else (tokens,):
                writers[split].add(part[:left])
                left -= min(left, len(part))
            progress.documents[split] += piece.part == 0 and not empty
            _advance(progress, piece)
            told(progress.text_bytes, _total(writers))
            if _shards(writers) > shards_saved and time.monotonic() - saved > _SAVE_EVERY_S:
                save_progress(job.folder, progress, writers)
                saved, shards_saved = time.monotonic(), _shards(writers)
            if stop():
                save_progress(job.folder, progress, writers)
                raise Interrupted(f"Stopped after {show_count(_total(writers))} tokens; they are kept in {job.folder}.",
                                  f"To go on: {job.command}")


def _advance(progress: Progress, piece: Piece) -> None:
    progress.document, progress.part = (piece.document + 1, 0) if piece.last else (piece.document, piece.part + 1)
    progress.text_bytes += len(piece.data)
    for name, count in piece.counts.items():
        progress.counts[name] = progress.counts.get(name, 0) + count


def _from_part(pieces: Pieces, document: int, part: int) -> Pieces:
    for piece in pieces:
        if piece.document > document or piece.part >= part:
            yield piece


def _falls_to_val(text: bytes, seed: int, val_fraction: float) -> bool:
    digest = hashlib.blake2b(text, digest_size=8, key=(seed % 2**64).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < val_fraction * 2**64


def _total(writers: dict[str, SplitWriter]) -> int:
    return sum(writer.tokens for writer in writers.values())


def _shards(writers: dict[str, SplitWriter]) -> int:
    return sum(len(writer.shards) for writer in writers.values())


# ---- after

def _finish(job: Job, progress: Progress, writers: dict[str, SplitWriter]) -> None:
    if _total(writers) < 2:
        remove_ours(job.folder)
        raise DataError(f"{job.source.description} holds no text: {sum(progress.documents.values())} documents and "
                        f"{progress.counts.get('empty_documents', 0)} empty ones.",
                        "Give files that hold text: fitgpt prepare FILE_OR_FOLDER --name=NAME")
    if _balance(job, progress, writers):
        # Moving tokens rewrites shards that the last record still counts on: record the new state first.
        save_progress(job.folder, progress, writers)
    for writer in writers.values():
        writer.finish()
    result = Manifest(job.tokenizer.name, job.tokenizer.vocab_size, DTYPE,
                      {split: tuple(writers[split].shards) for split in SPLITS}, progress.documents,
                      dict(sorted(progress.counts.items())), job.settings, job.source.description, job.command)
    put(job.folder / manifest.NAME, manifest.to_json(result).encode())
    remove_leftovers(job.folder, result)


def _balance(job: Job, progress: Progress, writers: dict[str, SplitWriter]) -> bool:
    """With few documents chance can give val nothing, or far too much: then the end of one side is moved over."""
    total, have = _total(writers), writers["val"].tokens
    wanted = min(max(1, round(total * job.val_fraction)), total - 1)
    if wanted / 2 <= have <= min(2 * wanted, (wanted + total) / 2):  # each side has at least half of its share
        return False
    rich, poor, surplus = ("train", "val", wanted - have) if have < wanted else ("val", "train", have - wanted)
    tail = writers[rich].take_tail(2 * surplus)
    end_of_text = job.tokenizer.end_of_text
    cut = _cut_place(tail, surplus, end_of_text)
    writers[rich].add(tail[:cut])
    writers[poor].add(tail[cut:])
    moved = int((tail[cut:] == end_of_text).sum()) + int(tail[-1] != end_of_text)
    within = cut == 0 or tail[cut - 1] != end_of_text  # a document that is now on both sides
    progress.documents[poor] += moved
    progress.documents[rich] -= moved - int(within)
    return True


def _cut_place(tail: Tokens, surplus: int, end_of_text: int | None) -> int:
    """The end of a document that leaves nearly `surplus` tokens after it; else exactly that many."""
    ends = np.flatnonzero(tail == end_of_text) + 1
    after = len(tail) - ends
    fit = (after >= surplus / 2) & (after <= surplus * 2) & (after > 0)
    if not fit.any():
        return len(tail) - surplus
    return int(ends[fit][np.argmin(np.abs(after[fit] - surplus))])


def _report(job: Job) -> None:
    made = manifest.read(job.folder)
    for split in SPLITS:
        shards = len(made.shards[split])
        print(f"{split:5}  {made.tokens(split):>14,} tokens  in {_plural(made.documents[split], 'document')}, "
              f"{_plural(shards, 'shard')}")
    if made.counts:
        print("Met on the way: " + ", ".join(f"{count:,} {name.replace('_', ' ')}"
                                             for name, count in made.counts.items()) + ".")
    dataset = open_dataset(str(job.folder))
    dataset.close()
    for note in dataset.notes:
        print(f"Note: {note}")
    if made.tokens("val") < _SMALL_VAL_TOKENS:
        print(f"Note: val has only {made.tokens('val'):,} tokens; a larger --val_fraction gives a steadier val loss.")
    enough = made.tokens("train") >= _ENOUGH_FOR_A_REAL_RUN and made.tokenizer == "gpt2"
    config, flags = ("config/train_fineweb.py", "") if enough else ("config/demo.py", _LIKE_THE_DEMO)
    words = f"train {config if Path(config).is_file() else flags}".rstrip()
    print(f"The dataset is in {job.folder}. To train on it:\n  fitgpt {words} "
          f"--dataset={shlex.quote(job.dataset)} --out_dir=runs/{shlex.quote(job.folder.name)}", flush=True)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
