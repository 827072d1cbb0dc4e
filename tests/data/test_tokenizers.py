"""Text to tokens and back, also one token at a time."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fitgpt.core.errors import DataError
from fitgpt.data import tokenizers
from fitgpt.data.tokenizers import Chars, Decoder, Tokenizer, for_dataset, get

Make = Callable[..., Path]
TEXT = "def f(x):\n    return 'naïve 🙂 日本語'  # tab\t\0 end"


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode_utf8(text.encode()).tolist() == tokens
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    decoder = Decoder(tokenizer)
    assert "".join(decoder.feed(token) for token in tokens) + decoder.finish() == text


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = get("bytes")
    check_round_trip(tokenizer, TEXT)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode_utf8(b"ab").dtype == np.uint16


def test_gpt2_is_openais(gpt2: None) -> None:
    tokenizer = get("gpt2")
    check_round_trip(tokenizer, TEXT)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)


def test_the_end_of_text_is_a_token_only_where_asked_for(gpt2: None) -> None:
    for name in ("bytes", "gpt2"):
        tokenizer = get(name)
        end = tokenizer.end_of_text
        assert end not in tokenizer.encode("a<|endoftext|>b")
        assert end not in tokenizer.encode_utf8(b"a<|endoftext|>b")
        [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")
        assert tokenizer.encode("a<|endoftext|>b", special=True) == [a, end, b]
        assert tokenizer.encode("<|endoftext|>", special=True) == [end]
        assert tokenizer.decode([a, end, b]) == "a<|endoftext|>b"


def test_a_character_appears_when_its_last_token_comes(gpt2: None) -> None:
    for name in ("bytes", "gpt2"):
        tokenizer = get(name)
        tokens = tokenizer.encode("🙂")
        assert len(tokens) > 1
        decoder = Decoder(tokenizer)
        assert [decoder.feed(token) for token in tokens] == [""] * (len(tokens) - 1) + ["🙂"]
        cut = Decoder(tokenizer)
        assert cut.feed(tokens[0]) + cut.finish() == "\ufffd"


def test_a_token_of_the_padding_is_shown_and_does_not_crash(gpt2: None) -> None:
    for tokenizer, beyond in ((get("bytes"), 300), (get("gpt2"), 50300), (Chars("abc", "nano"), 3)):
        assert tokenizer.decode([beyond, -1]) == "\ufffd\ufffd"
        assert Decoder(tokenizer).feed(beyond) == "\ufffd"


def test_characters_come_from_nanogpts_meta(make_bins: Make) -> None:
    folder = make_bins(np.zeros(10), np.zeros(10), characters="\n abé")
    tokenizer = for_dataset("nano")
    check_round_trip(tokenizer, "a b\né")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == ("chars", 5, None)
    with pytest.raises(DataError) as refused:
        tokenizer.encode("a?!b")
    assert "'!', '?'" in refused.value.what
    assert str(folder / "meta.pkl") in refused.value.what


def test_a_meta_without_characters_cannot_tokenize(make_bins: Make) -> None:
    import pickle

    folder = make_bins(np.zeros(10), np.zeros(10))
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 100}))
    with pytest.raises(DataError, match="no characters"):
        for_dataset("nano")


def test_a_dataset_knows_its_tokenizer(make_shards: Make, make_bins: Make, gpt2: None) -> None:
    make_shards(np.arange(10), np.arange(10))
    make_bins(np.arange(10), np.arange(10))
    assert for_dataset("made").name == "bytes"
    assert for_dataset("nano").name == "gpt2"  # as nanoGPT's sample.py assumes
    with pytest.raises(DataError, match="no dataset"):
        for_dataset("missing")


def test_an_unknown_tokenizer_names_those_there_are() -> None:
    with pytest.raises(DataError, match="gpt2 and bytes"):
        get("gpt-2")


def test_without_network_and_files_the_error_says_how_to_bring_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tiktoken.load
    import tiktoken.registry

    def no_network(address: str) -> bytes:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(DataError) as refused:
        get("gpt2")
    assert "no route to host" in refused.value.what
    assert "TIKTOKEN_CACHE_DIR" in refused.value.fix
    assert "--tokenizer=bytes" in refused.value.fix


def test_without_tiktoken_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "tiktoken":
            raise ImportError(name)
        return real_import(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError) as refused:
        tokenizers.get("gpt2")
    assert "pip install tiktoken" in refused.value.fix
