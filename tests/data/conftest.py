from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fitgpt.data import manifest
from fitgpt.data.writing import SplitWriter


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`data/` is looked for in the current folder, and caches in the user's."""
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
        made = manifest.Manifest("bytes", 65536, "uint16", shards, {"train": 1, "val": 1}, {}, {}, "a test",
                                 "fitgpt prepare x --name=made")
        (folder / manifest.NAME).write_text(manifest.to_json(made))
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
