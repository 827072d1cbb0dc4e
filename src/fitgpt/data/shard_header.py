"""A dataset's name to its DataSummary and shard files, from file headers alone. Standard library only: `plan` loads it.

A shard is a header of 256 bytes followed by its tokens, all little-endian:

    0    8  magic "FITGPT\\r\\n" (the line end shows a copy that went through text mode)
    8    4  byte-order mark 0x0A0B0C0D
    12   4  version
    16   4  bytes per token: 2 (uint16) or 4 (uint32)
    20   4  vocab_size
    24   8  largest token
    32   8  tokens
    40  32  tokenizer, ASCII, padded with NUL
    72  32  SHA-256 of the tokens' bytes
    252  4  CRC-32 of the 252 bytes before

nanoGPT's train.bin and val.bin have no header: the whole file is uint16 tokens.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config.run_config import DEFAULT_VOCAB
from ..core.errors import DataError
from ..core.units import KiB, show_bytes
from .manifest import MANIFEST_NAME, SPLITS, Manifest, ShardEntry, read_manifest
from .nanogpt_meta import read_meta

MAGIC = b"FITGPT\r\n"
VERSION = 1
HEADER_BYTES = 256
ITEM_BYTES = {"uint16": 2, "uint32": 4}
PROGRESS_NAME = "progress.json"  # present while `prepare` has not finished

_LAYOUT = struct.Struct("<8sIIIIqq32s32s")
_CRC = struct.Struct("<I")
_BYTE_ORDER = 0x0A0B0C0D
_BYTE_ORDER_SWAPPED = 0x0D0C0B0A
_DTYPES = {nbytes: dtype for dtype, nbytes in ITEM_BYTES.items()}
_EDGE_BYTES = 64 * KiB           # at each end of a headerless file, hashed into the fingerprint
_PADDED_TO = 64                  # aligned for tensor cores; nanoGPT rounds GPT-2's vocabulary up to it too
_LARGEST_PADDING = 1024          # models pad their vocabulary to a multiple of 64 or 128; more is another vocabulary
_PREPARE_AGAIN = "Prepare the dataset again (`fitgpt prepare … --overwrite`), or copy the file again from its source."


@dataclass(frozen=True)
class DataSummary:
    """What the headers of a dataset say, without reading a token."""

    path: str
    tokenizer: str          # "gpt2", "bytes", "chars" (nanoGPT's meta.pkl), "unknown"
    vocab_size: int | None  # None: unknown, a headerless .bin does not state it
    train_tokens: int
    val_tokens: int
    fingerprint: str        # changes when the data does
    characters: str = ""    # of the tokenizer "chars", in the order of their tokens


@dataclass(frozen=True)
class ShardHeader:
    """The fields of a shard's header."""

    dtype: str
    tokens: int
    vocab_size: int
    max_token: int
    tokenizer: str
    sha256: str


@dataclass(frozen=True)
class ShardFile:
    """A shard on disk. `size` and `mtime_ns` reveal later whether the file was changed."""

    path: str
    tokens: int
    dtype: str
    start: int               # bytes before the first token
    max_token: int | None    # None: unknown until the file is scanned
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ShardListing:
    """A dataset's summary and its shard files."""

    summary: DataSummary
    shards: dict[str, tuple[ShardFile, ...]]  # by split


def padded_vocab(tokenizer: str, vocab_size: int | None) -> int:
    """The data's vocabulary to the model's: padded to a multiple of 64 for speed, as nanoGPT pads GPT-2's.

    The vocabulary of a meta.pkl is not padded, because nanoGPT does not pad it: its models keep their shape.
    """
    if tokenizer == "unknown" or vocab_size is None:
        return DEFAULT_VOCAB
    return vocab_size if tokenizer == "chars" else -(-vocab_size // _PADDED_TO) * _PADDED_TO


def check_vocab(tokenizer_vocab: int | None, model_vocab: int, data_vocab: int | None) -> None:
    """Raises DataError if the vocabularies disagree; the model's may be padded. None: unknown (headerless .bin)."""
    known = [vocab for vocab in (tokenizer_vocab, data_vocab) if vocab is not None]
    if not known:
        return
    largest_padded = -(-max(known) // _LARGEST_PADDING) * _LARGEST_PADDING
    if len(set(known)) > 1 or not max(known) <= model_vocab <= largest_padded:
        raise DataError(
            f"The vocabularies do not agree: tokenizer {_number(tokenizer_vocab)}, model {model_vocab:,}, "
            f"data {_number(data_vocab)}. Tokenizer and data must be equal; the model's must be the same size, "
            f"or padded to at most the next multiple of {_LARGEST_PADDING}.",
            f"--vocab_size={data_vocab or tokenizer_vocab}, or prepare the data with this model's tokenizer.")


def block_too_long(block: int, split: str, tokens: int, shards: int = 1) -> str:
    """The sentence for a block_size that no shard of a split can fill; `tokens` is the length of its longest shard."""
    where = f"the {split} split" if shards == 1 else f"the longest of the {shards:,} {split} shards"
    return f"block_size = {block:,} needs {block:,} + 1 = {block + 1:,} tokens in a row, and {where} has {tokens:,}."


def _number(vocab: int | None) -> str:
    return "unknown" if vocab is None else f"{vocab:,}"


# ---- one shard

def pack(header: ShardHeader) -> bytes:
    """A header to its 256 bytes."""
    body = _LAYOUT.pack(MAGIC, _BYTE_ORDER, VERSION, ITEM_BYTES[header.dtype], header.vocab_size, header.max_token,
                        header.tokens, header.tokenizer.encode("ascii"), bytes.fromhex(header.sha256))
    body = body.ljust(HEADER_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def read_header(path: Path, fix: str = _PREPARE_AGAIN) -> tuple[ShardHeader, ShardFile]:
    """A shard's path to its header, every field checked against the others and against the file's size."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"The shard {path} cannot be read: {error.strerror}.", fix) from error
    header = _parse(raw, path, fix)
    expected = HEADER_BYTES + header.tokens * ITEM_BYTES[header.dtype]
    if status.st_size != expected:
        raise DataError(
            f"The shard {path} is {'truncated' if status.st_size < expected else 'too long'}: its header claims "
            f"{header.tokens:,} {header.dtype} tokens, so {expected:,} bytes in all, and the file has "
            f"{status.st_size:,} bytes.", fix)
    return header, ShardFile(str(path), header.tokens, header.dtype, HEADER_BYTES, header.max_token,
                             status.st_size, status.st_mtime_ns)


def _parse(raw: bytes, path: Path, fix: str) -> ShardHeader:
    def invalid(why: str) -> DataError:
        return DataError(f"The shard {path} {why}.", fix)

    if not raw:
        raise invalid("is empty (0 bytes)")
    if raw[:len(MAGIC)] != MAGIC[:len(raw)]:
        raise invalid(f"starts with {raw[:len(MAGIC)]!r}; a fitgpt shard starts with {MAGIC!r}")
    if len(raw) < HEADER_BYTES:
        raise invalid(f"has only {len(raw)} bytes; its header alone takes {HEADER_BYTES}")
    _, order, version, item_bytes, vocab_size, max_token, tokens, tokenizer, digest = _LAYOUT.unpack_from(raw)
    if order == _BYTE_ORDER_SWAPPED:
        raise invalid("was written big-endian; shards are little-endian")
    if order != _BYTE_ORDER:
        raise invalid(f"has the byte-order mark {order:#x}; it must be {_BYTE_ORDER:#x}")
    if version != VERSION:
        raise invalid(f"has format version {version}; this fitgpt reads version {VERSION}")
    if item_bytes not in _DTYPES:
        raise invalid(f"claims {item_bytes} bytes per token; it must be 2 or 4")
    if tokens < 1:
        raise invalid(f"claims {tokens:,} tokens; it must hold at least 1")
    if not 0 <= max_token < vocab_size:
        raise invalid(f"claims the largest token {max_token:,} under a vocabulary of {vocab_size:,}")
    if zlib.crc32(raw[:HEADER_BYTES - _CRC.size]) != _CRC.unpack_from(raw, HEADER_BYTES - _CRC.size)[0]:
        raise invalid("has a damaged header: its CRC-32 does not match")
    return ShardHeader(_DTYPES[item_bytes], tokens, vocab_size, max_token,
                       tokenizer.rstrip(b"\0").decode("ascii", "replace"), digest.hex())


# ---- a dataset

def summarise(dataset: str) -> DataSummary:
    """The summary of a dataset: a name under data/, as nanoGPT has it, or a path."""
    return list_shards(dataset).summary


def list_shards(dataset: str) -> ShardListing:
    """The summary and shard files of a dataset, prepared by fitgpt or by nanoGPT."""
    folder = find_dataset(dataset)
    if (folder / MANIFEST_NAME).is_file():
        return _list_prepared(folder)
    if (folder / PROGRESS_NAME).is_file():
        raise DataError(f"The dataset in {folder} is not finished: `fitgpt prepare` was stopped.",
                        "Run the same `fitgpt prepare …` command again: it resumes where it stopped.")
    if (folder / "train.bin").is_file() or (folder / "val.bin").is_file():
        return _list_headerless(folder)
    raise _no_dataset_in(folder, dataset)


def find_dataset(dataset: str) -> Path:
    """The folder of a dataset: data/NAME if it exists, else the path itself."""
    for folder in (Path("data") / dataset, Path(dataset)):
        if dataset and os.path.isdir(folder):  # also False for names that no file can have
            return folder
    present = sorted(entry.name for entry in os.scandir("data") if entry.is_dir()) if os.path.isdir("data") else []
    listing = f" data/ holds: {', '.join(present[:20])}{' …' if len(present) > 20 else ''}." if present else ""
    shown = repr(dataset if len(dataset) < 200 else dataset[:200] + "…")
    raise DataError(f"There is no dataset {shown}: neither a folder of that name in data/ nor a folder of that path."
                    f"{listing}", _nearest(dataset, present) or f"Create it: {_prepare_command(dataset)}")


def _nearest(dataset: str, present: list[str]) -> str:
    """The fix that suggests the dataset with the nearest name, or the folder of a .bin file that was given."""
    import difflib

    near = difflib.get_close_matches(dataset, present, n=1, cutoff=0.7)
    with suppress(OSError, ValueError):  # a name that no file can have
        if dataset.endswith(".bin") and os.path.isfile(dataset):
            near = [os.path.dirname(dataset) or "."]
    if not near:
        return ""
    return f"Did you mean {shlex.quote(f'--dataset={near[0]}')}? Otherwise create it: {_prepare_command(dataset)}"


def _prepare_command(dataset: str) -> str:
    """The command that creates a dataset; for well-known names, the complete one."""
    name = Path(dataset).name
    if not name.isprintable() or not 0 < len(name) < 100:
        name = "NAME"
    name = shlex.quote(name)
    if name == "stdlib":
        return "fitgpt prepare --embedded --name=stdlib --tokenizer=bytes --val_fraction=0.05"
    if name.startswith("fineweb"):
        return f"fitgpt prepare --hub=HuggingFaceFW/fineweb --hub_config=sample-10BT --name={name} --max_tokens=6B"
    if name == "shakespeare_char":
        return f"fitgpt prepare input.txt --name={name} --tokenizer=bytes  (or nanoGPT's data/{name}/prepare.py)"
    if name == "openwebtext":
        return f"fitgpt prepare --hub=Skylion007/openwebtext --name={name} --tokenizer=gpt2"
    return f"fitgpt prepare FILE_OR_FOLDER --name={name} --tokenizer=gpt2"


def _no_dataset_in(folder: Path, dataset: str) -> DataError:
    what = f"The folder {folder} holds no dataset: neither {MANIFEST_NAME} nor train.bin and val.bin."
    if (folder / "prepare.py").is_file():
        return DataError(what, f"Create it as nanoGPT does: python {folder / 'prepare.py'}")
    return DataError(what, f"Create one: {_prepare_command(dataset)}")


def _list_prepared(folder: Path) -> ShardListing:
    listed = read_manifest(folder)
    fix = f"Create it again: {listed.made_by} --overwrite"
    shards = {split: tuple(_checked_shard(folder, entry, listed, fix) for entry in listed.shards[split])
              for split in SPLITS}
    digest = hashlib.sha256(f"{listed.tokenizer} {listed.vocab_size}\n".encode())
    for split in SPLITS:
        for entry in listed.shards[split]:
            digest.update(f"{split} {entry.tokens} {entry.sha256}\n".encode())
    summary = DataSummary(str(folder), listed.tokenizer, listed.vocab_size, listed.tokens("train"),
                          listed.tokens("val"), digest.hexdigest())
    return ShardListing(summary, shards)


def _checked_shard(folder: Path, entry: ShardEntry, listed: Manifest, fix: str) -> ShardFile:
    """The shard of a manifest's entry; DataError if its header disagrees with the manifest."""
    header, shard = read_header(folder / entry.file, fix)
    for name, found, expected in (
        ("tokens", header.tokens, entry.tokens),
        ("checksum", header.sha256, entry.sha256),
        ("largest token", header.max_token, entry.max_token),
        ("tokenizer", header.tokenizer, listed.tokenizer),
        ("vocab_size", header.vocab_size, listed.vocab_size),
        ("dtype", header.dtype, listed.dtype),
    ):
        if found != expected:
            raise DataError(f"The shard {shard.path} does not belong to its {MANIFEST_NAME}: "
                            f"{name} {found!r} in the header, {expected!r} in the manifest.", fix)
    return shard


def _list_headerless(folder: Path) -> ShardListing:
    shards: dict[str, tuple[ShardFile, ...]] = {
        split: (_headerless_shard(folder / f"{split}.bin"),) for split in SPLITS}
    vocabulary = read_meta(folder / "meta.pkl") if (folder / "meta.pkl").is_file() else None
    digest = hashlib.sha256()
    for split in SPLITS:
        digest.update(f"{split} {shards[split][0].size}\n".encode())
        digest.update(_edges(shards[split][0]))
    if vocabulary:
        digest.update(f"{vocabulary.vocab_size} {''.join(vocabulary.itos)!r}".encode())
    summary = DataSummary(
        path=str(folder),
        tokenizer="chars" if vocabulary else "unknown",
        vocab_size=vocabulary.vocab_size if vocabulary else None,
        train_tokens=shards["train"][0].tokens,
        val_tokens=shards["val"][0].tokens,
        fingerprint=digest.hexdigest(),
        characters="".join(vocabulary.itos) if vocabulary else "",
    )
    return ShardListing(summary, shards)


def _headerless_shard(path: Path) -> ShardFile:
    fix = f"Create it again with the prepare.py that wrote {path.parent}, or with `fitgpt prepare`."
    if not path.is_file():
        raise DataError(f"{path} is missing; a nanoGPT dataset has both train.bin and val.bin.", fix)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            first = file.read(len(MAGIC))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Make it readable for this user.") from error
    size = status.st_size
    if first == MAGIC:
        raise DataError(f"{path} is a fitgpt shard without its {MANIFEST_NAME}.",
                        f"Copy {MANIFEST_NAME} and all shards it lists, under their original names.")
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes); it must hold uint16 tokens.", fix)
    if size % 2:
        raise DataError(f"{path} has {size:,} bytes ({show_bytes(size)}), an odd number; "
                        "uint16 tokens take 2 bytes each, so the file is truncated or not a list of tokens.", fix)
    return ShardFile(str(path), size // 2, "uint16", 0, None, size, status.st_mtime_ns)


def _edges(shard: ShardFile) -> bytes:
    """The first and the last 64 KiB of a file."""
    with open(shard.path, "rb") as file:
        first = file.read(_EDGE_BYTES)
        file.seek(max(0, shard.size - _EDGE_BYTES))
        return first + file.read(_EDGE_BYTES)
