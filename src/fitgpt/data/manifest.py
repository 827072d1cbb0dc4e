"""manifest.json, written and read: the shards of a dataset, the settings they were made with, and counts of repairs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import DataError

MANIFEST_NAME = "manifest.json"
SCHEMA = 1
SPLITS = ("train", "val")


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


def to_json(manifest: Manifest) -> str:
    """A manifest as JSON. It holds no date and no host name: the same text and settings give the same bytes."""
    document = {
        "schema": SCHEMA,
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "splits": {
            split: {
                "tokens": manifest.tokens(split),
                "documents": manifest.documents[split],
                "shards": [asdict(shard) for shard in manifest.shards[split]],
            }
            for split in SPLITS
        },
        "counts": manifest.counts,
        "settings": manifest.settings,
        "source": manifest.source,
        "made_by": manifest.made_by,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Every field is checked: the file may be edited, truncated or from a newer fitgpt."""
    path = folder / MANIFEST_NAME
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Make it readable for this user.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _damaged(path, "it does not hold a JSON object")
    if document.get("schema") != SCHEMA:
        raise DataError(f"{path} has schema {document.get('schema')!r}; this fitgpt reads schema {SCHEMA}.",
                        "Update fitgpt, or prepare the dataset again with `fitgpt prepare … --overwrite`.")
    splits = _field(document, "splits", dict, path)
    return Manifest(
        tokenizer=_field(document, "tokenizer", str, path),
        vocab_size=_count(document, "vocab_size", path),
        dtype=_field(document, "dtype", str, path),
        shards={split: _shards(_field(splits, split, dict, path), split, path) for split in SPLITS},
        documents={split: _count(splits[split], "documents", path) for split in SPLITS},
        counts={name: _count(document["counts"], name, path) for name in _field(document, "counts", dict, path)},
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
    return ShardEntry(file, _count(row, "tokens", path), _field(row, "sha256", str, path),
                      _count(row, "max_token", path))


def _shards(split: dict[str, Any], name: str, path: Path) -> tuple[ShardEntry, ...]:
    shards = tuple(shard_entry(row, path) for row in _field(split, "shards", list, path))
    if not shards:
        raise _damaged(path, f"split {name!r} has no shards")
    return shards


def _count(holder: dict[str, Any], key: str, path: Path) -> int:
    value: int = _field(holder, key, int, path)
    if isinstance(value, bool) or value < 0:
        raise _damaged(path, f"{key!r} is {value!r}, not a count")
    return value


def _field(holder: dict[str, Any], key: str, kind: type, path: Path) -> Any:
    if not isinstance(holder.get(key), kind):
        raise _damaged(path, f"{key!r} is missing or is no {kind.__name__}")
    return holder[key]


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged: {why}.",
                     "Prepare the dataset again with the same `fitgpt prepare …` command and --overwrite.")
