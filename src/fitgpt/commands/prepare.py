"""`fitgpt prepare`: prepares a dataset, then prints its size and the command that trains on it."""

from __future__ import annotations

import sys
from itertools import starmap
from pathlib import Path

from ..config.command_options import PrepareOptions
from ..data.pipeline import PreparedDataset, prepare_dataset
from ..data.shards import SPLITS
from ..data.sources import describe_count
from ..show.terminal import columns, command_lines, paragraph

_SMALL_VAL_TOKENS = 4096              # with fewer, the val loss is mostly noise
_LARGE_TRAIN_TOKENS = 20_000_000      # with fewer, a GPT of tens of millions of parameters memorises the text
_DEMO_OPTIONS = ("--n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --gradient_accumulation_steps=1 "
                 "--max_iters=1400 --lr_decay_iters=1400 --warmup_iters=100")  # where config/demo.py is not present


def prepare(options: PrepareOptions) -> int:
    """Runs the command; returns its exit code."""
    result = prepare_dataset(options, notify=_say, ask=_ask)
    if result.existed:
        _say(f"{result.folder} is already prepared, from the same source and with the same settings: "
             f"{result.manifest.tokens('train'):,} train and {result.manifest.tokens('val'):,} val tokens.")
    else:
        _print_result(result)
    return 0


def _say(sentence: str) -> None:
    print(paragraph(sentence, columns()), flush=True)


def _ask(question: str) -> bool | None:
    """The user's answer; None if stdin is not a terminal."""
    if not sys.stdin.isatty():
        return None
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _print_result(result: PreparedDataset) -> None:
    manifest = result.manifest
    for split in SPLITS:
        documents = manifest.documents[split]
        print(f"{split:5}  {manifest.tokens(split):>14,} tokens  in "
              f"{_plural(documents, 'document') if documents else 'a part of one document'}, "
              f"{_plural(len(manifest.shards[split]), 'shard')}")
    if manifest.counts:
        _say(f"Found in the input: {', '.join(starmap(describe_count, manifest.counts.items()))}.")
    for note in result.notes:
        _say(f"Note: {note}")
    if manifest.tokens("val") < _SMALL_VAL_TOKENS:
        _say(f"Note: val has only {_plural(manifest.tokens('val'), 'token')}; a larger --val_fraction gives a less "
             "noisy val loss.")
    _say(f"The dataset is in {result.folder}. To train on it:")
    print(*command_lines(_train_command(result), columns()), sep="\n", flush=True)


def _train_command(result: PreparedDataset) -> list[str]:
    large = result.manifest.tokens("train") >= _LARGE_TRAIN_TOKENS and result.manifest.tokenizer == "gpt2"
    config, options = ("config/train_fineweb.py", "") if large else ("config/demo.py", _DEMO_OPTIONS)
    return ["fitgpt", "train", *([config] if Path(config).is_file() else options.split()),
            f"--dataset={result.dataset}", f"--out_dir=runs/{result.folder.name}"]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
