"""The tokenizer's files in an export: transformers turns text into the very tokens the model was trained on."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from fitgpt.core.errors import UsageError
from fitgpt.data.tokenizers import Chars, Tokenizer, get
from fitgpt.engine import huggingface
from fitgpt.engine.nanogpt_checkpoint import param_shapes
from fitgpt.interop import hf_tokenizer
from fitgpt.nouns import GPTConfig

TEXTS = ("", " ", "Hello, world", "  two  spaces\n\n\ttab\r\n", "naïve café 你好 🙂 e\u0301",
         "don't we'll 12345 x=y**2", "<|endoftext|>", "a<|endoftext|>\nb", "\x00\x7f\u00a0\u00ad",
         inspect.getsource(inspect.getsource))


def opened(folder: Path, tokenizer: Tokenizer) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder.mkdir()
    for name, content in hf_tokenizer.files_of(tokenizer, 64).items():
        (folder / name).write_text(json.dumps(content))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_transformers_has_the_same_tokens_and_text(tmp_path: Path, gpt2: None, name: str) -> None:
    ours = get(name)
    theirs = opened(tmp_path / name, ours)
    for text in TEXTS:
        tokens = theirs(text)["input_ids"]
        assert tokens == ours.encode(text, special=True)
        assert theirs.decode(tokens) == text
    assert theirs.eos_token_id == ours.end_of_text
    assert len(theirs) == ours.vocab_size


def test_characters_are_tokens_there_too_and_a_strange_one_is_an_error(tmp_path: Path) -> None:
    ours = Chars("\n !é🙂ab", "a test")
    theirs = opened(tmp_path / "chars", ours)
    text = "a b!\n\n  é🙂ba"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    with pytest.raises(Exception, match="UNK"):
        theirs("z")


def test_characters_that_no_file_can_hold_leave_the_files_out() -> None:
    assert hf_tokenizer.files_of(Chars("a\ud800\ud801", "a test"), 64) == {}


# ---- in a folder

SHAPE = GPTConfig(block_size=16, vocab_size=4, n_layer=1, n_head=2, n_embd=8)


def export(folder: Path, tokenizer: Tokenizer) -> Path:
    import torch

    weights = {name: torch.zeros(shape) for name, shape in param_shapes(SHAPE).items()}
    return huggingface.write_folder(folder, SHAPE, weights, tokenizer=tokenizer.name,
                           files=hf_tokenizer.files_of(tokenizer, SHAPE.block_size))


def test_an_export_says_which_tokens_it_speaks(tmp_path: Path) -> None:
    assert hf_tokenizer.spoken_in(export(tmp_path / "b", get("bytes"))) == {"tokenizer": "bytes"}
    many = "".join(map(chr, range(40, 60)))  # token 10 comes after token 9, not after token 1
    letters = export(tmp_path / "c", Chars(many, "a test"))
    assert hf_tokenizer.spoken_in(letters) == {"tokenizer": "chars", "characters": many}
    for damage in ("{}", '{"model": {"vocab": {"ab": 0}}}', '{"model": {"vocab": {"a": 1}}}', '{"model": 3}'):
        (letters / "tokenizer.json").write_text(damage)
        assert hf_tokenizer.spoken_in(letters) == {}
    assert hf_tokenizer.spoken_in(tmp_path) == {}


def test_an_export_with_its_tokenizer_is_replaced_but_not_with_anothers(tmp_path: Path) -> None:
    for _ in range(2):
        export(tmp_path / "out", get("bytes"))
    (tmp_path / "out" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match="not overwritten"):
        export(tmp_path / "out", get("bytes"))
