"""Configs for the tests of `fitgpt plan`, its output, and a dataset of characters."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "config"
NOTES_77M = [str(CONFIG / "notes_77m.py"), "--trainer=nanogpt", "--compile=True"]
# config/train_fineweb.py as in the notes that fitgpt began with.
NOTES_CONFIG = """\
n_layer = 12
n_head = 12
n_embd = 576
batch_size = 16
block_size = 1024
eval_batch_size = 4
eval_block_size = 512
eval_iters = 50
grad_checkpoint = True
dtype = 'float16'
compile = True
"""
SMALL = ["--n_layer=2", "--n_head=4", "--n_embd=256", "--batch_size=8", "--block_size=256", "--max_iters=100"]


class CommandOutput:
    """`err`: with the lines of a wrapped error joined."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err.replace("\n" + " " * len("fitgpt: "), " ")

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def write_chars(folder: Path, train: int, val: int = 1000) -> None:
    """A dataset like nanoGPT's shakespeare_char: 65 characters."""
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(bytes(2 * train))
    (folder / "val.bin").write_bytes(bytes(2 * val))
    letters = [chr(33 + number) for number in range(65)]
    (folder / "meta.pkl").write_bytes(pickle.dumps({
        "vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {letter: n for n, letter in enumerate(letters)}}))
