"""Text → tokens and back: bytes, GPT-2's BPE (tiktoken), and the characters of a nanoGPT meta.pkl.

Also a tokenizer → the files that transformers loads it from, and an exported folder → its tokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..config.run_config import GPT2_VOCAB
from ..core.errors import DataError
from ..core.files import read_json_object
from .shards import MANIFEST_NAME, find_dataset, read_manifest, read_meta

END_OF_TEXT = "<|endoftext|>"
NAMES = ("gpt2", "bytes")      # the choices of `prepare --tokenizer`
FILE_NAMES = ("tokenizer.json", "tokenizer_config.json")
VERSION_KEY = "fitgpt_version"      # in config.json and tokenizer_config.json: marks files that fitgpt wrote
TOKENIZER_KEY = "fitgpt_tokenizer"  # in config.json: the name of the tokenizer
_UNKNOWN = "\ufffd".encode()   # text of the tokens that pad the model's vocabulary: no training text has them

_GPT2_FILES = (
    "The vocabulary is two small files that tiktoken downloads once. On a machine with a network run\n"
    "  TIKTOKEN_CACHE_DIR=gpt2-files python -c \"import tiktoken; tiktoken.get_encoding('gpt2')\"\n"
    "then copy the folder gpt2-files here and set TIKTOKEN_CACHE_DIR to it.\n"
    "Text prepared with --tokenizer=bytes does not need them.")


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
    meta = folder / "meta.pkl"
    if not meta.is_file():
        return get_tokenizer("gpt2")
    characters = read_meta(meta).itos
    if not characters:
        raise DataError(f"{meta} holds a vocabulary size but no characters ('itos' and 'stoi').",
                        "Write it again with nanoGPT's data/shakespeare_char/prepare.py.")
    return CharTokenizer(characters, str(meta))


class Tokenizer:
    """What all tokenizers have in common."""

    name = ""
    vocab_size = 0
    end_of_text: int | None = None

    def encode_ordinary(self, text: str) -> list[int]:
        """Text → tokens; <|endoftext|> is text like any other."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        raise NotImplementedError

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Text → tokens. With `special`, the text <|endoftext|> becomes that token, as in nanoGPT's sample.py."""
        if not special or self.end_of_text is None:
            return self.encode_ordinary(text)
        first, *rest = text.split(END_OF_TEXT)
        tokens = self.encode_ordinary(first)
        for part in rest:
            tokens += [self.end_of_text, *self.encode_ordinary(part)]
        return tokens

    def encode_utf8(self, data: bytes) -> NDArray[np.uint16]:
        """Valid UTF-8 → tokens, as an array."""
        return np.array(self.encode_ordinary(data.decode()), dtype=np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


class ByteTokenizer(Tokenizer):
    """Token b is byte b of the UTF-8 text; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_utf8(self, data: bytes) -> NDArray[np.uint16]:  # without a list in between
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        if token == self.end_of_text:
            return END_OF_TEXT.encode()
        return bytes([token]) if 0 <= token < 256 else _UNKNOWN


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pair encoding, loaded through tiktoken."""

    name = "gpt2"
    vocab_size = GPT2_VOCAB
    end_of_text = GPT2_VOCAB - 1

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise DataError("The tokenizer gpt2 needs the package tiktoken, which is not installed.",
                            "pip install tiktoken (text prepared with --tokenizer=bytes does not need it)") from error
        try:
            self._encoding: Any = tiktoken.get_encoding("gpt2")
        except Exception as error:  # the network, the cache folder and the hash check raise different classes
            reason = str(error) if len(str(error)) < 200 else f"{str(error)[:200]}…"
            raise DataError(f"tiktoken could not load GPT-2's vocabulary: {type(error).__name__}: {reason}.",
                            _GPT2_FILES) from error

    def encode_ordinary(self, text: str) -> list[int]:
        tokens: list[int] = self._encoding.encode_ordinary(text)
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            return _UNKNOWN
        text: bytes = self._encoding.decode_single_token_bytes(token)
        return text


class CharTokenizer(Tokenizer):
    """One token per character, as in nanoGPT's shakespeare_char. There is no end-of-text token."""

    name = "chars"

    def __init__(self, characters: Sequence[str], origin: str) -> None:
        self._origin = origin  # for error messages
        self._itos = tuple(characters)
        self._stoi = {character: token for token, character in enumerate(characters)}
        self.vocab_size = len(characters)

    def encode_ordinary(self, text: str) -> list[int]:
        missing = sorted(set(text) - self._stoi.keys())
        if missing:
            raise DataError(
                f"The characters of {self._origin} do not include {', '.join(map(repr, missing[:10]))}"
                f"{' …' if len(missing) > 10 else ''}; this tokenizer knows only the {self.vocab_size} characters "
                "of its training text.", "Use only characters that occur in the training text.")
        return [self._stoi[character] for character in text]

    def token_bytes(self, token: int) -> bytes:
        return self._itos[token].encode("utf-8", "replace") if 0 <= token < self.vocab_size else _UNKNOWN


class StreamDecoder:
    """Tokens → text, one token at a time. A character that spans several tokens appears with the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete, else an empty string."""
        return self._utf8.decode(b"", final=True)


# ---- the tokenizer files of transformers

# GPT-2 writes each byte as one printable character: the printable ones of Latin-1 as themselves, the others from
# U+0100 on (bytes_to_unicode in OpenAI's encoder.py).
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE}
_BYTE_CHARACTERS |= {byte: chr(256 + number)
                     for number, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


def tokenizer_files(tokenizer: Tokenizer, block_size: int) -> dict[str, dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json; empty if two characters have the same text."""
    if tokenizer.name == "chars":
        vocabulary = {tokenizer.decode([token]): token for token in range(tokenizer.vocab_size)}
        if len(vocabulary) < tokenizer.vocab_size:
            return {}  # lone surrogates, which JSON in UTF-8 cannot hold
        # An unknown character is an error in transformers too: there is no token for it.
        parts = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated",
                                   "invert": False},
                 "decoder": {"type": "Fuse"},
                 "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}}
    else:
        # Byte-level BPE. GPT-2 splits the text into words first; bytes need no merges.
        ranks = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)
                 if token != tokenizer.end_of_text}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": tokenizer.name == "gpt2"}
        parts = {"pre_tokenizer": level, "decoder": level,
                 "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                           "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
                           "ignore_merges": False, "vocab": {_printable(text): rank for text, rank in ranks.items()},
                           "merges": [" ".join(map(_printable, _last_merge(text, ranks)))
                                      for text in ranks if len(text) > 1]}}
    end_of_text = tokenizer.end_of_text
    special = [] if end_of_text is None else [
        {"id": end_of_text, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
              "clean_up_tokenization_spaces": False, VERSION_KEY: __version__}
    if end_of_text is not None:
        config |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    model = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
             "post_processor": None, **parts}
    return dict(zip(FILE_NAMES, (model, config), strict=True))


def _printable(token: bytes) -> str:
    return "".join(_BYTE_CHARACTERS[byte] for byte in token)


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two parts whose merge gives the token, when merges are applied by rank."""
    parts = [token[index:index + 1] for index in range(len(token))]
    while len(parts) > 2:
        merged_ranks = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        first = min(range(len(merged_ranks)), key=merged_ranks.__getitem__)
        parts[first:first + 2] = [parts[first] + parts[first + 1]]
    return parts


def tokenizer_of_export(folder: Path) -> dict[str, Any]:
    """The tokenizer of an exported folder, as a checkpoint's state holds it (`tokenizer`, `characters`).

    Empty if fitgpt did not write the folder, or if the characters are missing.
    """
    name = read_json_object(folder / "config.json").get(TOKENIZER_KEY)
    if name in ("gpt2", "bytes"):
        return {"tokenizer": name}
    model = read_json_object(folder / FILE_NAMES[0]).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if name != "chars" or not isinstance(vocabulary, dict):
        return {}
    characters = sorted(vocabulary, key=lambda character: str(vocabulary[character]).zfill(12))
    complete = all(len(character) == 1 and vocabulary[character] == token
                   for token, character in enumerate(characters))
    return {"tokenizer": "chars", "characters": "".join(characters)} if complete else {}
