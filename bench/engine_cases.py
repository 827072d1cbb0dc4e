"""Writes the configs that bench/record.py records with fitgpt's own trainer: tests/recorded/engine/cases/NAME.json.

    python bench/engine_cases.py random                  models, batches, dtypes, savers, eager and compiled, at random
    python bench/engine_cases.py memory_limit            some of these, under limits around what they need
    python bench/engine_cases.py savers_off              with savers off that are on by default
    python bench/engine_cases.py held_out                a wider range, drawn after all corrections of the forecast
    python bench/engine_cases.py memory_limit_held_out   some of these under limits
    python bench/engine_cases.py attention_kernels       each attention kernel; chosen, not random
    python bench/engine_cases.py memory_page             the runs of docs/memory.md, and the changes proposed there
    python bench/engine_cases.py bitsandbytes            8-bit optimizer state of bitsandbytes; chosen
    python bench/engine_cases.py ranks                   one rank of 2, 4 or 8, at random

Every config drawn is kept: none is left out because of its result. A config that RunConfig rejects is drawn again, and
so is one that would hold more than 40 GiB or compute for minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt.config.memory_savers import POLICIES  # noqa: E402
from fitgpt.config.run_config import RunConfig, resolve_run  # noqa: E402
from fitgpt.core.errors import UsageError  # noqa: E402
from fitgpt.core.units import GiB  # noqa: E402
from fitgpt.memory.platform import Platform  # noqa: E402
from fitgpt.planning.forecast import replay_run  # noqa: E402

CASES = ROOT / "tests" / "recorded" / "engine" / "cases"
SEED, RUNS, SAVERS_OFF, HELD_OUT, LIMITED, RANKS = 20261115, 48, 13, 48, 20, 24
H200 = Platform((9, 0), "2.11")
MARGIN = 0.02  # distance of a limit from what a run needs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=GENERATORS)
    name = parser.parse_args().name
    text = json.dumps({"seed": SEED, "cases": GENERATORS[name]()}, indent=1) + "\n"
    (CASES / f"{name}.json").write_text(text, encoding="utf-8")


KERNELS = (  # attention kernels that the H200 would not choose, but other GPUs do: forced on it
    ("flash", dict(compile=True)), ("flash", dict(compile=False, n_head=8, n_embd=640)),
    ("flash", dict(compile=False, n_head=6, n_embd=252, dtype="float16")), ("flash", dict(compile=False, dropout=0.1)),
    ("flash", dict(compile=False, block_size=500)),
    ("efficient", dict(compile=False)), ("efficient", dict(compile=True, dtype="float16", block_size=500)),
    ("efficient", dict(compile=False, n_head=6, n_embd=252, saved_activations="input")),
    ("math", dict(compile=False)), ("math", dict(compile=True, dtype="float32", block_size=256)),
    ("math", dict(compile=False, n_head=6, n_embd=252)))


def attention_kernels() -> list[dict[str, Any]]:
    base = dict(n_layer=4, n_head=8, n_embd=512, batch_size=8, block_size=512, vocab_size=50304,
                gradient_accumulation_steps=2, dtype="bfloat16")
    return [{"name": f"{kernel} {number}", "kernel": kernel, "config": {**base, **options}}
            for number, (kernel, options) in enumerate(KERNELS)]


MEMORY_PAGE = {  # the two runs of docs/memory.md, and the changes it compares for each
    "77M": (dict(n_layer=12, n_head=12, n_embd=576, block_size=1024), {
        "": {}, "eval_batch_size 4": dict(eval_batch_size=4), "eval_block_size 512": dict(eval_block_size=512),
        "width 512": dict(n_embd=512, n_head=8), "grad_checkpoint": dict(grad_checkpoint=True)}),
    "30M": (dict(n_layer=6, n_head=6, n_embd=384, block_size=512), {
        "": {}, "batch 8": dict(batch_size=8, gradient_accumulation_steps=8), "block 256": dict(block_size=256),
        "grad_checkpoint": dict(grad_checkpoint=True)})}


def memory_page() -> list[dict[str, Any]]:
    others = dict(batch_size=16, gradient_accumulation_steps=4, dtype="float16", vocab_size=50304, compile=True)
    return [{"name": f"{size}, {change}" if change else size, "config": {**others, **shape, **options}}
            for size, (shape, remedies) in MEMORY_PAGE.items() for change, options in remedies.items()]


def bitsandbytes() -> list[dict[str, Any]]:
    """Compiled and recorded as GPT-2 124M; float16, whose steps may be skipped, and wide biases; eager, states late."""
    base = dict(n_layer=12, n_head=12, n_embd=768, batch_size=4, block_size=1024, vocab_size=50304,
                gradient_accumulation_steps=2, dtype="bfloat16", compile=True, optimizer="adam8bit",
                adam8bit="bitsandbytes")
    return [{"name": name, "config": {**base, **options}} for name, options in (
        ("compiled", {}),
        ("float16", dict(n_layer=3, n_head=16, n_embd=1040, dtype="float16", bias=True, vocab_size=8192)),
        ("eager", dict(n_layer=4, n_head=6, n_embd=252, block_size=512, compile=False, states="late")))]


def savers_off() -> list[dict[str, Any]]:
    """Each with at least one of the savers off that are on by default."""
    def change(rng: random.Random, options: dict[str, Any]) -> dict[str, Any] | None:
        drawn = {"casts": rng.choice(["transient", "kept"]), "gradients": rng.choice(["freed", "kept"]),
                 "states": rng.choice(["early", "late"])}
        off = {option: value for option, value in drawn.items() if value in ("kept", "late")}
        return {**options, **off} if off else None

    return draw(SEED + 1, SAVERS_OFF, change)


def held_out() -> list[dict[str, Any]]:
    """Deeper and flatter, longer histories, odd lengths, narrow and wide heads, every saver that can be switched."""
    def change(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
        heads = options["n_head"]
        wider = {"n_layer": rng.choice([1, 5, 9, 18, 24]), "n_embd": heads * rng.choice([16, 24, 72, 96, 100, 128]),
                 "batch_size": rng.choice([3, 5, 10, 48, 64]), "block_size": rng.choice([64, 300, 768, 1000, 1536]),
                 "vocab_size": rng.choice([257, 4096, 32000, 49152]), "dropout": 0.2, "loss_chunk": 512,
                 "gradient_accumulation_steps": rng.choice([3, 5, 8, 16]), "eval_block_size": 64, "casts": "kept",
                 "gradients": "kept", "states": "late", "grad_clip": 0.0}
        return options | {option: value for option, value in wider.items() if rng.random() < 0.25}

    return draw(SEED + 2, HELD_OUT, change)


def ranks() -> list[dict[str, Any]]:
    """As `random`, of 2, 4 or 8 ranks: 1 to 4 micro-batches each. Every rank is recorded in some case."""
    def change(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
        world = rng.choice([2, 4, 8])
        return {**options, "gpus": f"{world}xranks",
                "gradient_accumulation_steps": options["gradient_accumulation_steps"] * world}

    drawn = draw(SEED + 3, RANKS, change)
    return [{**case, "sample": False, "rank": number % RunConfig(**case["config"]).ranks}
            for number, case in enumerate(drawn)]


def draw(seed: int = SEED, runs: int = RUNS, change: Any = lambda rng, options: options) -> list[dict[str, Any]]:
    rng, cases = random.Random(seed), list[dict[str, Any]]()
    while len(cases) < runs:
        options = change(rng, random_options(rng))
        if options is None:
            continue
        try:
            config = resolve_run(RunConfig(**options), H200)
        except UsageError:
            continue
        work = config.gpt_config().count_params() * config.tokens_per_step // config.ranks
        if work < 4e13 and replay_run(config, H200).needs < 40 * GiB:
            cases.append({"name": f"run {len(cases):02}", "config": options, "sample": len(cases) % 8 == 0})
    return cases


def random_options(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([4, 6, 8, 12, 16])
    layers = rng.choice([2, 3, 4, 6, 8, 12, 16])
    options: dict[str, Any] = {
        "n_layer": layers, "n_head": heads, "n_embd": heads * rng.choice([32, 48, 64, 64, 64, 42, 80]),
        "batch_size": rng.choice([1, 2, 4, 6, 8, 12, 16, 24, 32]),
        "block_size": rng.choice([128, 256, 512, 1024, 2048]),
        "vocab_size": rng.choice([50304, 50304, 50304, 50257, 65, 8192, 100277]),
        "gradient_accumulation_steps": rng.choice([1, 2, 4]),
        "dtype": rng.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        "compile": rng.random() < 0.6, "bias": rng.random() < 0.3, "dropout": rng.choice([0.0, 0.0, 0.0, 0.1])}
    if rng.random() < 0.6:
        options["saved_activations"] = rng.choice([*POLICIES, by_layer(rng, layers)])
    if rng.random() < 0.3:
        options["weights"] = "bfloat16"
    if rng.random() < 0.3:
        options["residual"] = "bfloat16"
    if rng.random() < 0.4:
        options["optimizer"] = rng.choice(["adam8bit", "muon"])
    if rng.random() < 0.15:
        options["offload"] = rng.choice(["optimizer", "gradients"])
    if rng.random() < 0.1:
        options |= {"step_in_backward": True, "gradient_accumulation_steps": 1, "grad_clip": 0.0}
    if rng.random() < 0.15:
        options["loss_chunk"] = rng.choice([256, 1024, 4096])
    if rng.random() < 0.2:
        options["eval_batch_size"] = rng.choice([1, 4, 16])
    if rng.random() < 0.15:
        options["cuda_graphs"] = False
    return options


def by_layer(rng: random.Random, layers: int) -> str:
    first = rng.randint(1, layers - 1)
    low, high = sorted(rng.sample(range(len(POLICIES)), 2))
    return f"{first}*{POLICIES[high]},{layers - first}*{POLICIES[low]}"


def with_limits(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first cases that need at least 1 GiB, each twice: under a limit that is too low, and one that is enough."""
    cases: list[dict[str, Any]] = []
    for case in drawn:
        config = resolve_run(RunConfig(**case["config"]), H200)
        needed = replay_run(config, H200).needs
        if needed >= GiB and len(cases) < 2 * LIMITED:
            for sign, side in ((-1, "below"), (1, "above")):
                cases.append({"name": f"{case['name']} {side}", "config": case["config"], "needs": needed,
                              "cap": round(needed * (1 + sign * MARGIN))})
    return cases


GENERATORS = {
    "random": draw, "memory_limit": lambda: with_limits(draw()), "savers_off": savers_off, "held_out": held_out,
    "memory_limit_held_out": lambda: with_limits(held_out()), "attention_kernels": attention_kernels,
    "memory_page": memory_page, "bitsandbytes": bitsandbytes, "ranks": ranks}

if __name__ == "__main__":
    main()
