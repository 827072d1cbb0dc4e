"""The tokenizer's files in an export: transformers gives the same tokens as fitgpt."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from fitgpt.config.architectures import GPTConfig, parameter_shapes
from fitgpt.core.errors import UsageError
from fitgpt.data import tokenizers
from fitgpt.data.tokenizers import CharTokenizer, Tokenizer, get_tokenizer
from fitgpt.engine import huggingface

TEXTS = ("", " ", "Hello, world", "  two  spaces\n\n\ttab\r\n", "naïve café 你好 🙂 e\u0301",
         "don't we'll 12345 x=y**2", "<|endoftext|>", "a<|endoftext|>\nb", "\x00\x7f\u00a0\u00ad",
         inspect.getsource(inspect.getsource))


def opened(folder: Path, tokenizer: Tokenizer) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder.mkdir()
    for name, content in tokenizers.tokenizer_files(tokenizer, 64).items():
        (folder / name).write_text(json.dumps(content))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_transformers_gives_the_same_tokens_and_text(tmp_path: Path, gpt2: None, name: str) -> None:
    ours = get_tokenizer(name)
    theirs = opened(tmp_path / name, ours)
    for text in TEXTS:
        tokens = theirs(text)["input_ids"]
        assert tokens == ours.encode(text, special=True)
        assert theirs.decode(tokens) == text
    assert theirs.eos_token_id == ours.end_of_text
    assert len(theirs) == ours.vocab_size


def test_transformers_gives_the_same_characters_and_rejects_an_unknown_one(tmp_path: Path) -> None:
    ours = CharTokenizer("\n !é🙂ab", "a test")
    theirs = opened(tmp_path / "chars", ours)
    text = "a b!\n\n  é🙂ba"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    with pytest.raises(Exception, match="UNK"):
        theirs("z")


def test_lone_surrogates_give_no_tokenizer_files() -> None:
    assert tokenizers.tokenizer_files(CharTokenizer("a\ud800\ud801", "a test"), 64) == {}


# ---- an exported folder

SHAPE = GPTConfig(block_size=16, vocab_size=4, n_layer=1, n_head=2, n_embd=8)


def export(folder: Path, tokenizer: Tokenizer) -> Path:
    import torch

    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(SHAPE).items()}
    return huggingface.write_folder(folder, SHAPE, weights, tokenizer=tokenizer.name,
                           files=tokenizers.tokenizer_files(tokenizer, SHAPE.block_size))


def test_the_tokenizer_of_an_export_is_found(tmp_path: Path) -> None:
    assert tokenizers.tokenizer_of_export(export(tmp_path / "b", get_tokenizer("bytes"))) == {"tokenizer": "bytes"}
    many = "".join(map(chr, range(40, 60)))  # sorted as numbers: token 10 follows token 9, not token 1
    letters = export(tmp_path / "c", CharTokenizer(many, "a test"))
    assert tokenizers.tokenizer_of_export(letters) == {"tokenizer": "chars", "characters": many}
    for damage in ("{}", '{"model": {"vocab": {"ab": 0}}}', '{"model": {"vocab": {"a": 1}}}', '{"model": 3}'):
        (letters / "tokenizer.json").write_text(damage)
        assert tokenizers.tokenizer_of_export(letters) == {}
    assert tokenizers.tokenizer_of_export(tmp_path) == {}


def test_an_export_is_replaced_unless_its_tokenizer_is_not_from_fitgpt(tmp_path: Path) -> None:
    for _ in range(2):
        export(tmp_path / "out", get_tokenizer("bytes"))
    (tmp_path / "out" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match="not overwritten"):
        export(tmp_path / "out", get_tokenizer("bytes"))
