"""A tokenizer to the files that transformers loads it from, and an exported folder back to its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.files import read_json_object
from .tokenizers import END_OF_TEXT, Tokenizer

FILE_NAMES = ("tokenizer.json", "tokenizer_config.json")
VERSION_KEY = "fitgpt_version"      # in config.json and tokenizer_config.json: marks files that fitgpt wrote
TOKENIZER_KEY = "fitgpt_tokenizer"  # in config.json: the name of the tokenizer

# GPT-2 writes each byte as one printable character: the printable ones of Latin-1 as themselves, the others from
# U+0100 on (bytes_to_unicode in OpenAI's encoder.py).
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE}
_BYTE_CHARACTERS |= {byte: chr(256 + number)
                     for number, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


def tokenizer_files(tokenizer: Tokenizer, block_size: int) -> dict[str, dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json; empty if two characters have the same text."""
    if tokenizer.name == "chars":
        characters = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        if len(set(characters)) < len(characters):
            return {}  # lone surrogates, which JSON in UTF-8 cannot hold
        parts = _character_level(characters)
    else:
        ordinary = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
                    if token != tokenizer.end_of_text]
        parts = _byte_level_bpe({each: token for token, each in enumerate(ordinary)},
                                split_words=tokenizer.name == "gpt2")
    end_of_text = tokenizer.end_of_text
    special = [] if end_of_text is None else [
        {"id": end_of_text, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
              "clean_up_tokenization_spaces": False, VERSION_KEY: __version__}
    if end_of_text is not None:
        config |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    vocabulary = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
                  "post_processor": None, **parts}
    return dict(zip(FILE_NAMES, (vocabulary, config), strict=True))


def _character_level(characters: list[str]) -> dict[str, Any]:
    """One token per character. An unknown character is an error in transformers too: there is no token for it."""
    vocabulary = {character: token for token, character in enumerate(characters)}
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated",
                              "invert": False},
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}}


def _byte_level_bpe(ranks: Mapping[bytes, int], *, split_words: bool) -> dict[str, Any]:
    """Byte-level BPE. `split_words`: split the text into words first, as GPT-2 does."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split_words}
    return {"pre_tokenizer": level, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {_printable(token): rank for token, rank in ranks.items()},
                      "merges": [" ".join(map(_printable, _last_merge(token, ranks)))
                                 for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]}}


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
