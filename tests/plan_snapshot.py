"""A snapshot of `plan --json` for 300 generated runs of both trainers: bytes, verdicts and owners.

    python tests/plan_snapshot.py --write     records the answers of the code as it is
    python tests/plan_snapshot.py             compares, and names each figure that changed

A change that should not alter any forecast must reproduce it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from fitgpt.commands.main import main as fitgpt

SNAPSHOT = Path(__file__).parent / "recorded" / "plan_snapshot.json"
SEED, RUNS = 20261117, 150  # runs per trainer
GPUS = ("4070", "3060", "4060 Ti 16GB", "3090", "4090", "2080 Ti", "5090", "H200", "A100 80GB", "T4")
TEXTS = ("schema", "torch", "assumes", "track_record", "formulas", "changes", "options", "notes", "sources", "not_seen",
         "tight", "nearest_recorded_run")
TORCH = "2.11"  # the version that was measured, so that a new one changes nothing here


def generate() -> list[list[str]]:
    """Command lines of `plan`; most are of usual shapes, some of odd ones."""
    rng, lines = random.Random(SEED), list[list[str]]()
    for trainer in ("fitgpt", "nanogpt"):
        for _ in range(RUNS):
            heads = rng.choice([1, 2, 4, 6, 8, 12, 12, 16, 25])
            options: dict[str, Any] = {
                "n_layer": rng.choice([1, 2, 4, 6, 8, 12, 12, 24, 36]), "n_head": heads,
                "n_embd": heads * rng.choice([32, 48, 64, 64, 64, 42, 80, 128]),
                "batch_size": rng.choice([1, 2, 3, 4, 8, 12, 16, 32]),
                "block_size": rng.choice([64, 128, 256, 500, 512, 1024, 1024, 2048]),
                "vocab_size": rng.choice([65, 8192, 50257, 50304, 50304, 50304, 100277]),
                "gradient_accumulation_steps": rng.choice([1, 2, 4, 5, 40]),
                "dtype": rng.choice(["auto", "auto", "float16", "float32"]),
                "compile": rng.choice(["auto", True, False]), "bias": rng.random() < 0.4,
                "dropout": rng.choice([0.0, 0.0, 0.1])}
            if trainer == "fitgpt":
                options |= {key: value for key, value in (
                    ("saved_activations", rng.choice(["all", "no_mlp_up", "attention_proj", "attention",
                                              "input"])),
                    ("weights", "bfloat16"), ("residual", "bfloat16"), ("optimizer", rng.choice(["adam8bit", "muon"])),
                    ("offload", rng.choice(["optimizer", "gradients"])), ("loss_chunk", rng.choice([256, 1024, 4096])),
                    ("eval_batch_size", rng.choice([1, 4, 16])), ("eval_block_size", 64), ("cuda_graphs", False),
                    ("casts", "kept"), ("gradients", "kept"), ("states", "late"), ("grad_clip", 0.0),
                    ("grad_checkpoint", True), ("eval_only", True)) if rng.random() < 0.15}
            argv = ["plan", "--json", "--gpu", rng.choice(GPUS), f"--trainer={trainer}"]
            if rng.random() < 0.1:
                argv += ["--budget", rng.choice(["3GiB", "6GiB"])]
            lines.append(argv + [f"--{key}={value}" for key, value in options.items()])
    for trainer in ("fitgpt", "nanogpt"):
        lines.append(["plan", "--json", "--all-cards", f"--trainer={trainer}", "--n_layer=6", "--n_head=6",
                      "--n_embd=384"])
    return lines


def answer(argv: list[str]) -> dict[str, Any]:
    """The exit code, and what `plan` prints but for its texts."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = fitgpt([*argv, f"--torch={TORCH}"])
    said = json.loads(out.getvalue()) if out.getvalue() else {}
    return {"exit": code, **{key: value for key, value in said.items() if key not in TEXTS}}


def differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new, name = before.get(key), now.get(key), f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, name + ".")
        elif old != new:
            found.append(f"{name}: {old} -> {new}")
    return found


def main() -> int:
    for name in [name for name in os.environ if "ALLOC_CONF" in name]:
        del os.environ[name]
    write = "--write" in sys.argv
    known = {} if write else {tuple(row["argv"]): row for row in json.loads(SNAPSHOT.read_text())["plans"]}
    rows, changed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for argv in generate():
            row = {"argv": argv, **answer(argv)}
            rows.append(row)
            if not write and (found := differences(known[tuple(argv)], row)):
                changed += 1
                print(" ".join(argv), *found, sep="\n  ")
        os.chdir("/")
    if write:
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        SNAPSHOT.write_text(f'{{"command":"python tests/plan_snapshot.py --write","plans":[\n{lines}\n]}}\n')
    codes = Counter(row["exit"] for row in rows)
    print(f"{len(rows)} plans, {codes[0]} fit, {codes[10]} are tight, {codes[1]} do not fit, {codes[2]} rejected"
          + ("" if write else f"; {changed} changed"))
    return changed > 0


if __name__ == "__main__":
    sys.exit(main())
