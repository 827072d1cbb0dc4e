"""What is in a dataset, as far as its headers tell? Standard library only, so that `plan` can ask.

A shard is a header of 256 bytes and then its tokens, everything little-endian:

    0    8  magic "FITGPT\\r\\n" (the line end shows a copy that went through text mode)
    8    4  byte-order mark 0x0A0B0C0D
    12   4  version
    16   4  bytes a token: 2 (uint16) or 4 (uint32)
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
from ..nouns import DataSummary
from . import manifest, meta

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
_EDGE_BYTES = 64 * KiB           # of a headerless file, from each end, that go into the fingerprint
_PADDED_TO = 64                  # what matrix units like, and what nanoGPT rounds GPT-2's vocabulary up to
_LARGEST_PADDING = 1024          # models pad their vocabulary, by 64 or 128 as a rule; more than this is another one
_AGAIN = "Prepare the dataset again (`fitgpt prepare … --overwrite`), or copy the file again from where it came."


@dataclass(frozen=True)
class ShardHeader:
    dtype: str
    tokens: int
    vocab_size: int
    max_token: int
    tokenizer: str
    sha256: str


@dataclass(frozen=True)
class ShardFile:
    """A shard as found on disk. `size` and `mtime_ns` show later whether somebody touched it."""

    path: str
    tokens: int
    dtype: str
    start: int               # bytes before the first token
    max_token: int | None    # None: only a scan can tell
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Inventory:
    summary: DataSummary
    shards: dict[str, tuple[ShardFile, ...]]  # by split


def padded_vocab(tokenizer: str, vocab_size: int | None) -> int:
    """The model's vocabulary for this data: padded to a multiple of 64 for speed, as nanoGPT pads GPT-2's; but
    nanoGPT takes a meta.pkl's as it is, and so do we, so that its models keep their shape."""
    if tokenizer == "unknown" or vocab_size is None:
        return DEFAULT_VOCAB
    return vocab_size if tokenizer == "chars" else -(-vocab_size // _PADDED_TO) * _PADDED_TO


def check_vocab(tokenizer_vocab: int | None, model_vocab: int, data_vocab: int | None) -> None:
    """Three vocabularies must agree; the model's may be padded. None: unknown, as in a headerless .bin."""
    known = [vocab for vocab in (tokenizer_vocab, data_vocab) if vocab is not None]
    if not known:
        return
    largest_padded = -(-max(known) // _LARGEST_PADDING) * _LARGEST_PADDING
    if len(set(known)) > 1 or not max(known) <= model_vocab <= largest_padded:
        raise DataError(
            f"The vocabularies do not agree: tokenizer {_number(tokenizer_vocab)}, model {model_vocab:,}, "
            f"data {_number(data_vocab)}. The tokenizer and the data must be equal, and the model's as large, "
            f"or padded to at most the next multiple of {_LARGEST_PADDING}.",
            f"--vocab_size={data_vocab or tokenizer_vocab}, or data prepared with the tokenizer of this model.")


def too_long(block: int, split: str, tokens: int, shards: int = 1) -> str:
    """Why no window of a split is as long; `tokens`: of its longest shard."""
    where = f"the {split} split" if shards == 1 else f"the longest of the {shards:,} {split} shards"
    return f"block_size = {block:,} needs {block:,} + 1 = {block + 1:,} tokens in a row, and {where} has {tokens:,}."


def _number(vocab: int | None) -> str:
    return "unknown" if vocab is None else f"{vocab:,}"


# ---- one shard

def pack(header: ShardHeader) -> bytes:
    body = _LAYOUT.pack(MAGIC, _BYTE_ORDER, VERSION, ITEM_BYTES[header.dtype], header.vocab_size, header.max_token,
                        header.tokens, header.tokenizer.encode("ascii"), bytes.fromhex(header.sha256))
    body = body.ljust(HEADER_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def read_header(path: Path, fix: str = _AGAIN) -> tuple[ShardHeader, ShardFile]:
    """Checks every field against the others and against the file's size; never trusts a claimed count."""
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
    def refuse(why: str) -> DataError:
        return DataError(f"The shard {path} {why}.", fix)

    if not raw:
        raise refuse("is empty (0 bytes)")
    if raw[:len(MAGIC)] != MAGIC[:len(raw)]:
        raise refuse(f"starts with {raw[:len(MAGIC)]!r}; a fitgpt shard starts with {MAGIC!r}")
    if len(raw) < HEADER_BYTES:
        raise refuse(f"has only {len(raw)} bytes; its header alone takes {HEADER_BYTES}")
    _, order, version, item_bytes, vocab_size, max_token, tokens, tokenizer, digest = _LAYOUT.unpack_from(raw)
    if order == _BYTE_ORDER_SWAPPED:
        raise refuse("was written big-endian; shards are little-endian")
    if order != _BYTE_ORDER:
        raise refuse(f"has the byte-order mark {order:#x}; it must be {_BYTE_ORDER:#x}")
    if version != VERSION:
        raise refuse(f"has format version {version}; this fitgpt reads version {VERSION}")
    if item_bytes not in _DTYPES:
        raise refuse(f"says {item_bytes} bytes a token; it must be 2 or 4")
    if tokens < 1:
        raise refuse(f"claims {tokens:,} tokens; it must hold at least 1")
    if not 0 <= max_token < vocab_size:
        raise refuse(f"claims the largest token {max_token:,} under a vocabulary of {vocab_size:,}")
    if zlib.crc32(raw[:HEADER_BYTES - _CRC.size]) != _CRC.unpack_from(raw, HEADER_BYTES - _CRC.size)[0]:
        raise refuse("has a damaged header: its CRC-32 does not match")
    return ShardHeader(_DTYPES[item_bytes], tokens, vocab_size, max_token,
                       tokenizer.rstrip(b"\0").decode("ascii", "replace"), digest.hex())


# ---- a dataset

def summarise(dataset: str) -> DataSummary:
    """`dataset` is a name under data/ or a path, as nanoGPT has it."""
    return take_inventory(dataset).summary


def take_inventory(dataset: str) -> Inventory:
    folder = find(dataset)
    if (folder / manifest.NAME).is_file():
        return _prepared(folder)
    if (folder / PROGRESS_NAME).is_file():
        raise DataError(f"The dataset in {folder} is not finished: `fitgpt prepare` was stopped on the way.",
                        "Run the same `fitgpt prepare …` command again: it goes on where it stopped.")
    if (folder / "train.bin").is_file() or (folder / "val.bin").is_file():
        return _headerless(folder)
    raise _nothing_in(folder, dataset)


def find(dataset: str) -> Path:
    """data/NAME if there is such a folder, else the path itself."""
    for folder in (Path("data") / dataset, Path(dataset)):
        if dataset and os.path.isdir(folder):  # False, too, for a name that no file can have
            return folder
    present = sorted(entry.name for entry in os.scandir("data") if entry.is_dir()) if os.path.isdir("data") else []
    listing = f" data/ holds: {', '.join(present[:20])}{' …' if len(present) > 20 else ''}." if present else ""
    shown = repr(dataset if len(dataset) < 200 else dataset[:200] + "…")
    raise DataError(f"There is no dataset {shown}: neither a folder of that name in data/ nor a folder of that path."
                    f"{listing}", _meant(dataset, present) or f"Make it: {_recipe(dataset)}")


def _meant(dataset: str, present: list[str]) -> str:
    """The dataset around a file that was named, or the one whose name is nearest."""
    import difflib

    near = difflib.get_close_matches(dataset, present, n=1, cutoff=0.7)
    with suppress(OSError, ValueError):  # a name that no disk could hold
        if dataset.endswith(".bin") and os.path.isfile(dataset):
            near = [os.path.dirname(dataset) or "."]
    return f"Did you mean {shlex.quote(f'--dataset={near[0]}')}? Else make it: {_recipe(dataset)}" if near else ""


def _recipe(dataset: str) -> str:
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


def _nothing_in(folder: Path, dataset: str) -> DataError:
    what = f"The folder {folder} holds no dataset: neither {manifest.NAME} nor train.bin and val.bin."
    if (folder / "prepare.py").is_file():
        return DataError(what, f"Make it as nanoGPT does: python {folder / 'prepare.py'}")
    return DataError(what, f"Make one: {_recipe(dataset)}")


def _prepared(folder: Path) -> Inventory:
    listed = manifest.read(folder)
    again = f"Make it again: {listed.made_by} --overwrite"
    shards = {split: tuple(_listed_shard(folder, entry, listed, again) for entry in listed.shards[split])
              for split in manifest.SPLITS}
    digest = hashlib.sha256(f"{listed.tokenizer} {listed.vocab_size}\n".encode())
    for split in manifest.SPLITS:
        for entry in listed.shards[split]:
            digest.update(f"{split} {entry.tokens} {entry.sha256}\n".encode())
    summary = DataSummary(str(folder), listed.tokenizer, listed.vocab_size, listed.tokens("train"),
                          listed.tokens("val"), digest.hexdigest())
    return Inventory(summary, shards)


def _listed_shard(folder: Path, entry: manifest.ShardEntry, listed: manifest.Manifest, fix: str) -> ShardFile:
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
            raise DataError(f"The shard {shard.path} does not belong to its {manifest.NAME}: "
                            f"{name} {found!r} in the header, {expected!r} in the manifest.", fix)
    return shard


def _headerless(folder: Path) -> Inventory:
    shards: dict[str, tuple[ShardFile, ...]] = {
        split: (_headerless_shard(folder / f"{split}.bin"),) for split in manifest.SPLITS}
    vocabulary = meta.read(folder / "meta.pkl") if (folder / "meta.pkl").is_file() else None
    digest = hashlib.sha256()
    for split in manifest.SPLITS:
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
    return Inventory(summary, shards)


def _headerless_shard(path: Path) -> ShardFile:
    fix = f"Make it again with the prepare.py that made {path.parent}, or with `fitgpt prepare`."
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
        raise DataError(f"{path} is a fitgpt shard without its {manifest.NAME}.",
                        f"Copy {manifest.NAME} and all shards it names, under their own names.")
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes); it must hold uint16 tokens.", fix)
    if size % 2:
        raise DataError(f"{path} has {size:,} bytes ({show_bytes(size)}), an odd number; "
                        "uint16 tokens take 2 bytes each, so it is truncated or something else.", fix)
    return ShardFile(str(path), size // 2, "uint16", 0, None, size, status.st_mtime_ns)


def _edges(shard: ShardFile) -> bytes:
    with open(shard.path, "rb") as file:
        first = file.read(_EDGE_BYTES)
        file.seek(max(0, shard.size - _EDGE_BYTES))
        return first + file.read(_EDGE_BYTES)
