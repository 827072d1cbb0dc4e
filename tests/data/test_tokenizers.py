"""Text to tokens and back, all at once and one token at a time."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fitgpt.core.errors import DataError
from fitgpt.data.tokenizers import CharTokenizer, StreamDecoder, Tokenizer, get_tokenizer, tokenizer_of_dataset

Make = Callable[..., Path]
TEXT = "def f(x):\n    return 'naïve 🙂 日本語'  # tab\t\0 end"


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode_utf8(text.encode()).tolist() == tokens
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.feed(token) for token in tokens) + decoder.finish() == text


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = get_tokenizer("bytes")
    check_round_trip(tokenizer, TEXT)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode_utf8(b"ab").dtype == np.uint16


def test_gpt2_tokens_equal_those_of_openai(gpt2: None) -> None:
    tokenizer = get_tokenizer("gpt2")
    check_round_trip(tokenizer, TEXT)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)


def test_end_of_text_becomes_a_token_only_with_special(gpt2: None) -> None:
    for name in ("bytes", "gpt2"):
        tokenizer = get_tokenizer(name)
        end = tokenizer.end_of_text
        assert end not in tokenizer.encode("a<|endoftext|>b")
        assert end not in tokenizer.encode_utf8(b"a<|endoftext|>b")
        [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")
        assert tokenizer.encode("a<|endoftext|>b", special=True) == [a, end, b]
        assert tokenizer.encode("<|endoftext|>", special=True) == [end]
        assert tokenizer.decode([a, end, b]) == "a<|endoftext|>b"


def test_a_character_of_several_tokens_appears_with_the_last_of_them(gpt2: None) -> None:
    for name in ("bytes", "gpt2"):
        tokenizer = get_tokenizer(name)
        tokens = tokenizer.encode("🙂")
        assert len(tokens) > 1
        decoder = StreamDecoder(tokenizer)
        assert [decoder.feed(token) for token in tokens] == [""] * (len(tokens) - 1) + ["🙂"]
        cut = StreamDecoder(tokenizer)
        assert cut.feed(tokens[0]) + cut.finish() == "\ufffd"


def test_a_token_beyond_the_vocabulary_decodes_to_the_replacement_character(gpt2: None) -> None:
    for tokenizer, beyond in ((get_tokenizer("bytes"), 300), (get_tokenizer("gpt2"), 50300),
                              (CharTokenizer("abc", "nano"), 3)):
        assert tokenizer.decode([beyond, -1]) == "\ufffd\ufffd"
        assert StreamDecoder(tokenizer).feed(beyond) == "\ufffd"


def test_the_char_tokenizer_is_read_from_meta_pkl(make_bins: Make) -> None:
    folder = make_bins(np.zeros(10), np.zeros(10), characters="\n abé")
    tokenizer = tokenizer_of_dataset("nano")
    check_round_trip(tokenizer, "a b\né")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == ("chars", 5, None)
    with pytest.raises(DataError) as raised:
        tokenizer.encode("a?!b")
    assert "'!', '?'" in raised.value.what
    assert str(folder / "meta.pkl") in raised.value.what


def test_a_meta_pkl_without_characters_is_rejected(make_bins: Make) -> None:
    import pickle

    folder = make_bins(np.zeros(10), np.zeros(10))
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 100}))
    with pytest.raises(DataError, match="no characters"):
        tokenizer_of_dataset("nano")


def test_the_tokenizer_of_a_dataset_is_found(make_shards: Make, make_bins: Make, gpt2: None) -> None:
    make_shards(np.arange(10), np.arange(10))
    make_bins(np.arange(10), np.arange(10))
    assert tokenizer_of_dataset("made").name == "bytes"
    assert tokenizer_of_dataset("nano").name == "gpt2"  # as nanoGPT's sample.py assumes
    with pytest.raises(DataError, match="no dataset"):
        tokenizer_of_dataset("missing")


def test_an_unknown_tokenizer_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="gpt2 and bytes"):
        get_tokenizer("gpt-2")


def test_without_network_and_cached_files_the_fix_describes_how_to_copy_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tiktoken.load
    import tiktoken.registry

    def no_network(address: str) -> bytes:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(DataError) as raised:
        get_tokenizer("gpt2")
    assert "no route to host" in raised.value.what
    assert "TIKTOKEN_CACHE_DIR" in raised.value.fix
    assert "--tokenizer=bytes" in raised.value.fix


def test_without_tiktoken_the_fix_is_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "tiktoken":
            raise ImportError(name)
        return real_import(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError) as raised:
        get_tokenizer("gpt2")
    assert "pip install tiktoken" in raised.value.fix
