"""`fitgpt demo`: from nothing to a small trained GPT that writes, on whatever is here, without a download."""

from __future__ import annotations

import shlex
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from .data.prepare import prepare
from .errors import DeviceError
from .knobs import Assignment
from .nouns import SplitLoss
from .options import DemoOptions, PrepareOptions, SampleOptions
from .runfolder import read_metrics
from .show import text
from .supervise import train
from .verbs import sample

DATA = PrepareOptions(embedded=True, name="stdlib", tokenizer="bytes", val_fraction=0.05)

# The same run as config/demo.py (a test compares them). A GPT of 0.8M over bytes: two CPU cores take two minutes.
CONFIG: dict[str, Any] = dict(
    dataset=DATA.name, n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=16, gradient_accumulation_steps=1,
    max_iters=400, lr_decay_iters=400, warmup_iters=20, learning_rate=2e-3, min_lr=2e-4, beta2=0.99,
    eval_interval=100, eval_iters=10, log_interval=10,
)


def demo(options: DemoOptions) -> int:
    prepare(DATA)
    print(flush=True)
    out_dir, steps = free_folder(options.out_dir), options.steps or CONFIG["max_iters"]
    settings = {**CONFIG, "out_dir": out_dir, "device": options.device, "max_iters": steps,
                "lr_decay_iters": max(steps, CONFIG["warmup_iters"])}
    started, unusable = time.perf_counter(), ""
    try:
        code = train(_assignments(settings))
    except DeviceError as error:
        if options.device != "auto":
            raise
        unusable = str(error)
        print(f"fitgpt: {unusable}\nThe demo goes on without the GPU.\n", file=sys.stderr, flush=True)
        code = train(_assignments({**settings, "device": "cpu"}))
    seconds = time.perf_counter() - started
    if code:
        return code
    print("\nWhat it writes now, having read a little Python:\n", flush=True)
    sample(SampleOptions(out_dir=out_dir, start="def ", num_samples=1, max_new_tokens=300,
                         device="cpu" if unusable else options.device))
    print(f"\n{text.closing(out_dir, steps, seconds, best_loss(out_dir), next_commands(out_dir, steps))}", flush=True)
    if unusable:
        print(f"\nfitgpt: {unusable}", file=sys.stderr)
    return 0


def free_folder(wanted: str) -> str:
    """The folder asked for, or that name with the next free number: an earlier demo is never overwritten."""
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return next(name for name in names if not Path(name).exists())


def best_loss(out_dir: str) -> SplitLoss | None:
    rows = [row for row in read_metrics(Path(out_dir) / "metrics.jsonl") if row.get("kind") == "eval" and row["best"]]
    return next((SplitLoss(**loss) for loss in rows[-1]["losses"] if loss["split"] == "val"), None) if rows else None


def next_commands(out_dir: str, steps: int) -> list[str]:
    """One a line, each with what it does: a shell passes over the rest of a line after #."""
    run = shlex.quote(out_dir)
    told = (
        (f"fitgpt sample {run} --start='class '", "lets it write more"),
        (f"fitgpt train --resume --out_dir={run} --max_iters={2 * steps}", "trains it further"),
        (f"fitgpt eval {run}", "measures it again"),
        (f"fitgpt export {run} -o my-gpt", "makes a folder that opens in transformers"),
        ("fitgpt prepare YOUR_TEXTS/ --name=mine", "makes tokens of your own text"),
        ("fitgpt train config/train_fineweb.py --dataset=mine", "trains on them"),
    )
    width = max(len(command) for command, _ in told)
    return [f"{command:<{width}}  # {what}" for command, what in told]


def _assignments(settings: dict[str, Any]) -> list[Assignment]:
    return [Assignment(key, value, "the demo") for key, value in settings.items()]
