"""The recorded runs' configs, drawn at random over models, batches, dtypes, savers, eager and compiled.

    python tests/golden/sampler.py tests/golden/cases.json          the runs
    python tests/golden/sampler.py tests/golden/caps.json --caps    some of them under caps around what they need
    python tests/golden/sampler.py tests/golden/switches.json --switches   savers off that are on by themselves
    python tests/golden/sampler.py tests/golden/fresh.json --fresh         wider, and drawn when all else was done
    python tests/golden/sampler.py tests/golden/fresh_caps.json --fresh_caps   some of these under caps
    python tests/golden/sampler.py tests/golden/kernels.json --kernels     each attention kernel, not drawn but chosen
    python tests/golden/sampler.py tests/golden/notes.json --notes         docs/memory.md's runs, and their remedies
    python tests/golden/sampler.py tests/golden/bitsandbytes.json --bitsandbytes   its 8-bit states, chosen

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

from fitgpt.config.memory_savers import LEVELS  # noqa: E402
from fitgpt.config.resolve import resolve_run  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.core.errors import UsageError  # noqa: E402
from fitgpt.core.units import GiB  # noqa: E402
from fitgpt.memory.platform import Platform  # noqa: E402
from fitgpt.memory.timeline import needs  # noqa: E402
from fitgpt.planning.forecast import write_tape  # noqa: E402

SEED, RUNS, SWITCHED, FRESH, CAPPED = 20261115, 48, 13, 48, 20
H200 = Platform((9, 0), "2.11")
OFF = 0.02  # how far a cap lies from what a run needs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    for kind in WRITTEN:
        parser.add_argument(f"--{kind}", action="store_true")
    options = parser.parse_args()
    cases = next((write() for kind, write in WRITTEN.items() if getattr(options, kind)), None) or draw()
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


NOTES = {  # docs/memory.md's two runs, and what the notes propose for each
    "77M": (dict(n_layer=12, n_head=12, n_embd=576, block_size=1024), {
        "": {}, "eval_batch_size 4": dict(eval_batch_size=4), "eval_block_size 512": dict(eval_block_size=512),
        "width 512": dict(n_embd=512, n_head=8), "grad_checkpoint": dict(grad_checkpoint=True)}),
    "30M": (dict(n_layer=6, n_head=6, n_embd=384, block_size=512), {
        "": {}, "batch 8": dict(batch_size=8, gradient_accumulation_steps=8), "block 256": dict(block_size=256),
        "grad_checkpoint": dict(grad_checkpoint=True)})}


def notes() -> list[dict[str, Any]]:
    others = dict(batch_size=16, gradient_accumulation_steps=4, dtype="float16", vocab_size=50304, compile=True)
    return [{"name": f"{size}, {words}" if words else size, "config": {**others, **shape, **knobs}}
            for size, (shape, remedies) in NOTES.items() for words, knobs in remedies.items()]


def bitsandbytes() -> list[dict[str, Any]]:
    """Compiled and recorded as GPT-2 124M; float16, whose steps may be skipped, and wide biases; eager, states late."""
    base = dict(n_layer=12, n_head=12, n_embd=768, batch_size=4, block_size=1024, vocab_size=50304,
                gradient_accumulation_steps=2, dtype="bfloat16", compile=True, optimizer="adam8bit",
                adam8bit="bitsandbytes")
    return [{"name": name, "config": {**base, **knobs}} for name, knobs in (
        ("compiled", {}),
        ("float16", dict(n_layer=3, n_head=16, n_embd=1040, dtype="float16", bias=True, vocab_size=8192)),
        ("eager", dict(n_layer=4, n_head=6, n_embd=252, block_size=512, compile=False, states="late")))]


def switched() -> list[dict[str, Any]]:
    """Small ones, each with at least one of the savers off that are on by themselves."""
    def also(dice: random.Random, knobs: dict[str, Any]) -> dict[str, Any] | None:
        drawn = {"casts": dice.choice(["transient", "kept"]), "gradients": dice.choice(["freed", "kept"]),
                 "states": dice.choice(["early", "late"])}
        off = {knob: value for knob, value in drawn.items() if value in ("kept", "late")}
        return {**knobs, **off} if off else None

    return draw(SEED + 1, SWITCHED, also)


def fresh() -> list[dict[str, Any]]:
    """Deeper and flatter, longer histories, odd lengths, narrow and wide heads, every saver that can be switched."""
    def also(dice: random.Random, knobs: dict[str, Any]) -> dict[str, Any]:
        heads = knobs["n_head"]
        wider = {"n_layer": dice.choice([1, 5, 9, 18, 24]), "n_embd": heads * dice.choice([16, 24, 72, 96, 100, 128]),
                 "batch_size": dice.choice([3, 5, 10, 48, 64]), "block_size": dice.choice([64, 300, 768, 1000, 1536]),
                 "vocab_size": dice.choice([257, 4096, 32000, 49152]), "dropout": 0.2, "loss_chunk": 512,
                 "gradient_accumulation_steps": dice.choice([3, 5, 8, 16]), "eval_block_size": 64, "casts": "kept",
                 "gradients": "kept", "states": "late", "grad_clip": 0.0}
        return knobs | {knob: value for knob, value in wider.items() if dice.random() < 0.25}

    return draw(SEED + 2, FRESH, also)


def draw(seed: int = SEED, runs: int = RUNS, also: Any = lambda dice, knobs: knobs) -> list[dict[str, Any]]:
    dice, cases = random.Random(seed), list[dict[str, Any]]()
    while len(cases) < runs:
        knobs = also(dice, one(dice))
        if knobs is None:
            continue
        try:
            config = resolve_run(RunConfig(**knobs), H200)
        except UsageError:
            continue
        work = config.gpt_config().count_params() * config.tokens_per_step
        if work < 4e13 and needs(write_tape(config, H200), expandable=True) < 40 * GiB:
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


def capped(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first cases that need at least 1 GiB, each twice: under a cap that is too low, and one that is enough."""
    cases: list[dict[str, Any]] = []
    for case in drawn:
        config = resolve_run(RunConfig(**case["config"]), H200)
        wanted = needs(write_tape(config, H200), expandable=True)
        if wanted >= GiB and len(cases) < 2 * CAPPED:
            for sign, word in ((-1, "below"), (1, "above")):
                cases.append({"name": f"{case['name']} {word}", "config": case["config"], "needs": wanted,
                              "cap": round(wanted * (1 + sign * OFF))})
    return cases


WRITTEN = {"bitsandbytes": bitsandbytes, "caps": lambda: capped(draw()), "fresh": fresh,
           "fresh_caps": lambda: capped(fresh()), "kernels": kernels, "notes": notes, "switches": switched}

if __name__ == "__main__":
    main()
