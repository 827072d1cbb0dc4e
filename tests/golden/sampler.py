"""The recorded runs' configs, drawn at random over models, batches, dtypes, savers, eager and compiled.

    python tests/golden/sampler.py tests/golden/cases.json          the runs
    python tests/golden/sampler.py tests/golden/caps.json --caps    some of them under caps around what they need
    python tests/golden/sampler.py tests/golden/kernels.json --kernels     each attention kernel, not drawn but chosen

What is drawn is what is kept: no case is left out because of what it showed. A draw that RunConfig refuses is drawn
again, and so is one that would hold more than 40 GiB or compute for minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from fitgpt.config import RunConfig  # noqa: E402
from fitgpt.errors import UsageError  # noqa: E402
from fitgpt.memory.allocator import needs  # noqa: E402
from fitgpt.memory.forecast import settled, tape_of  # noqa: E402
from fitgpt.memory.setting import Setting  # noqa: E402
from fitgpt.savers import LEVELS  # noqa: E402
from fitgpt.units import GiB  # noqa: E402

SEED, RUNS, CAPPED = 20261115, 48, 20
H200 = Setting((9, 0), "2.11")
OFF = 0.02  # how far a cap lies from what a run needs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--caps", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    cases = capped() if options.caps else kernels() if options.kernels else draw()
    Path(options.out).write_text(json.dumps({"seed": SEED, "cases": cases}, indent=1) + "\n", encoding="utf-8")


KERNELS = (  # attention kernels that the H200 would not choose, but other cards do: forced on it
    ("flash", dict(compile=True)), ("flash", dict(compile=False, n_head=8, n_embd=640)),
    ("flash", dict(compile=False, n_head=6, n_embd=252, dtype="float16")), ("flash", dict(compile=False, dropout=0.1)),
    ("flash", dict(compile=False, block_size=500)),
    ("efficient", dict(compile=False)), ("efficient", dict(compile=True, dtype="float16", block_size=500)),
    ("efficient", dict(compile=False, n_head=6, n_embd=252, recompute="input")),
    ("math", dict(compile=False)), ("math", dict(compile=True, dtype="float32", block_size=256)),
    ("math", dict(compile=False, n_head=6, n_embd=252)))


def kernels() -> list[dict[str, Any]]:
    base = dict(n_layer=4, n_head=8, n_embd=512, batch_size=8, block_size=512, vocab_size=50304,
                gradient_accumulation_steps=2, dtype="bfloat16")
    return [{"name": f"{kernel} {number}", "kernel": kernel, "config": {**base, **knobs}}
            for number, (kernel, knobs) in enumerate(KERNELS)]


def draw() -> list[dict[str, Any]]:
    dice, cases = random.Random(SEED), list[dict[str, Any]]()
    while len(cases) < RUNS:
        knobs = one(dice)
        try:
            config = settled(RunConfig(**knobs), H200)
        except UsageError:
            continue
        work = config.gpt_config().count_params() * config.tokens_per_step
        if work < 4e13 and needs(tape_of(config, H200), expandable=True) < 40 * GiB:
            cases.append({"name": f"run {len(cases):02}", "config": knobs, "sample": len(cases) % 8 == 0})
    return cases


def one(dice: random.Random) -> dict[str, Any]:
    heads = dice.choice([4, 6, 8, 12, 16])
    layers = dice.choice([2, 3, 4, 6, 8, 12, 16])
    knobs: dict[str, Any] = {
        "n_layer": layers, "n_head": heads, "n_embd": heads * dice.choice([32, 48, 64, 64, 64, 42, 80]),
        "batch_size": dice.choice([1, 2, 4, 6, 8, 12, 16, 24, 32]),
        "block_size": dice.choice([128, 256, 512, 1024, 2048]),
        "vocab_size": dice.choice([50304, 50304, 50304, 50257, 65, 8192, 100277]),
        "gradient_accumulation_steps": dice.choice([1, 2, 4]),
        "dtype": dice.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        "compile": dice.random() < 0.6, "bias": dice.random() < 0.3, "dropout": dice.choice([0.0, 0.0, 0.0, 0.1])}
    if dice.random() < 0.6:
        knobs["recompute"] = dice.choice([*LEVELS, by_layer(dice, layers)])
    if dice.random() < 0.3:
        knobs["weights"] = "bfloat16"
    if dice.random() < 0.3:
        knobs["residual"] = "bfloat16"
    if dice.random() < 0.4:
        knobs["optimizer"] = dice.choice(["adam8bit", "muon"])
    if dice.random() < 0.15:
        knobs["offload"] = dice.choice(["optimizer", "gradients"])
    if dice.random() < 0.1:
        knobs |= {"step_in_backward": True, "gradient_accumulation_steps": 1, "grad_clip": 0.0}
    if dice.random() < 0.15:
        knobs["loss_chunk"] = dice.choice([256, 1024, 4096])
    if dice.random() < 0.2:
        knobs["eval_batch_size"] = dice.choice([1, 4, 16])
    if dice.random() < 0.15:
        knobs["cuda_graphs"] = False
    return knobs


def by_layer(dice: random.Random, layers: int) -> str:
    first = dice.randint(1, layers - 1)
    low, high = sorted(dice.sample(range(len(LEVELS)), 2))
    return f"{first}*{LEVELS[high]},{layers - first}*{LEVELS[low]}"


def capped() -> list[dict[str, Any]]:
    """The first cases that need at least 1 GiB, each twice: under a cap that is too low, and one that is enough."""
    cases = []
    for case in draw():
        config = settled(RunConfig(**case["config"]), H200)
        wanted = needs(tape_of(config, H200), expandable=True)
        if wanted >= GiB and len(cases) < 2 * CAPPED:
            for sign, word in ((-1, "below"), (1, "above")):
                cases.append({"name": f"{case['name']} {word}", "config": case["config"], "needs": wanted,
                              "cap": round(wanted * (1 + sign * OFF))})
    return cases


if __name__ == "__main__":
    main()
