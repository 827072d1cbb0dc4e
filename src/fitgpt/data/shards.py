"""A dataset's name → its DataSummary and shard files, from file headers alone. Standard library only: `plan` loads it.

A dataset of fitgpt is a folder with manifest.json and the shards that it lists. A shard is a header of 256 bytes
followed by its tokens, all little-endian:

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

A dataset of nanoGPT is train.bin and val.bin, uint16 tokens without a header, and for characters a meta.pkl.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import struct
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.run_config import DEFAULT_VOCAB
from ..core import safe_pickle
from ..core.errors import DataError
from ..core.files import MAX_JSON_BYTES, open_regular, read_limited
from ..core.units import KiB, MiB, show_bytes

MAGIC = b"FITGPT\r\n"
VERSION = 1
HEADER_BYTES = 256
ITEM_BYTES = {"uint16": 2, "uint32": 4}
SPLITS = ("train", "val")
MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 1
PROGRESS_NAME = "progress.json"  # present while `prepare` has not finished
MAX_META_BYTES = 4 * MiB         # of a meta.pkl; the vocabulary of any character set takes less than 1 MiB

_LAYOUT = struct.Struct("<8sIIIIqq32s32s")
_CRC = struct.Struct("<I")
_BYTE_ORDER = 0x0A0B0C0D
_BYTE_ORDER_SWAPPED = 0x0D0C0B0A
_DTYPES = {nbytes: dtype for dtype, nbytes in ITEM_BYTES.items()}
_META_DEPTH = 8                  # nanoGPT's own meta.pkl has depth 2
_EDGE_BYTES = 64 * KiB           # at each end of a headerless file, hashed into the fingerprint
_PADDED_TO = 64                  # aligned for tensor cores; nanoGPT rounds GPT-2's vocabulary up to it too
_LARGEST_PADDING = 1024          # models pad their vocabulary to a multiple of 64 or 128; more is another vocabulary
PREPARE_AGAIN = "Prepare the dataset again (`fitgpt prepare … --overwrite`), or copy the file again from its source."


# ---- vocabularies and block sizes

def padded_vocab(tokenizer: str, vocab_size: int | None) -> int:
    """The data's vocabulary → the model's: padded to a multiple of 64 for speed, as nanoGPT pads GPT-2's.

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
        tokenizer, data = ("unknown" if vocab is None else f"{vocab:,}" for vocab in (tokenizer_vocab, data_vocab))
        raise DataError(
            f"The vocabularies do not agree: tokenizer {tokenizer}, model {model_vocab:,}, data {data}. Tokenizer and "
            f"data must be equal; the model's must be the same size, or padded to at most the next multiple of "
            f"{_LARGEST_PADDING}.",
            f"--vocab_size={data_vocab or tokenizer_vocab}, or prepare the data with this model's tokenizer.")


def block_too_long(block: int, split: str, tokens: int, shards: int = 1) -> str:
    """The sentence for a block_size that no shard of a split can fill; `tokens` is the length of its longest shard."""
    where = f"the {split} split" if shards == 1 else f"the longest of the {shards:,} {split} shards"
    return f"block_size = {block:,} needs {block:,} + 1 = {block + 1:,} tokens in a row, and {where} has {tokens:,}."


# ---- a dataset

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
class ShardFile:
    """A shard on disk. `size`, `mtime_ns` and `inode` reveal later whether the file was changed."""

    path: str
    tokens: int
    dtype: str
    start: int               # bytes before the first token
    max_token: int | None    # None: unknown until the file is scanned
    size: int
    mtime_ns: int
    inode: int
    sha256: str = ""         # of the tokens' bytes; empty: the file has no checksum


ShardFiles = dict[str, tuple[ShardFile, ...]]  # by split


def summarise(dataset: str) -> DataSummary:
    """The summary of a dataset: a name under data/, as nanoGPT has it, or a path."""
    return list_shards(dataset)[0]


def list_shards(dataset: str) -> tuple[DataSummary, ShardFiles]:
    """The summary and shard files of a dataset, prepared by fitgpt or by nanoGPT."""
    folder = find_dataset(dataset)
    if (folder / MANIFEST_NAME).is_file():
        return _list_prepared(folder)
    if (folder / PROGRESS_NAME).is_file():
        raise DataError(f"The dataset in {folder} is not finished: `fitgpt prepare` was stopped.",
                        "Run the same `fitgpt prepare …` command again: it resumes where it stopped.")
    if (folder / "train.bin").is_file() or (folder / "val.bin").is_file():
        return _list_headerless(folder)
    nanogpt = folder / "prepare.py"
    raise DataError(f"The folder {folder} holds no dataset: neither {MANIFEST_NAME} nor train.bin and val.bin.",
                    f"Create it as nanoGPT does: python {nanogpt}" if nanogpt.is_file()
                    else f"Create one: {_prepare_command(dataset)}")


def find_dataset(dataset: str) -> Path:
    """The folder of a dataset: data/NAME if it exists, else the path itself."""
    for folder in (Path("data") / dataset, Path(dataset)):
        if dataset and os.path.isdir(folder):  # also False for names that no file can have
            return folder
    import difflib

    # Suggest the dataset with the nearest name, or the folder of a .bin file that was given.
    present = sorted({path.parent.name for name in (MANIFEST_NAME, "train.bin")
                      for path in Path("data").glob(f"*/{name}")})
    near = difflib.get_close_matches(dataset, present, n=1, cutoff=0.7)
    with suppress(OSError, ValueError):  # a name that no file can have
        if dataset.endswith(".bin") and os.path.isfile(dataset):
            near = [os.path.dirname(dataset) or "."]
    fix = f"Create it: {_prepare_command(dataset)}"
    if near:
        fix = f"Did you mean {shlex.quote(f'--dataset={near[0]}')}? Otherwise create it: {_prepare_command(dataset)}"
    listing = f" data/ holds: {', '.join(present[:20])}{' …' if len(present) > 20 else ''}." if present else ""
    shown = repr(dataset if len(dataset) < 200 else dataset[:200] + "…")
    raise DataError(f"There is no dataset {shown}: neither a folder of that name in data/ nor a folder of that path."
                    f"{listing}", fix)


def _prepare_command(dataset: str) -> str:
    """The command that creates a dataset; for well-known names, the complete one."""
    name = Path(dataset).name
    if not name.isprintable() or not 0 < len(name) < 100:
        name = "NAME"
    name = shlex.quote(name)
    known = {
        "stdlib": "--embedded --name=stdlib --tokenizer=bytes --val_fraction=0.05",
        "shakespeare_char": f"input.txt --name={name} --tokenizer=bytes  (or nanoGPT's data/{name}/prepare.py)",
        "openwebtext": f"--hub=Skylion007/openwebtext --name={name} --tokenizer=gpt2",
    }
    options = known.get(name, f"FILE_OR_FOLDER --name={name} --tokenizer=gpt2")
    if name.startswith("fineweb"):
        options = f"--hub=HuggingFaceFW/fineweb --hub_config=sample-10BT --name={name} --max_tokens=6B"
    return f"fitgpt prepare {options}"


def _list_prepared(folder: Path) -> tuple[DataSummary, ShardFiles]:
    """A folder with a manifest.json; DataError if the header of a shard disagrees with it."""
    manifest = read_manifest(folder)
    fix = f"Create it again: {manifest.made_by} --overwrite"
    digest = hashlib.sha256(f"{manifest.tokenizer} {manifest.vocab_size}\n".encode())
    shards: ShardFiles = {}
    for split in SPLITS:
        found_shards = []
        for entry in manifest.shards[split]:
            header, shard = read_header(folder / entry.file, fix)
            for name, found, expected in (
                ("tokens", header.tokens, entry.tokens),
                ("checksum", header.sha256, entry.sha256),
                ("largest token", header.max_token, entry.max_token),
                ("tokenizer", header.tokenizer, manifest.tokenizer),
                ("vocab_size", header.vocab_size, manifest.vocab_size),
                ("dtype", header.dtype, manifest.dtype),
            ):
                if found != expected:
                    raise DataError(f"The shard {shard.path} does not belong to its {MANIFEST_NAME}: "
                                    f"{name} {found!r} in the header, {expected!r} in the manifest.", fix)
            found_shards.append(shard)
            digest.update(f"{split} {entry.tokens} {entry.sha256}\n".encode())
        shards[split] = tuple(found_shards)
    return DataSummary(str(folder), manifest.tokenizer, manifest.vocab_size, manifest.tokens("train"),
                       manifest.tokens("val"), digest.hexdigest()), shards


def _list_headerless(folder: Path) -> tuple[DataSummary, ShardFiles]:
    """A folder with nanoGPT's train.bin and val.bin, and a meta.pkl where its tokens are characters."""
    shards = {split: _headerless_shard(folder / f"{split}.bin") for split in SPLITS}
    meta = read_meta(folder / "meta.pkl") if (folder / "meta.pkl").is_file() else None
    digest = hashlib.sha256()
    for split, shard in shards.items():
        digest.update(f"{split} {shard.size}\n".encode())
        with open(shard.path, "rb") as file:  # its first and its last 64 KiB
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, shard.size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    characters = "".join(meta.itos) if meta else ""
    if meta:
        digest.update(f"{meta.vocab_size} {characters!r}".encode())
    return DataSummary(str(folder), "chars" if meta else "unknown", meta.vocab_size if meta else None,
                       shards["train"].tokens, shards["val"].tokens, digest.hexdigest(), characters,
                       ), {split: (shard,) for split, shard in shards.items()}


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
    return ShardFile(str(path), size // 2, "uint16", 0, None, size, status.st_mtime_ns, status.st_ino)


# ---- the header of a shard

@dataclass(frozen=True)
class ShardHeader:
    """The fields of a shard's header."""

    dtype: str
    tokens: int
    vocab_size: int
    max_token: int
    tokenizer: str
    sha256: str


def pack(header: ShardHeader) -> bytes:
    """A header → its 256 bytes."""
    body = _LAYOUT.pack(MAGIC, _BYTE_ORDER, VERSION, ITEM_BYTES[header.dtype], header.vocab_size, header.max_token,
                        header.tokens, header.tokenizer.encode("ascii"), bytes.fromhex(header.sha256))
    body = body.ljust(HEADER_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def read_header(path: Path, fix: str = PREPARE_AGAIN) -> tuple[ShardHeader, ShardFile]:
    """A shard's path → its header, every field checked against the others and against the file's size."""
    def invalid(why: str) -> DataError:
        return DataError(f"The shard {path} {why}.", fix)

    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            raw = file.read(HEADER_BYTES)
    except OSError as error:
        raise invalid(f"cannot be read: {error.strerror}") from error
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
    dtype, size, expected = _DTYPES[item_bytes], status.st_size, HEADER_BYTES + tokens * item_bytes
    if size != expected:
        raise invalid(f"is {'truncated' if size < expected else 'too long'}: its header claims {tokens:,} {dtype} "
                      f"tokens, so {expected:,} bytes in all, and the file has {size:,} bytes")
    header = ShardHeader(dtype, tokens, vocab_size, max_token, tokenizer.rstrip(b"\0").decode("ascii", "replace"),
                         digest.hex())
    return header, ShardFile(str(path), tokens, dtype, HEADER_BYTES, max_token, size, status.st_mtime_ns,
                             status.st_ino, header.sha256)


# ---- manifest.json

@dataclass(frozen=True)
class ShardEntry:
    """One shard as manifest.json and progress.json list it."""

    file: str
    tokens: int
    sha256: str
    max_token: int


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.json."""

    tokenizer: str
    vocab_size: int
    dtype: str
    shards: dict[str, tuple[ShardEntry, ...]]  # by split
    documents: dict[str, int]                  # by split
    counts: dict[str, int]                     # of repairs and omissions: invalid UTF-8, NULs, skipped files …
    settings: dict[str, Any]                   # everything the tokens depend on
    source: str                                # a description of where the text came from
    made_by: str                               # the command that creates it again

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards[split])

    def to_json(self) -> str:
        """It holds no date and no host name: the same text and settings give the same bytes."""
        splits = {split: {"tokens": self.tokens(split), "documents": self.documents[split],
                          "shards": [asdict(shard) for shard in self.shards[split]]} for split in SPLITS}
        document = {"schema": MANIFEST_SCHEMA, "tokenizer": self.tokenizer, "vocab_size": self.vocab_size,
                    "dtype": self.dtype, "splits": splits, "counts": self.counts, "settings": self.settings,
                    "source": self.source, "made_by": self.made_by}
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Every field is checked: the file may be edited, truncated or from a newer fitgpt."""
    path = folder / MANIFEST_NAME
    try:
        document = json.loads(read_limited(path, MAX_JSON_BYTES))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Make it readable for this user.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _damaged(path, "it does not hold a JSON object")
    if document.get("schema") != MANIFEST_SCHEMA:
        raise DataError(f"{path} has schema {document.get('schema')!r}; this fitgpt reads schema {MANIFEST_SCHEMA}.",
                        "Update fitgpt, or prepare the dataset again with `fitgpt prepare … --overwrite`.")
    shards, documents = {}, {}
    for split in SPLITS:
        listed = _field(_field(document, "splits", dict, path), split, dict, path)
        shards[split] = tuple(shard_entry(row, path) for row in _field(listed, "shards", list, path))
        documents[split] = _field(listed, "documents", int, path)
        if not shards[split]:
            raise _damaged(path, f"split {split!r} has no shards")
    counts = _field(document, "counts", dict, path)
    return Manifest(
        tokenizer=_field(document, "tokenizer", str, path),
        vocab_size=_field(document, "vocab_size", int, path),
        dtype=_field(document, "dtype", str, path),
        shards=shards,
        documents=documents,
        counts={name: _field(counts, name, int, path) for name in counts},
        settings=_field(document, "settings", dict, path),
        source=_field(document, "source", str, path),
        made_by=_field(document, "made_by", str, path),
    )


def shard_entry(row: Any, path: Path) -> ShardEntry:
    """One entry of a list of shards in the JSON file `path`, checked. The name must not lead to another folder."""
    if not isinstance(row, dict):
        raise _damaged(path, "a shard is not an object")
    file = _field(row, "file", str, path)
    if Path(file).name != file or file in ("", ".", "..") or "\\" in file or "\0" in file:
        raise _damaged(path, f"the shard name {file!r} is not a plain file name")
    return ShardEntry(file, _field(row, "tokens", int, path), _field(row, "sha256", str, path),
                      _field(row, "max_token", int, path))


def _field(holder: dict[str, Any], key: str, kind: type, path: Path) -> Any:
    """The value of a key, of the given type; an int is a count."""
    if not isinstance(holder.get(key), kind):
        raise _damaged(path, f"{key!r} is missing or is no {kind.__name__}")
    if kind is int and (isinstance(holder[key], bool) or holder[key] < 0):
        raise _damaged(path, f"{key!r} is {holder[key]!r}, not a count")
    if kind is str and re.search("[\ud800-\udfff]", holder[key]):  # JSON can write half of a surrogate pair
        raise _damaged(path, f"{key!r} is {holder[key]!r}, not text")
    return holder[key]


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged: {why}.",
                     "Prepare the dataset again with the same `fitgpt prepare …` command and --overwrite.")


# ---- nanoGPT's meta.pkl

@dataclass(frozen=True)
class NanoGPTMeta:
    """itos[i] is the character of token i; empty where the file holds only a vocabulary size."""

    vocab_size: int
    itos: tuple[str, ...]


def read_meta(path: Path) -> NanoGPTMeta:
    """The vocabulary in a meta.pkl, read without unpickling (core/safe_pickle.py).

    DataError if the file holds anything but what nanoGPT's prepare.py writes.
    """
    def rejected(why: str) -> DataError:
        return DataError(
            f"{path} is rejected: {why}. fitgpt never unpickles: it accepts only the dict of dicts, lists, strings and "
            "integers that nanoGPT's prepare.py writes.",
            "Write it again with nanoGPT's prepare.py, or move it away if the dataset uses GPT-2's tokenizer: "
            f"mv {path} {path}.rejected")

    try:
        meta = safe_pickle.parse(read_limited(path, MAX_META_BYTES), max_depth=_META_DEPTH)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Make it readable for this user.") from error
    except (ValueError, safe_pickle.UnsafePickleError) as error:
        raise rejected(str(error)) from None
    if not isinstance(meta, dict):
        raise rejected("it does not hold a dict")
    vocab_size, itos = meta.get("vocab_size"), meta.get("itos", {})
    if not isinstance(vocab_size, int) or not 1 <= vocab_size < 2**31:
        raise rejected("its 'vocab_size' is not an integer above 0")
    by_token = dict(enumerate(itos)) if isinstance(itos, list) else itos
    if not isinstance(by_token, dict):
        raise rejected("its 'itos' is neither dict nor list")
    if not by_token:
        return NanoGPTMeta(vocab_size, ())
    if len(by_token) != vocab_size or any(token not in by_token for token in range(vocab_size)):
        raise rejected(f"its 'itos' does not name each token from 0 to {vocab_size - 1}")
    characters = tuple(by_token[token] for token in range(vocab_size))
    if any(not isinstance(character, str) or len(character) != 1 for character in characters):
        raise rejected("its 'itos' holds something other than single characters")
    if len(set(characters)) != vocab_size:
        raise rejected("its 'itos' gives two tokens the same character")
    if meta.get("stoi") != {character: token for token, character in enumerate(characters)}:
        raise rejected("its 'stoi' is not the inverse of its 'itos'")
    return NanoGPTMeta(vocab_size, characters)
