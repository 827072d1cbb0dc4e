"""How fast and how small is the engine, beside a plain one? On one CUDA card, in one run, interleaved and repeated,
each contender in a process of its own:

    python bench/engine.py --case 124m -o bench/results/engine_124m_h200.json

`plain` is a baseline of ours that does what nanoGPT does (bench/plain.py); `transformers` runs where it is installed.
A contender's settings are knobs of `fitgpt train`, so what is measured here can be run there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from fitgpt import __version__  # noqa: E402
from fitgpt.supervise import child_environment  # noqa: E402
from fitgpt.units import GiB  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "124m": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=12, accumulation=4, dtype="bfloat16"),
    "77m": dict(n_layer=12, n_head=12, n_embd=576, block_size=1024, batch_size=16, accumulation=4, dtype="float16"),
    "30m": dict(n_layer=6, n_head=6, n_embd=384, block_size=512, batch_size=16, accumulation=4, dtype="float16"),
}
LOSSY = dict(weights="bfloat16", residual="bfloat16", optimizer="adam8bit")
OURS: dict[str, dict[str, Any]] = {
    "exact": dict(),
    "exact small": dict(recompute="no_wide"),
    "exact smallest": dict(recompute="input"),
    "exact eager": dict(compile=False),
    "exact unrecorded": dict(cuda_graphs=False),
    "exact all": dict(recompute="all"),
    "lossy": LOSSY,
    "lossy small": {**LOSSY, "recompute": "no_wide"},
    "lossy smallest": {**LOSSY, "recompute": "input"},
}
CONTENDERS: dict[str, dict[str, Any]] = {
    "plain": dict(kind="plain", compiled=True),
    "plain eager": dict(kind="plain", compiled=False),
    "transformers": dict(kind="transformers", compiled=True),
    **{name: dict(kind="ours", knobs=knobs) for name, knobs in OURS.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="124m")
    parser.add_argument("--contenders", default="plain,exact,exact small,lossy,lossy small")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("-o", "--out", default="")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(json.loads(options.child))))
        return
    names = options.contenders.split(",")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            rows[name].append(measure({**CASES[options.case], **CONTENDERS[name], "steps": options.steps}))
    summaries = [summary(name, rows[name], rows.get("plain")) for name in names]
    show(options.case, summaries)
    if options.out:
        Path(options.out).write_text(json.dumps(
            {"what": "training speed and memory, medians of interleaved repeats", "case": CASES[options.case],
             "date": time.strftime("%Y-%m-%d"), "fitgpt": __version__, "repeats": options.repeats,
             "command": " ".join(["python", "bench/engine.py", *map(_as_typed, sys.argv[1:])]), "rows": summaries},
            indent=1) + "\n")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    environment = child_environment({**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'bench'}"})
    done = subprocess.run([sys.executable, __file__, "--child", json.dumps(case)], env=environment,
                          capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "no words"}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """In the child: warms up, times steps one by one, then evaluates."""
    import torch
    from contenders import make_trainer

    from fitgpt.engine.meter import flops_a_token

    started = time.perf_counter()
    trainer, config = make_trainer(case)
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (8, case["batch_size"], case["block_size"] + 1)).cuda()
    batches = [(tokens[i % 8, :, :-1], tokens[i % 8, :, 1:]) for i in range(case["accumulation"])]
    trainer.step(batches)
    torch.cuda.synchronize()
    first_step = time.perf_counter() - started
    for _ in range(4):
        trainer.step(batches)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(case["steps"]):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        trainer.step(batches)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    tokens_a_step = case["accumulation"] * case["batch_size"] * case["block_size"]
    speed = tokens_a_step / statistics.median(seconds)
    for _ in range(3):
        trainer.evaluate(*batches[0])
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        trainer.evaluate(*batches[0])
    torch.cuda.synchronize()
    evaluation_s = time.perf_counter() - begun
    return {"tokens_per_s": speed, "allocated": allocated, "reserved": reserved, "first_step_s": first_step,
            "eval_tokens_per_s": 10 * tokens_a_step / case["accumulation"] / evaluation_s,
            "reserved_with_eval": torch.cuda.max_memory_reserved(),
            "mfu": speed * flops_a_token(config, case["block_size"]) / 989e12,  # H200's dense bf16 rate, its vendor's
            "device": torch.cuda.get_device_name(), "torch": torch.__version__}


def summary(name: str, runs: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> dict[str, Any]:
    failed = [run["error"] for run in runs if "error" in run]
    if failed:
        return {"contender": name, "error": failed[0]}
    figures = [key for key, value in runs[0].items() if isinstance(value, float | int)]
    middle = {key: statistics.median(run[key] for run in runs) for key in figures}
    base = [run["tokens_per_s"] for run in plain or [] if "error" not in run]
    ratio = middle["tokens_per_s"] / statistics.median(base) if base else None
    return {"contender": name, **middle, "ratio_to_plain": ratio, "device": runs[0]["device"],
            "torch": runs[0]["torch"], "runs": runs}


def show(case: str, rows: list[dict[str, Any]]) -> None:
    print(f"{case}: {CASES[case]}")
    for row in rows:
        if "error" in row:
            print(f"{row['contender']:16} {row['error']}")
            continue
        ratio = f"{row['ratio_to_plain']:.3f}" if row["ratio_to_plain"] else "-"
        print(f"{row['contender']:16} {row['tokens_per_s']:>9,.0f} tok/s  × {ratio}  "
              f"reserved {row['reserved'] / GiB:.2f}, after evaluation {row['reserved_with_eval'] / GiB:.2f} GiB  "
              f"mfu {100 * row['mfu']:.1f} %  first step {row['first_step_s']:.1f} s  "
              f"eval {row['eval_tokens_per_s']:,.0f} tok/s")


def _as_typed(word: str) -> str:
    if word.endswith(".json"):
        return f"bench/results/{Path(word).name}"
    return f"'{word}'" if " " in word else word


if __name__ == "__main__":
    main()
