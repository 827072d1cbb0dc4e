"""`fitgpt demo`: from nothing to a small trained GPT that writes, on whatever is here, without a download."""

from __future__ import annotations

import shlex
import sys
from itertools import count
from pathlib import Path
from typing import Any

from ..config.command_options import DemoOptions, PrepareOptions, SampleOptions
from ..config.fields import Assignment
from ..core.errors import DeviceError, DoesNotFit
from ..data.prepare import prepare
from ..training.supervisor import train
from .verbs import sample

DATA = PrepareOptions(embedded=True, name="stdlib", tokenizer="bytes", val_fraction=0.05)

# The same run as config/demo.py (a test compares them). A GPT of 0.8M over bytes: two CPU cores take under two minutes.
CONFIG: dict[str, Any] = dict(
    dataset=DATA.name, n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, gradient_accumulation_steps=1,
    max_iters=1400, lr_decay_iters=1400, warmup_iters=100, learning_rate=2e-3, min_lr=1e-4, beta2=0.99,
    eval_interval=350, eval_iters=40, log_interval=50,
)


def demo(options: DemoOptions) -> int:
    prepare(DATA)
    print(flush=True)
    out_dir, steps = free_folder(options.out_dir), options.steps or CONFIG["max_iters"]
    settings = {**CONFIG, "out_dir": out_dir, "device": options.device, "max_iters": steps, "fit": True,
                "lr_decay_iters": max(steps, CONFIG["warmup_iters"])}
    unusable = ""
    try:
        code = train(_assignments(settings))
    except (DeviceError, DoesNotFit) as error:
        if options.device != "auto":
            raise
        unusable = str(error)
        print(f"fitgpt: {unusable}\nThe demo goes on without the GPU.\n", file=sys.stderr, flush=True)
        code = train(_assignments({**settings, "device": "cpu"}))
    if code:
        return code
    print("\nWhat it writes now, having read a little Python:\n", flush=True)
    sample(SampleOptions(out_dir=out_dir, start="def ", num_samples=2, max_new_tokens=250, temperature=0.7, seed=1338,
                         device="cpu" if unusable else options.device))
    print("\nWhat to type next:", *next_commands(out_dir, steps), sep="\n  ", flush=True)
    if unusable:
        print(f"\nfitgpt: {unusable}", file=sys.stderr)
    return 0


def free_folder(wanted: str) -> str:
    """The folder asked for, or that name with the next free number: an earlier demo is never overwritten."""
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return next(name for name in names if not Path(name).exists())


def next_commands(out_dir: str, steps: int) -> list[str]:
    """One a line, each with what it does: a shell passes over the rest of a line after #."""
    run = shlex.quote(out_dir)
    told = (
        (f"fitgpt sample {run} --start='class '", "lets it write more"),
        (f"fitgpt train --resume --out_dir={run} --max_iters={2 * steps}", "trains it further"),
        (f"fitgpt eval {run}", "measures it again"),
        (f"fitgpt export {run} -o my-gpt", "makes a folder that opens in transformers"),
        ("fitgpt prepare YOUR_TEXTS/ --name=mine", "makes tokens of your own text"),
        ("fitgpt train config/train_fineweb.py --dataset=mine --out_dir=runs/mine", "trains on them"),
    )
    width = max(len(command) for command, _ in told)
    return [f"{command:<{width}}  # {what}" for command, what in told]


def _assignments(settings: dict[str, Any]) -> list[Assignment]:
    return [Assignment(key, value, "the demo") for key, value in settings.items()]
