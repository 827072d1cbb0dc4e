"""Where weights come from: a run of fitgpt, nanoGPT's ckpt.pt, a Hugging Face folder, or a GPT-2 by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config.run_config import gpt2_shapes
from ..core.errors import CheckpointError
from ..interop import hf_tokenizer
from ..nouns import GPTConfig, SplitLoss
from ..runs.folder import holds_run
from ..training import checkpoint
from . import huggingface, nanogpt_checkpoint
from .model import GPT


@dataclass(frozen=True)
class Source:
    """Weights and what came with them."""

    gpt: GPTConfig
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)  # empty: none came
    state: dict[str, Any] = field(default_factory=dict)         # of the training; empty: weights alone
    config: dict[str, Any] = field(default_factory=dict)        # of the run, under RunConfig's names
    place: str = ""
    notes: tuple[str, ...] = ()


def from_run(out_dir: Path, which: str | int = "last", *, weights_only: bool = False) -> Source:
    return _from_checkpoint(checkpoint.load(out_dir / "checkpoints", which, weights_only=weights_only))


def _from_checkpoint(loaded: checkpoint.Loaded) -> Source:
    return Source(GPTConfig(**loaded.state["gpt"]), loaded.model, loaded.optimizer, loaded.state,
                  loaded.state["config"], str(loaded.path), loaded.notes)


def from_nanogpt(path: Path) -> Source:
    gpt, weights, optimizer, theirs = nanogpt_checkpoint.read_ckpt(path)
    best = SplitLoss("val", theirs["best_val_loss"], math.inf, 0, gpt.block_size)
    state = {"step": theirs["step"], "best": asdict(best)}
    return Source(gpt, weights, optimizer or {}, state, theirs["config"], str(path))


def from_hugging_face(path: Path) -> Source:
    gpt, weights, notes = huggingface.read_folder(path)
    return Source(gpt, weights, state=hf_tokenizer.spoken_in(path), place=str(path), notes=notes)


def open_any(place: str, which: str | int) -> Source:
    """Weights alone, from whatever the user names: a run's folder, a ckpt.pt or its folder, a GPT-2."""
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


def cropped(source: Source, block_size: int) -> Source:
    """The same weights with fewer learned positions, as nanoGPT's crop_block_size does."""
    if block_size >= source.gpt.block_size:
        return source
    name = "transformer.wpe.weight"
    return replace(source, gpt=replace(source.gpt, block_size=block_size),
                   weights={**source.weights, name: source.weights[name][:block_size]})


def fill(model: GPT, weights: Mapping[str, Tensor], place: str) -> None:
    """Copies weights into a model, after every name and shape has been compared."""
    nanogpt_checkpoint.refuse_differences(model.config, weights, place, CheckpointError)
    model.load_weight_tensors(weights)
