"""Trained weights: read from a run of fitgpt, nanoGPT's ckpt.pt, a Hugging Face folder or GPT-2 by name; and in use: a
model on its device, the tokenizer it was trained with, evaluation and export.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from ..config.architectures import GPTConfig
from ..config.command_options import EvalOptions
from ..config.run_config import GPT2_VOCAB, RunConfig, gpt2_shapes
from ..core.errors import CheckpointError, DataError, UsageError
from ..data import tokenizers
from ..data.dataset import open_dataset
from ..data.shards import summarise
from ..data.tokenizers import StreamDecoder, Tokenizer
from ..engine import huggingface
from ..engine.batches import evaluation_splits
from ..engine.device import DeviceChoice, compiler_message, resolve_device
from ..engine.evaluate import evaluate
from ..engine.model import DTYPES, GPT, build_model
from ..engine.nanogpt_checkpoint import read_nanogpt
from ..engine.sample import SamplingOptions, generate
from ..engine.weights import WeightSource, checked_parameters, fill
from ..runs.folder import STATE, holds_run, recorded_config
from ..runs.metrics import Evaluation
from . import checkpoint

Warn = Callable[[str], None]
Result = TypeVar("Result")


# ---- reading

def from_run(out_dir: Path, which: str | int = "last", *, weights_only: bool = False) -> WeightSource:
    return _from_checkpoint(checkpoint.load(out_dir / "checkpoints", which, weights_only=weights_only))


def _from_checkpoint(loaded: checkpoint.Checkpoint) -> WeightSource:
    missing = [key for key in ("step", "gpt", "config", "scaler") if key not in loaded.state]
    if missing:
        raise CheckpointError(f"{loaded.path} is not a checkpoint of `fitgpt train`: it lacks {', '.join(missing)}.",
                              "Use another checkpoint.")
    shape = GPTConfig(**loaded.state["gpt"])
    weights = checked_parameters(shape, loaded.model, loaded.path, CheckpointError)  # before a model of it is made
    return WeightSource(shape, weights, loaded.optimizer, loaded.state, loaded.state["config"], str(loaded.path),
                        loaded.notes)


def open_weights(place: str, which: str | int) -> WeightSource:
    """Weights without optimizer state, from a run's folder, a checkpoint, a ckpt.pt or its folder, or a GPT-2 name.

    `which`: the checkpoint of a run: "last", "best" or a step."""
    path = Path(place)
    if place in gpt2_shapes and not path.exists():
        return huggingface.read_folder(huggingface.find_gpt2(place))
    if (path / STATE).is_file():
        return _from_checkpoint(checkpoint.load_folder(path))
    if path.suffix == ".pt":
        return read_nanogpt(path)
    if holds_run(path):
        return from_run(path, which, weights_only=True)
    if (path / "ckpt.pt").is_file():
        return read_nanogpt(path / "ckpt.pt")
    if (path / "config.json").is_file():
        return huggingface.read_folder(path)
    if path.suffix == ".py":
        raise CheckpointError(f"{place} is a config file, and holds no weights.",
                              f"To evaluate what it names: fitgpt train {place} --eval_only")
    what = ("holds no weights: no checkpoint of fitgpt, no ckpt.pt of nanoGPT, no Hugging Face model" if path.exists()
            else "does not exist")
    raise CheckpointError(f"{place} {what}.", "Name the folder of a run (its --out_dir), a ckpt.pt,\n"
                                              "or gpt2, gpt2-medium, gpt2-large, gpt2-xl.")


def cropped(source: WeightSource, block_size: int) -> WeightSource:
    """The same weights with fewer learned positions, like nanoGPT's crop_block_size."""
    if block_size >= source.gpt.block_size:
        return source
    name = "transformer.wpe.weight"
    return replace(source, gpt=replace(source.gpt, block_size=block_size),
                   weights={**source.weights, name: source.weights[name][:block_size]})


# ---- a model on its device

@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, and what generates text with it. `model` is a torch module: `model(idx, targets)`."""

    model: GPT
    source: WeightSource

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the weights were trained with; DataError if it is not known."""
        return tokenizer_of(self.source, warnings.warn)

    def generate(self, prompt: str = "\n", max_new_tokens: int = 500, *, temperature: float = 0.8, top_k: int = 200,
                 top_p: float = 1.0, seed: int = 1337) -> str:
        """The prompt and the text after it, as `fitgpt sample` prints them; the same seed gives the same text."""
        sampling = SamplingOptions(temperature, top_k, top_p)
        return "".join(stream_text(self.model, self.tokenizer, prompt, max_new_tokens, sampling, seed))


def load(run: str | os.PathLike[str], which: str = "", *, device: str = "auto", dtype: str = "auto") -> TrainedModel:
    """The model of a run, a checkpoint, nanoGPT's ckpt.pt, a Hugging Face folder or a GPT-2 name, ready to use.

    `which`: "last", "best" or a step; without it as in `open_checkpoint`.
    """
    source = open_checkpoint(os.fspath(run), which)
    return TrainedModel(model_on_device(source, device, dtype, False)[0], source)


def stream_text(model: GPT, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, sampling: SamplingOptions,
                seed: int) -> Iterator[str]:
    """Yields the prompt, then the text of each new token, then what is left of an incomplete character."""
    tokens = tokenizer.encode(prompt, special=True)
    if not tokens:
        tokens = [tokenizer.end_of_text if tokenizer.end_of_text is not None else 0]
    decoder = StreamDecoder(tokenizer)
    yield "".join(decoder.feed(token) for token in tokens)
    for token in generate(model, tokens, max_new_tokens, sampling, seed, tokenizer.vocab_size):
        yield decoder.feed(token)
    yield decoder.finish()


def open_checkpoint(place: str, which: str) -> WeightSource:
    """The weights at `place`. Without `which`: what nanoGPT would have in its ckpt.pt, the last checkpoint, or the best
    one of a run with always_save_checkpoint=False."""
    if not which:
        recorded = recorded_config(place) if Path(place).is_dir() else None
        which = "last" if (recorded or {}).get("always_save_checkpoint", True) else "best"
    return open_weights(place, int(which) if which.isdecimal() else which)


def model_on_device(source: WeightSource, device: str, dtype: str, compile: bool | str) -> tuple[GPT, DeviceChoice]:
    """The model in evaluation mode on its device, and how the device was chosen."""
    choice = resolve_device(device, dtype, compile)
    model = build_model(replace(source.gpt, dropout=0.0), torch.device(choice.device), seed=0)
    fill(model, source.weights, source.place)
    model.compute_dtype = DTYPES[choice.dtype]
    if choice.compile:
        model.compile()
    return model.eval(), choice


def with_eager_fallback(compute: Callable[[bool | str], Result], compile: bool | str, warn: Warn) -> Result:
    """`compute(compile)`; if the compiler fails in it, `compute(False)`, as `fitgpt train` starts again without it."""
    try:
        return compute(compile)
    except Exception as error:
        said = compiler_message(error)
        if not said:
            raise
    warn(f"compile: False, because torch.compile failed: {said}.")
    return compute(False)


# ---- evaluation

def evaluate_checkpoint(source: WeightSource, options: EvalOptions, warn: Warn) -> tuple[Evaluation, DeviceChoice]:
    """The loss of the weights on the data they were trained on, or on --dataset."""
    known = {key: value for key, value in source.config.items() if key in RunConfig.__dataclass_fields__}
    recorded = RunConfig.from_dict(known)
    if not options.dataset and not known:
        raise UsageError(f"{options.run} does not say which data to evaluate on.", "Add --dataset=NAME or a path.")
    dataset = open_dataset(options.dataset or recorded.dataset)
    block = options.block_size or min(recorded.eval_block, source.gpt.block_size)
    if block > source.gpt.block_size:
        raise UsageError(f"--block_size={block}: the model has learned {source.gpt.block_size} positions.",
                         f"--block_size={source.gpt.block_size} or less.")
    trained_on, given = source.state.get("tokenizer", ""), dataset.summary.tokenizer
    if given != trained_on and "unknown" not in (given, trained_on) and trained_on:
        raise DataError(f"{options.dataset or recorded.dataset} is made of {given} tokens, and {options.run} was "
                        f"trained on {trained_on} tokens: the same ids mean different text.",
                        f"Prepare the text again with --tokenizer={trained_on}.")
    names = ("train", "val") if options.split == "both" else (options.split,)
    dataset.verify(source.gpt.vocab_size, lambda sentence: print(sentence, file=sys.stderr, flush=True), names)
    batch = options.batch_size or recorded.batch_size
    windows = (options.eval_iters or recorded.eval_iters) * batch
    splits = evaluation_splits(dataset, names, windows=windows, block=block, seed=recorded.seed)

    def compute(compile: bool | str) -> tuple[Evaluation, DeviceChoice]:
        model, choice = model_on_device(source, options.device, options.dtype, compile)
        result = evaluate(model, splits, batch=options.eval_batch_size or options.batch_size or recorded.eval_batch,
                          block=block, step=int(source.state.get("step", 0)))
        assert result is not None  # None only after a stop request
        return result, choice

    return with_eager_fallback(compute, options.compile, warn)


# ---- export

def export_checkpoint(source: WeightSource, out: str, dtype: str) -> str:
    """Writes a folder that transformers opens. Returns why the tokenizer is not in it; empty if it is."""
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in source.weights.items()}
    name, tokenizer, missing = _tokenizer_to_export(source)
    files = tokenizers.tokenizer_files(tokenizer, source.gpt.block_size) if tokenizer else {}
    huggingface.write_folder(out, source.gpt, weights, tokenizer=name, files=files)
    return "" if files else f"the tokenizer is not in the export{missing}."


def _tokenizer_to_export(source: WeightSource) -> tuple[str, Tokenizer | None, str]:
    """(its name, the tokenizer if it is certain and its files are here, else why not)."""
    name, characters = source.state.get("tokenizer", ""), source.state.get("characters", "")
    try:
        if (not name or (name == "chars" and not characters)) and "dataset" in source.config:
            found = summarise(str(source.config["dataset"]))
            name, characters = found.tokenizer, found.characters
        if name in ("gpt2", "bytes"):
            return name, tokenizers.get_tokenizer(name), ""
    except DataError as error:
        return name or "unknown", None, f": {error.what.rstrip('.')}"
    if name == "chars" and len(characters) == source.gpt.vocab_size:
        return name, tokenizers.CharTokenizer(characters, source.place), ""
    return name or "unknown", None, ", since the weights do not say which it is"


# ---- tokenizer for sampling

def tokenizer_of(source: WeightSource, warn: Warn) -> Tokenizer:
    """The tokenizer that the weights were trained with; DataError if it is not known or cannot be theirs."""
    found, known = _likely_tokenizer(source, warn), source.gpt.vocab_size
    if found.vocab_size > known:
        raise DataError(f"The model in {source.place} has a vocabulary of {known}, and the tokenizer {found.name} has "
                        f"{found.vocab_size}: it was trained with another tokenizer.",
                        "Sample from the run that trained it: its folder records the tokenizer.")
    return found


def _likely_tokenizer(source: WeightSource, warn: Warn) -> Tokenizer:
    name = source.state.get("tokenizer", "")
    if name in ("gpt2", "bytes"):
        return tokenizers.get_tokenizer(name)
    if name == "chars" and source.state.get("characters"):
        return tokenizers.CharTokenizer(source.state["characters"], source.place)
    try:
        return tokenizers.tokenizer_of_dataset(str(source.config["dataset"]))
    except KeyError:  # weights from elsewhere: usually GPT-2's vocabulary
        if source.gpt.vocab_size < GPT2_VOCAB:
            raise DataError(f"{source.place} has a vocabulary of {source.gpt.vocab_size:,}, not GPT-2's "
                            f"{GPT2_VOCAB:,}, and does not record its tokenizer.",
                            "Sample from the run it came from.") from None
        return tokenizers.get_tokenizer("gpt2")
    except DataError as error:
        if name == "chars" or source.gpt.vocab_size < GPT2_VOCAB:
            raise DataError(f"{source.place} was trained on {source.config['dataset']}, whose meta.pkl has its "
                            f"tokenizer. {error.what}",
                            f"Run this where data/{source.config['dataset']} is, or copy it here.") from None
        assumed = tokenizers.get_tokenizer("gpt2")
        warn(f"{error.what} GPT-2's tokenizer is assumed.")
        return assumed
