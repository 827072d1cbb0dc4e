"""How much of a run must a nanoGPT tape contain? The tape of `plan` against eight whole iterations, random runs.

    python bench/history.py --layers 4,6,8,12             eager, 5 to 16 micro-batches
    python bench/history.py --layers 20,24,36,48 --compiled

No GPU: both are replays of nanoGPT's tape, one as `fitgpt plan` writes it, the other with every micro-batch of eight
iterations and eight batches of each evaluation. Prints how many runs differ in some figure, and by how much.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.memory.platform import Platform  # noqa: E402
from fitgpt.memory.tape import Tape  # noqa: E402
from fitgpt.memory.timeline import Timeline, replay  # noqa: E402
from fitgpt.tapes.nanogpt import write  # noqa: E402

H200 = Platform()
PHASES = ("first_eval", "first_train", "train", "step", "eval")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,6,8,12")
    parser.add_argument("--micro_batches", default="5,6,7,8,10,16")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--runs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=20261116)
    options = parser.parse_args()
    layers, micro_batches = (list(map(int, text.split(","))) for text in (options.layers, options.micro_batches))
    rng, off = random.Random(options.seed), list[tuple[float, RunConfig]]()
    for _ in range(options.runs):
        run = drawn(rng, layers, micro_batches, compiled=options.compiled)
        off.append((farthest(run), run))
    worst, run = max(off, key=lambda each: abs(each[0]))
    differ, more, much_more = (sum(abs(percent) > limit for percent, _ in off) for limit in (0, 0.2, 0.5))
    print(f"{len(off)} runs: {differ} differ, {more} by more than 0.2 %, {much_more} by more than 0.5 %"
          + (f"; the worst by {worst:+.2f} %: {run}" if worst else ""))


def drawn(rng: random.Random, layers: list[int], micro_batches: list[int], *, compiled: bool) -> RunConfig:
    heads = rng.choice([4, 6, 8, 12, 16])
    return RunConfig(
        n_layer=rng.choice(layers), n_head=heads, n_embd=heads * rng.choice([48, 64, 64, 80]),
        batch_size=rng.choice([1, 2, 4, 8, 12, 16, 32]), block_size=rng.choice([256, 512, 1024]),
        gradient_accumulation_steps=rng.choice(micro_batches), dropout=rng.choice([0.0, 0.0, 0.1]),
        dtype=rng.choice(["bfloat16", "float16"]), bias=rng.random() < 0.3, compile=compiled,
        vocab_size=rng.choice([8192, *[50304] * 3]))


def farthest(run: RunConfig) -> float:
    """The largest difference of any figure, in percent of what whole iterations give."""
    whole = write(run, H200, history=(run.gradient_accumulation_steps,) * 8, eval_batches=(8, 8))
    planned, true = figures(replay(write(run, H200))), figures(replay(Tape(whole.events, whole.marks)))
    return max((100 * (here / there - 1) for here, there in zip(planned, true, strict=True)), key=abs)


def figures(timeline: Timeline) -> list[int]:
    peaks = timeline.peaks()
    return [figure for phase in PHASES for figure in (peaks[phase].allocated, peaks[phase].reserved)]


if __name__ == "__main__":
    main()
