"""Text to tokens and back: bytes, GPT-2's BPE (tiktoken), and the characters of a nanoGPT meta.pkl."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config.run_config import GPT2_VOCAB
from ..core.errors import DataError
from .manifest import MANIFEST_NAME, read_manifest
from .nanogpt_meta import read_meta
from .shard_header import find_dataset

END_OF_TEXT = "<|endoftext|>"
NAMES = ("gpt2", "bytes")      # the choices of `prepare --tokenizer`
_UNKNOWN = "\ufffd".encode()   # text of the tokens that pad the model's vocabulary: no training text has them

_GPT2_FILES = (
    "The vocabulary is two small files that tiktoken downloads once. On a machine with a network run\n"
    "  TIKTOKEN_CACHE_DIR=gpt2-files python -c \"import tiktoken; tiktoken.get_encoding('gpt2')\"\n"
    "then copy the folder gpt2-files here and set TIKTOKEN_CACHE_DIR to it.\n"
    "Text prepared with --tokenizer=bytes does not need them.")


class Tokenizer(Protocol):
    """What all tokenizers have in common."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_text(self) -> int | None: ...
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Text to tokens. With `special`, the text <|endoftext|> becomes that token, as in nanoGPT's sample.py."""
        ...
    def encode_utf8(self, data: bytes) -> NDArray[np.uint16]:
        """Valid UTF-8 to tokens, as an array: the fast path of `prepare`."""
        ...
    def token_bytes(self, token: int) -> bytes: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name; DataError if there is none, or if its vocabulary cannot be loaded."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer()
    raise DataError(f"There is no tokenizer {name!r}; there are {' and '.join(NAMES)}.", "--tokenizer=gpt2")


def tokenizer_of_dataset(dataset: str) -> Tokenizer:
    """The tokenizer a dataset was prepared with. For a .bin without meta.pkl that is GPT-2's, as nanoGPT assumes."""
    folder = find_dataset(dataset)
    if (folder / MANIFEST_NAME).is_file():
        return get_tokenizer(read_manifest(folder).tokenizer)
    if (folder / "meta.pkl").is_file():
        return _char_tokenizer(folder / "meta.pkl")
    return get_tokenizer("gpt2")


class StreamDecoder:
    """Tokens to text, one token at a time. A character that spans several tokens appears with the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete, else an empty string."""
        return self._utf8.decode(b"", final=True)


class _BaseTokenizer:
    name = ""
    vocab_size = 0
    end_of_text: int | None = None

    def token_bytes(self, token: int) -> bytes:
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def _with_specials(self, text: str, ordinary: Callable[[str], list[int]]) -> list[int]:
        if self.end_of_text is None:
            return ordinary(text)
        first, *rest = text.split(END_OF_TEXT)
        tokens = ordinary(first)
        for part in rest:
            tokens += [self.end_of_text, *ordinary(part)]
        return tokens


class ByteTokenizer(_BaseTokenizer):
    """Token b is byte b of the UTF-8 text; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if special:
            return self._with_specials(text, self.encode)
        return list(text.encode("utf-8", "replace"))

    def encode_utf8(self, data: bytes) -> NDArray[np.uint16]:
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        if token == self.end_of_text:
            return END_OF_TEXT.encode()
        return bytes([token]) if 0 <= token < 256 else _UNKNOWN


class GPT2Tokenizer(_BaseTokenizer):
    """GPT-2's byte pair encoding, loaded through tiktoken."""

    name = "gpt2"
    vocab_size = GPT2_VOCAB
    end_of_text = GPT2_VOCAB - 1

    def __init__(self) -> None:
        self._encoding = _load_gpt2()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if special:
            return self._with_specials(text, self.encode)
        tokens: list[int] = self._encoding.encode_ordinary(text)
        return tokens

    def encode_utf8(self, data: bytes) -> NDArray[np.uint16]:
        return np.array(self._encoding.encode_ordinary(data.decode()), dtype=np.uint16)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            return _UNKNOWN
        text: bytes = self._encoding.decode_single_token_bytes(token)
        return text


def _load_gpt2() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise DataError("The tokenizer gpt2 needs the package tiktoken, which is not installed.",
                        "pip install tiktoken (text prepared with --tokenizer=bytes does not need it)") from error
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # the network, the cache folder and the hash check raise different classes
        reason = str(error) if len(str(error)) < 200 else f"{str(error)[:200]}…"
        raise DataError(f"tiktoken could not load GPT-2's vocabulary: {type(error).__name__}: {reason}.",
                        _GPT2_FILES) from error


def _char_tokenizer(path: Path) -> CharTokenizer:
    found = read_meta(path)
    if not found.itos:
        raise DataError(f"{path} holds a vocabulary size but no characters ('itos' and 'stoi').",
                        "Write it again with nanoGPT's data/shakespeare_char/prepare.py.")
    return CharTokenizer(found.itos, str(path))


class CharTokenizer(_BaseTokenizer):
    """One token per character, as in nanoGPT's shakespeare_char. There is no end-of-text token."""

    name = "chars"

    def __init__(self, characters: Sequence[str], origin: str) -> None:
        self._origin = origin  # for error messages
        self._itos = tuple(characters)
        self._stoi = {character: token for token, character in enumerate(characters)}
        self.vocab_size = len(characters)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        missing = sorted(set(text) - self._stoi.keys())
        if missing:
            raise DataError(
                f"The characters of {self._origin} do not include {', '.join(map(repr, missing[:10]))}"
                f"{' …' if len(missing) > 10 else ''}; this tokenizer knows only the {self.vocab_size} characters "
                "of its training text.", "Use only characters that occur in the training text.")
        return [self._stoi[character] for character in text]

    def encode_utf8(self, data: bytes) -> NDArray[np.uint16]:
        return np.array(self.encode(data.decode()), dtype=np.uint16)

    def token_bytes(self, token: int) -> bytes:
        return self._itos[token].encode("utf-8", "replace") if 0 <= token < self.vocab_size else _UNKNOWN
