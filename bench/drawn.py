"""Which runs of nanoGPT's own train.py are recorded? What is drawn is what is kept, whatever it shows.

    python bench/drawn.py remedies_and_random   the remedies of docs/memory.md, and random runs
    python bench/drawn.py any_shape             more, over more shapes
    python bench/drawn.py odd_vocabularies      vocabularies that are no multiple of 8
    python bench/drawn.py common_shapes         shapes that people train
    python bench/drawn.py many_micro_batches    many micro-batches, of which a forecast looks at a few
    python bench/drawn.py common_shapes_second  common shapes again, after all corrections of the forecast

Writes tests/recorded/nanogpt/cases/NAME.json. Runs too large for several to share the GPU are drawn again, by the
forecast of that day: once drawn, a file stays.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from accuracy import H200, predict  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.core.units import GiB  # noqa: E402
from fitgpt.memory.timeline import replay  # noqa: E402
from fitgpt.tapes.nanogpt import write  # noqa: E402

CASES = ROOT / "tests" / "recorded" / "nanogpt" / "cases"
SEED, DRAWN = 20261116, 16
WIDER_SEED, DRAWN_WIDER = 20261117, 40
ODD_SEED, DRAWN_ODD = 20261118, 14
USUAL_SEED, DRAWN_USUAL = 20261119, 40
MANY_SEED, DRAWN_MANY, SENSITIVE = 20261120, 24, 16
FRESH_SEED = 20261121
LARGEST, USUAL = 40 * GiB, 24 * GiB
NOTES_77M = dict(n_layer=12, n_head=12, n_embd=576, batch_size=16, block_size=1024, gradient_accumulation_steps=4,
                 dtype="float16", dropout=0.0, bias=False, compile=True, vocab_size=50304)
NOTES_30M = {**NOTES_77M, "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512}


def main(name: str) -> None:
    drawn_now = {"remedies_and_random": lambda: {"seed": SEED, "cases": [*remedies(), *drawn()]},
                 "any_shape": lambda: {"seed": WIDER_SEED, "cases": drawn_wider()},
                 "odd_vocabularies": lambda: {"seed": ODD_SEED, "cases": [*odd(), *drawn_odd()]},
                 "common_shapes": lambda: {"seed": USUAL_SEED, "cases": drawn_usual("usual", USUAL_SEED)},
                 "common_shapes_second": lambda: {"seed": FRESH_SEED, "cases": drawn_usual("fresh", FRESH_SEED)},
                 "many_micro_batches": lambda: {"seed": MANY_SEED, "cases": drawn_many()}}[name]()
    (CASES / f"{name}.json").write_text(json.dumps(drawn_now, indent=1) + "\n", encoding="utf-8")


def remedies() -> list[dict[str, Any]]:
    """What the notes propose (docs/memory.md), of the runs they propose it for."""
    return [{"name": "30M, batch 8", "config": {**NOTES_30M, "batch_size": 8, "gradient_accumulation_steps": 8}},
            {"name": "30M, block 256", "config": {**NOTES_30M, "block_size": 256}},
            {"name": "77M, width 512", "config": {**NOTES_77M, "n_embd": 512, "n_head": 8}},
            {"name": "77M, expandable segments", "config": NOTES_77M, "expandable": True}]


def drawn() -> list[dict[str, Any]]:
    rng, found = random.Random(SEED), list[dict[str, Any]]()
    while len(found) < DRAWN:
        heads = rng.choice([2, 4, 6, 8, 12, 16])
        config = dict(
            n_layer=rng.choice([1, 2, 4, 6, 8, 12, 16, 24]), n_head=heads,
            n_embd=heads * rng.choice([24, 48, 64, 64, 80]),
            batch_size=rng.choice([1, 2, 4, 8, 12, 16, 32]), block_size=rng.choice([128, 256, 512, 1024, 2048]),
            gradient_accumulation_steps=rng.choice([1, 2, 3, 4, 5, 8]), dropout=rng.choice([0.0, 0.0, 0.1]),
            dtype=rng.choice(["bfloat16", "float16", "float32"]), bias=rng.random() < 0.3,
            compile=rng.random() < 0.6, vocab_size=rng.choice([65, 8192, *[50304] * 4]))
        if predict(config)["train_reserved"] <= LARGEST:
            found.append({"name": f"drawn {len(found):02}", "config": config})
    return found


def drawn_wider() -> list[dict[str, Any]]:
    """Sizes between the round ones, too: context lengths, vocabularies, widths of heads."""
    rng, found = random.Random(WIDER_SEED), list[dict[str, Any]]()
    while len(found) < DRAWN_WIDER:
        heads = rng.choice([1, 3, 5, 6, 8, 10, 12, 16, 20])
        config = dict(
            n_layer=rng.randint(1, 20), n_head=heads, n_embd=heads * rng.choice([20, 32, 64, 64, 64, 96, 128]),
            batch_size=rng.choice([1, 2, 3, 5, 8, 10, 16, 24, 48, 64]),
            block_size=rng.choice([64, 192, 256, 300, 512, 768, 1000, 1024, 1024, 4096]),
            gradient_accumulation_steps=rng.choice([1, 1, 2, 4, 6, 7, 16]), dropout=rng.choice([0.0, 0.0, 0.2]),
            dtype=rng.choice(["bfloat16", "float16", "bfloat16", "float32"]), bias=rng.random() < 0.4,
            compile=rng.random() < 0.5, vocab_size=rng.choice([65, 4096, 32000, 50257, *[50304] * 4, 100277]))
        if predict(config)["train_reserved"] <= LARGEST:
            found.append({"name": f"wider {len(found):02}", "config": config})
    return found


def odd() -> list[dict[str, Any]]:
    """Vocabularies that are no multiple of 8, small models: from these it was read which products are padded."""
    base = dict(n_layer=2, n_head=6, n_embd=384, batch_size=4, block_size=1024, gradient_accumulation_steps=2,
                dropout=0.0, dtype="bfloat16", bias=False, compile=True)
    single, wide = dict(dtype="float32"), dict(n_head=12, n_embd=768)
    chosen = [(50257, {}), (50257, single), (50257, dict(dtype="float16", **wide, bias=True)), (100277, {}),
              (100277, single), (32001, dict(dtype="float16")), (32001, {**single, **wide}), (257, {}), (257, single),
              (1001, {}), (1001, single), (4099, {}), (4099, single), (10002, single), (10002, dict(batch_size=16)),
              (65, single), (65, dict(batch_size=32)), (50257, dict(batch_size=1, block_size=256)), (50258, {}),
              (50260, single),
              (50257, dict(n_head=16, n_embd=1024, batch_size=8, gradient_accumulation_steps=1, dropout=0.1))]
    return [{"name": f"odd {number:02}", "config": {**base, **options, "vocab_size": size}}
            for number, (size, options) in enumerate(chosen)]


def drawn_odd() -> list[dict[str, Any]]:
    rng, found = random.Random(ODD_SEED), list[dict[str, Any]]()
    while len(found) < DRAWN_ODD:
        heads = rng.choice([4, 6, 8, 12, 16])
        config = dict(
            n_layer=rng.randint(2, 16), n_head=heads, n_embd=heads * 64,
            batch_size=rng.choice([1, 2, 4, 8, 12, 16, 32]), block_size=rng.choice([256, 512, 1024, 1024]),
            gradient_accumulation_steps=rng.choice([1, 2, 5, 8]), dropout=rng.choice([0.0, 0.0, 0.1]),
            dtype=rng.choice(["bfloat16", "float16", "float32"]),
            bias=rng.random() < 0.3, compile=True,
            vocab_size=rng.choice([rng.randint(60, 200), rng.randint(200, 8000), 50257, rng.randint(8000, 110000)]))
        if config["vocab_size"] % 8 and predict(config)["train_reserved"] <= LARGEST:
            found.append({"name": f"drawn odd {len(found):02}", "config": config})
    return found


def drawn_usual(name: str, seed: int) -> list[dict[str, Any]]:
    """10M to 1B parameters, heads of 64, batches that fill a GPU of 8 to 24 GB or part of it."""
    rng, found = random.Random(seed), list[dict[str, Any]]()
    while len(found) < DRAWN_USUAL:
        layers, heads = rng.choice([(4, 4), (6, 6), (8, 8), (8, 12), (10, 10), (12, 12), (12, 12), (16, 16), (24, 16),
                                     (36, 20)])
        config = dict(
            n_layer=layers, n_head=heads, n_embd=64 * heads,
            batch_size=rng.choice([1, 2, 4, 6, 8, 12, 16, 24, 32, 64]),
            block_size=rng.choice([256, 512, 1024, 1024, 2048]), dropout=rng.choice([0.0, 0.0, 0.1, 0.2]),
            gradient_accumulation_steps=rng.choice([1, 2, 4, 5, 8, 16]),
            dtype=rng.choice(["bfloat16", "bfloat16", "float16", "float32"]), bias=rng.random() < 0.3,
            compile=rng.random() < 0.6, vocab_size=rng.choice([65, 256, 8192, 32000, *[50304] * 5]))
        if predict(config)["train_reserved"] <= USUAL:
            found.append({"name": f"{name} {len(found):02}", "config": config})
    return found


def drawn_many() -> list[dict[str, Any]]:
    """Some as they come, then some of which few micro-batches tell something else than all: by more than 0.5 %."""
    rng, found = random.Random(MANY_SEED), list[dict[str, Any]]()
    while len(found) < DRAWN_MANY + SENSITIVE:
        heads = rng.choice([4, 6, 8, 12, 16])
        config = dict(
            n_layer=rng.choice([4, 6, 8, 10, 12, 16]), n_head=heads, n_embd=heads * rng.choice([48, 64, 64, 80]),
            batch_size=rng.choice([1, 2, 4, 8, 12, 16, 32]), block_size=rng.choice([256, 512, 1024]),
            gradient_accumulation_steps=rng.choice([5, 6, 7, 8, 10, 12, 16, 40]), dropout=rng.choice([0.0, 0.0, 0.1]),
            dtype=rng.choice(["bfloat16", "float16"]), bias=rng.random() < 0.3, compile=rng.random() < 0.5,
            vocab_size=rng.choice([8192, *[50304] * 3]))
        drawn_as = "many" if len(found) < DRAWN_MANY else "sensitive"
        if predict(config)["train_reserved"] <= USUAL and (drawn_as == "many" or is_sensitive(RunConfig(**config))):
            found.append({"name": f"{drawn_as} {len(found):02}", "config": config})
    return found


def is_sensitive(run: RunConfig) -> bool:
    count = run.gradient_accumulation_steps
    few, whole = (replay(write(run, H200, history=history)).reserved
                  for history in ((3, 3, 3) if count % 2 else (4, 4, 2), (count,) * 6))
    return abs(few / whole - 1) > 0.005


if __name__ == "__main__":
    main(sys.argv[1])
