"""Reads weights from a run of fitgpt, nanoGPT's ckpt.pt, a Hugging Face folder, or GPT-2 by name."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config.architectures import GPTConfig
from ..config.run_config import gpt2_shapes
from ..core.errors import CheckpointError
from ..data import tokenizers
from ..engine import huggingface, nanogpt_checkpoint
from ..runs.folder import holds_run
from ..runs.metrics import SplitLoss
from . import checkpoint


@dataclass(frozen=True)
class WeightSource:
    """Weights and what is stored with them."""

    gpt: GPTConfig
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)  # empty: none
    state: dict[str, Any] = field(default_factory=dict)         # of the training; empty: weights only
    config: dict[str, Any] = field(default_factory=dict)        # of the run, by RunConfig's names
    place: str = ""
    notes: tuple[str, ...] = ()


def from_run(out_dir: Path, which: str | int = "last", *, weights_only: bool = False) -> WeightSource:
    return _from_checkpoint(checkpoint.load(out_dir / "checkpoints", which, weights_only=weights_only))


def _from_checkpoint(loaded: checkpoint.Loaded) -> WeightSource:
    return WeightSource(GPTConfig(**loaded.state["gpt"]), loaded.model, loaded.optimizer, loaded.state,
                  loaded.state["config"], str(loaded.path), loaded.notes)


def from_nanogpt(path: Path) -> WeightSource:
    gpt, weights, optimizer, theirs = nanogpt_checkpoint.read_ckpt(path)
    best = SplitLoss("val", theirs["best_val_loss"], math.inf, 0, gpt.block_size)
    state = {"step": theirs["step"], "best": asdict(best)}
    return WeightSource(gpt, weights, optimizer or {}, state, theirs["config"], str(path))


def from_hugging_face(path: Path) -> WeightSource:
    gpt, weights, notes = huggingface.read_folder(path)
    return WeightSource(gpt, weights, state=tokenizers.tokenizer_of_export(path), place=str(path), notes=notes)


def open_weights(place: str, which: str | int) -> WeightSource:
    """Weights without optimizer state, from a run's folder, a checkpoint, a ckpt.pt or its folder, or a GPT-2 name.

    `which`: the checkpoint of a run: "last", "best" or a step."""
    path = Path(place)
    if place in gpt2_shapes and not path.exists():
        return from_hugging_face(huggingface.find_gpt2(place))
    if (path / checkpoint.STATE).is_file():
        return _from_checkpoint(checkpoint.load_folder(path, weights_only=True))
    if path.suffix == ".pt":
        return from_nanogpt(path)
    if holds_run(path):
        return from_run(path, which, weights_only=True)
    if (path / "ckpt.pt").is_file():
        return from_nanogpt(path / "ckpt.pt")
    if (path / "config.json").is_file():
        return from_hugging_face(path)
    if path.suffix == ".py":
        raise CheckpointError(f"{place} is a config file, and holds no weights.",
                              f"To evaluate what it names: fitgpt train {place} --eval_only")
    raise CheckpointError(
        f"{place} holds no weights: no checkpoint of fitgpt, no ckpt.pt of nanoGPT, no Hugging Face model.",
        "Name the folder of a run (its --out_dir), a ckpt.pt, or gpt2, gpt2-medium, gpt2-large, gpt2-xl.")


def cropped(source: WeightSource, block_size: int) -> WeightSource:
    """The same weights with fewer learned positions, like nanoGPT's crop_block_size."""
    if block_size >= source.gpt.block_size:
        return source
    name = "transformer.wpe.weight"
    return replace(source, gpt=replace(source.gpt, block_size=block_size),
                   weights={**source.weights, name: source.weights[name][:block_size]})
