"""How long does one replay of a 12-layer tape take? The best of many, of each kind, in a process of its own.

    python bench/replays.py

No GPU. The tape is written before; what a plan does with it besides (prices, ranges, needs) is not in it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt.config.run_config import RunConfig, resolve_run  # noqa: E402
from fitgpt.memory.platform import Platform  # noqa: E402
from fitgpt.memory.timeline import replay  # noqa: E402
from fitgpt.planning.forecast import write_tape  # noqa: E402

RICH = {"bias": True, "dropout": 0.1}
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "fitgpt, compiled": ("fitgpt", {"compile": True}),
    "fitgpt, eager": ("fitgpt", {"compile": False}),
    "fitgpt, eager, float16, biases and dropout": ("fitgpt", {"compile": False, "dtype": "float16", **RICH}),
    "nanoGPT, compiled": ("nanogpt", {"compile": True}),
    "nanoGPT, compiled, biases and dropout": ("nanogpt", {"compile": True, **RICH}),
    "nanoGPT, eager": ("nanogpt", {"compile": False}),
    "nanoGPT, eager, 5 micro-batches of 8": ("nanogpt", {"compile": False, "gradient_accumulation_steps": 5,
                                                         "batch_size": 8}),
    "nanoGPT, eager, biases and dropout": ("nanogpt", {"compile": False, **RICH}),
    "nanoGPT, eager, float16, biases and dropout": ("nanogpt", {"compile": False, "dtype": "float16", **RICH}),
}
TIMES = 25


def main() -> None:
    if len(sys.argv) > 1:
        print(f"{1000 * of_one(*KINDS[sys.argv[1]]):5.1f} ms  {sys.argv[1]}")
        return
    for kind in KINDS:
        subprocess.run([sys.executable, __file__, kind], check=True)


def of_one(trainer: str, settings: dict[str, object]) -> float:
    """Seconds of processor time. 124M, as nanoGPT's train_gpt2.py has it."""
    platform = Platform((9, 0), sms=132)
    config = RunConfig(**{"batch_size": 12, "gradient_accumulation_steps": 40, "block_size": 1024, "vocab_size": 50304,
                          "dtype": "bfloat16", **settings})  # type: ignore[arg-type]
    tape = write_tape(resolve_run(config, platform, trainer), platform, trainer)
    return min(timed(lambda: replay(tape, expandable=platform.uses_expandable_segments(trainer))) for _ in range(TIMES))


def timed(do: Callable[[], object]) -> float:
    start = time.process_time()
    do()
    return time.process_time() - start


if __name__ == "__main__":
    main()
