"""`fitgpt sample`, `fitgpt eval` and `fitgpt export`: what can be done with weights once they are there."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.command_options import EvalOptions, ExportOptions, SampleOptions
from ..config.run_config import GPT2_VOCAB, RunConfig
from ..core.errors import DataError, UsageError
from ..hardware.nvidia import child_environment
from ..runs.folder import holds_run, recorded_config
from ..runs.metrics import keep_sample

if TYPE_CHECKING:  # torch loads when a verb runs, after the allocator's environment is in place
    from ..data.tokenizers import Tokenizer
    from ..engine.device import DeviceChoice
    from ..engine.model import GPT
    from ..engine.weights import Source


def sample(options: SampleOptions) -> int:
    source = _open(options.out_dir if options.init_from == "resume" else options.init_from, options.which)
    from ..data.tokenizers import Decoder
    from ..engine.sample import Taste, generate

    tokenizer = _tokenizer(source)
    prompt = tokenizer.encode(_prompt(options.start), special=True)
    if not prompt:
        end = tokenizer.end_of_text
        prompt = [end if end is not None else 0]
    model, _ = _place(source, options.device, options.dtype, options.compile)
    taste = Taste(options.temperature, options.top_k, options.top_p)
    started, tokens = time.perf_counter(), 0
    for number in range(options.num_samples):
        decoder = Decoder(tokenizer)
        words = ["".join(decoder.feed(token) for token in prompt)]
        print(words[0], end="", flush=True)
        for token in generate(model, prompt, options.max_new_tokens, taste, options.seed + number,
                              tokenizer.vocab_size):
            words.append(decoder.feed(token))
            print(words[-1], end="", flush=True)
            tokens += 1
        words.append(decoder.finish())
        print(words[-1], "---------------", sep="\n", flush=True)
        if options.init_from == "resume" and holds_run(options.out_dir):
            keep_sample(options.out_dir, int(source.state.get("step", 0)), "".join(words))
    seconds = time.perf_counter() - started
    print(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} a second", file=sys.stderr)
    return 0


def evaluate(options: EvalOptions) -> int:
    source = _open(options.run, options.which)
    from ..data.shards import check_tokens, open_dataset
    from ..engine.evaluate import evaluate as measure
    from ..show.text import eval_line
    from ..training.run import evaluation_splits

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
                        f"trained on {trained_on} tokens: the same numbers mean other text.",
                        f"Prepare the text again with --tokenizer={trained_on}.")
    names = ("train", "val") if options.split == "both" else (options.split,)
    for name in names:
        check_tokens(dataset.split(name), source.gpt.vocab_size)
    batch = options.batch_size or recorded.batch_size
    windows = (options.eval_iters or recorded.eval_iters) * batch
    model, choice = _place(source, options.device, options.dtype, options.compile)
    splits = evaluation_splits(dataset, names, windows=windows, block=block, seed=recorded.seed)
    result = measure(model, splits, batch=options.eval_batch_size or options.batch_size or recorded.eval_batch,
                     block=block, step=int(source.state.get("step", 0)))
    assert result is not None
    if options.json:
        print(json.dumps({"schema": 1, "checkpoint": source.place, "dtype": choice.dtype, **asdict(result)}))
    else:
        print(eval_line(result))
    return 0


def export(options: ExportOptions) -> int:
    source = _open(options.run, options.which)
    from ..engine import huggingface
    from ..interop import hf_tokenizer
    from ..training.run import DTYPES

    weights = {name: tensor.to(DTYPES[options.dtype]) for name, tensor in source.weights.items()}
    name, tokenizer, missing = _tokenizer_to_export(source)
    files = hf_tokenizer.files_of(tokenizer, source.gpt.block_size) if tokenizer else {}
    huggingface.write_folder(options.out, source.gpt, weights, tokenizer=name, files=files)
    if not files:
        print(f"fitgpt: the tokenizer is not in the export{missing}.", file=sys.stderr)
    print(f"{options.out}: opens with transformers.GPT2LMHeadModel.from_pretrained({options.out!r})")
    return 0


def _open(place: str, which: str) -> Source:
    """The weights the user means; without a word on which, those nanoGPT would have in its ckpt.pt."""
    os.environ.update(child_environment(os.environ))
    from ..engine.weights import open_any

    if not which:
        recorded = recorded_config(place) if Path(place).is_dir() else None
        which = "last" if (recorded or {}).get("always_save_checkpoint", True) else "best"
    source = open_any(place, int(which) if which.isdecimal() else which)
    for note in source.notes:
        print(f"fitgpt: {note}", file=sys.stderr)
    return source


def _place(source: Source, device: str, dtype: str, compile: bool | str) -> tuple[GPT, DeviceChoice]:
    """The model on its device, in evaluation mode."""
    import torch

    from ..engine import weights
    from ..engine.device import resolve_device
    from ..engine.model import build_model
    from ..training.run import DTYPES

    choice = resolve_device(device, dtype, compile)
    if choice.mismatch:
        print(f"fitgpt: {choice.mismatch.why} {choice.mismatch.fix}", file=sys.stderr)
    model = build_model(replace(source.gpt, dropout=0.0), torch.device(choice.device), seed=0)
    weights.fill(model, source.weights, source.place)
    model.compute_dtype = DTYPES[choice.dtype]
    if choice.compile:
        model.compile()
    return model.eval(), choice


def _tokenizer(source: Source) -> Tokenizer:
    found, known = _likely_tokenizer(source), source.gpt.vocab_size
    if found.vocab_size > known:
        raise DataError(f"The model in {source.place} knows {known} tokens, and the tokenizer {found.name} has "
                        f"{found.vocab_size}: these are not the tokens it was trained on.",
                        "Sample from the run that trained it: its folder says how text becomes tokens.")
    return found


def _likely_tokenizer(source: Source) -> Tokenizer:
    from ..data import tokenizers

    name = source.state.get("tokenizer", "")
    if name in ("gpt2", "bytes"):
        return tokenizers.get(name)
    if name == "chars" and source.state.get("characters"):
        return tokenizers.Chars(source.state["characters"], source.place)
    try:
        return tokenizers.for_dataset(str(source.config["dataset"]))
    except KeyError:  # weights from elsewhere: GPT-2's vocabulary is what such weights have
        if source.gpt.vocab_size < GPT2_VOCAB:
            raise DataError(f"{source.place} has a vocabulary of {source.gpt.vocab_size:,}, not GPT-2's "
                            f"{GPT2_VOCAB:,}, and does not say which tokens those are.",
                            "Sample from the run it came from.") from None
        return tokenizers.get("gpt2")
    except DataError as error:
        if name == "chars" or source.gpt.vocab_size < GPT2_VOCAB:
            raise DataError(f"{source.place} was trained on {source.config['dataset']}, whose meta.pkl says which "
                            f"tokens those are. {error.what}",
                            f"Run this where data/{source.config['dataset']} is, or bring it here.") from None
        assumed = tokenizers.get("gpt2")
        print(f"fitgpt: {error.what} GPT-2's tokens are assumed.", file=sys.stderr)
        return assumed


def _tokenizer_to_export(source: Source) -> tuple[str, Tokenizer | None, str]:
    """Its name; the tokenizer itself, where it is known for certain and its files are here; else why it is not."""
    from ..data.header import summarise
    from ..data.tokenizers import Chars, get

    name, characters = source.state.get("tokenizer", ""), source.state.get("characters", "")
    try:
        if (not name or (name == "chars" and not characters)) and "dataset" in source.config:
            found = summarise(str(source.config["dataset"]))
            name, characters = found.tokenizer, found.characters
        if name in ("gpt2", "bytes"):
            return name, get(name), ""
    except DataError as error:
        return name or "unknown", None, f": {error.what.rstrip('.')}"
    if name == "chars" and len(characters) == source.gpt.vocab_size:
        return name, Chars(characters, source.place), ""
    return name or "unknown", None, ", since the weights do not say which it is"


def _prompt(start: str) -> str:
    if not start.startswith("FILE:"):
        return start
    path = Path(start.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text (byte {error.start})"
        raise UsageError(f"The prompt file {path} cannot be read: {why}.", "--start='some text'") from error
