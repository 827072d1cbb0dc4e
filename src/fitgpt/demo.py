"""`fitgpt demo`: from nothing to a small trained GPT that writes, on whatever is here, without a download."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

from .data.prepare import prepare
from .errors import DeviceError
from .knobs import Assignment
from .options import DemoOptions, PrepareOptions, SampleOptions
from .supervise import train
from .verbs import sample

DATASET = "stdlib"

# The same run as config/demo.py (a test compares them). A GPT of 0.8M over bytes: two CPU cores take two minutes.
CONFIG: dict[str, Any] = dict(
    dataset=DATASET, n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=16, gradient_accumulation_steps=1,
    max_iters=400, lr_decay_iters=400, warmup_iters=20, learning_rate=2e-3, min_lr=2e-4, beta2=0.99,
    eval_interval=100, eval_iters=10, log_interval=10,
)


def demo(options: DemoOptions) -> int:
    prepare(PrepareOptions(embedded=True, name=DATASET, tokenizer="bytes", val_fraction=0.05))
    out_dir = free_folder(options.out_dir)
    settings = {**CONFIG, "out_dir": out_dir, "device": options.device}
    if options.steps:
        settings |= {"max_iters": options.steps, "lr_decay_iters": max(options.steps, CONFIG["warmup_iters"])}
    unusable = ""
    try:
        code = train(_assignments(settings))
    except DeviceError as error:
        if options.device != "auto":
            raise
        unusable = str(error)
        print(f"fitgpt: {unusable}\nThe demo goes on without the GPU.\n", file=sys.stderr, flush=True)
        code = train(_assignments({**settings, "device": "cpu"}))
    if code:
        return code
    print("\nWhat it writes now, having read a little Python:\n", flush=True)
    sample(SampleOptions(out_dir=out_dir, start="def ", num_samples=1, max_new_tokens=300,
                         device="cpu" if unusable else options.device))
    print(closing(out_dir), flush=True)
    if unusable:
        print(f"\nfitgpt: {unusable}", file=sys.stderr)
    return 0


def free_folder(wanted: str) -> str:
    """The folder asked for, or that name with the next free number: an earlier demo is never overwritten."""
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return next(name for name in names if not Path(name).exists())


def closing(out_dir: str) -> str:
    return f"""The run is in {out_dir}: metrics.jsonl, and its checkpoints. What to type next:

  fitgpt sample {out_dir} --start='class '
      lets it write more
  fitgpt train --resume --out_dir={out_dir} --max_iters=800
      trains it further
  fitgpt eval {out_dir}
      measures it again
  fitgpt export {out_dir} -o my-gpt
      makes a folder that opens in transformers
  fitgpt prepare YOUR_TEXTS/ --name=mine && fitgpt train config/train_fineweb.py --dataset=mine
      trains on your own text"""


def _assignments(settings: dict[str, Any]) -> list[Assignment]:
    return [Assignment(key, value, "the demo") for key, value in settings.items()]


