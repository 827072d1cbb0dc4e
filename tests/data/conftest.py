from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fitgpt.data.manifest import MANIFEST_NAME, Manifest, to_json
from fitgpt.data.writer import SplitWriter


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`data/` is searched in the current folder, and the cache in XDG_CACHE_HOME."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make_shards() -> Callable[..., Path]:
    """A prepared dataset of given tokens: make_shards(train=[…], val=[…], shard_tokens=…)."""

    def make(train: np.ndarray, val: np.ndarray, shard_tokens: int = 1000, name: str = "made") -> Path:
        folder = Path("data") / name
        folder.mkdir(parents=True, exist_ok=True)
        shards = {}
        for split, tokens in (("train", train), ("val", val)):
            writer = SplitWriter(folder, split, "bytes", 65536, shard_tokens)
            writer.add(np.asarray(tokens).astype(np.uint16))
            writer.finish()
            shards[split] = tuple(writer.shards)
        made = Manifest("bytes", 65536, "uint16", shards, {"train": 1, "val": 1}, {}, {}, "a test",
                        "fitgpt prepare x --name=made")
        (folder / MANIFEST_NAME).write_text(to_json(made))
        return folder

    return make


@pytest.fixture
def make_bins() -> Callable[..., Path]:
    """A dataset as nanoGPT's prepare.py writes it."""

    def make(train: np.ndarray, val: np.ndarray, characters: str = "", name: str = "nano") -> Path:
        folder = Path("data") / name
        folder.mkdir(parents=True, exist_ok=True)
        np.asarray(train).astype("<u2").tofile(folder / "train.bin")
        np.asarray(val).astype("<u2").tofile(folder / "val.bin")
        if characters:
            meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)),
                    "stoi": {character: token for token, character in enumerate(characters)}}
            (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
        return folder

    return make
