"""nanoGPT's meta.pkl to a vocabulary, read without unpickling (see core/safe_pickle.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import safe_pickle
from ..core.errors import DataError
from ..core.units import MiB, show_bytes

MAX_BYTES = 64 * MiB   # the vocabulary of any character set takes less than 1 MiB
MAX_DEPTH = 8          # nanoGPT's own file has depth 2


@dataclass(frozen=True)
class NanoGPTMeta:
    """itos[i] is the character of token i; empty where the file holds only a vocabulary size."""

    vocab_size: int
    itos: tuple[str, ...]


def read_meta(path: Path) -> NanoGPTMeta:
    """The vocabulary in a meta.pkl; DataError if the file holds anything but what nanoGPT's prepare.py writes."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _rejected(path, f"it is {show_bytes(size)}, and the limit is {show_bytes(MAX_BYTES)}")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Make it readable for this user.") from error
    try:
        value = safe_pickle.parse(data, max_depth=MAX_DEPTH)
    except safe_pickle.UnsafePickleError as error:
        raise _rejected(path, str(error)) from None
    return _checked(value, path)


def _checked(value: Any, path: Path) -> NanoGPTMeta:
    if not isinstance(value, dict):
        raise _rejected(path, "it does not hold a dict")
    vocab_size = value.get("vocab_size")
    if not isinstance(vocab_size, int) or not 1 <= vocab_size < 2**31:
        raise _rejected(path, "its 'vocab_size' is not an integer above 0")
    itos = value.get("itos", {})
    characters = dict(enumerate(itos)) if isinstance(itos, list) else itos
    if not isinstance(characters, dict):
        raise _rejected(path, "its 'itos' is neither dict nor list")
    if not characters:
        return NanoGPTMeta(vocab_size, ())
    if len(characters) != vocab_size or any(token not in characters for token in range(vocab_size)):
        raise _rejected(path, f"its 'itos' does not name each token from 0 to {vocab_size - 1}")
    ordered = tuple(characters[token] for token in range(vocab_size))
    if any(not isinstance(character, str) or len(character) != 1 for character in ordered):
        raise _rejected(path, "its 'itos' holds something other than single characters")
    if len(set(ordered)) != vocab_size:
        raise _rejected(path, "its 'itos' gives two tokens the same character")
    if value.get("stoi") != {character: token for token, character in enumerate(ordered)}:
        raise _rejected(path, "its 'stoi' is not the inverse of its 'itos'")
    return NanoGPTMeta(vocab_size, ordered)


def _rejected(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is rejected: {why}. fitgpt never unpickles: it accepts only the dict of dicts, lists, strings and "
        "integers that nanoGPT's prepare.py writes.",
        "Write it again with nanoGPT's prepare.py, or move it away if the dataset uses GPT-2's tokenizer: "
        f"mv {path} {path}.rejected",
    )
