"""Which files let transformers turn text into a model's tokens? And which tokens does an export of ours speak?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import __version__
from ..data.tokenizers import END_OF_TEXT, Tokenizer
from ..runs.model_shape import read_object

NAMES = ("tokenizer.json", "tokenizer_config.json")
OURS = "fitgpt_version"      # a key of config.json and tokenizer_config.json: it marks them as written by us
SPEAKS = "fitgpt_tokenizer"  # a key of config.json: the name of the tokenizer

# GPT-2 writes every byte as one printable sign: those of Latin-1 stand for themselves, the others follow from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_SIGNS = {byte: chr(byte) for byte in _PRINTABLE}
_SIGNS |= {byte: chr(256 + number) for number, byte in enumerate(byte for byte in range(256) if byte not in _SIGNS)}


def files_of(tokenizer: Tokenizer, block_size: int) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; empty where characters have no text of their own."""
    if tokenizer.name == "chars":
        characters = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        if len(set(characters)) < len(characters):
            return {}  # halves of surrogate pairs, which no file can hold
        parts = _one_token_a_character(characters)
    else:
        ordinary = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
                    if token != tokenizer.end_of_text]
        parts = _byte_pairs({each: token for token, each in enumerate(ordinary)}, words=tokenizer.name == "gpt2")
    ends = tokenizer.end_of_text
    special = [] if ends is None else [{"id": ends, "content": END_OF_TEXT, "single_word": False, "lstrip": False,
                                        "rstrip": False, "normalized": False, "special": True}]
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size,
            "clean_up_tokenization_spaces": False, OURS: __version__}
    if ends is not None:
        told |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
             "post_processor": None, **parts}
    return dict(zip(NAMES, (whole, told), strict=True))


def _one_token_a_character(characters: list[str]) -> dict[str, Any]:
    """A character that the model never saw is an error there too: there is no token for it."""
    vocabulary = {character: token for token, character in enumerate(characters)}
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated",
                              "invert": False},
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}}


def _byte_pairs(ranks: Mapping[bytes, int], *, words: bool) -> dict[str, Any]:
    """`words`: text is first cut into words as GPT-2 cuts it; byte for byte there is nothing to cut."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    return {"pre_tokenizer": level, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {_signs(token): rank for token, rank in ranks.items()},
                      "merges": [" ".join(map(_signs, _last_merge(token, ranks)))
                                 for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]}}


def _signs(token: bytes) -> str:
    return "".join(_SIGNS[byte] for byte in token)


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two parts that merging by rank leaves before the token itself."""
    parts = [token[place:place + 1] for place in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        first = min(range(len(joined)), key=joined.__getitem__)
        parts[first:first + 2] = [parts[first] + parts[first + 1]]
    return parts


def spoken_in(folder: Path) -> dict[str, Any]:
    """As a checkpoint's state has it; empty where the folder is not an export of ours, or lost its characters."""
    name = read_object(folder / "config.json").get(SPEAKS)
    if name in ("gpt2", "bytes"):
        return {"tokenizer": name}
    model = read_object(folder / NAMES[0]).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if name != "chars" or not isinstance(vocabulary, dict):
        return {}
    characters = sorted(vocabulary, key=lambda character: str(vocabulary[character]).zfill(12))
    whole = all(len(character) == 1 and vocabulary[character] == token for token, character in enumerate(characters))
    return {"tokenizer": "chars", "characters": "".join(characters)} if whole else {}
