"""Do the runs of the notes train and evaluate on a 12 GB GPU? Each runs in a process of its own, under an allocator
cap that plays the card: what CUDA gives of it, less what a process holds outside the allocator.

    python bench/capped.py --gpu 4070 --dataset data/stdlib-gpt2 -o bench/results/capped_4070_on_h200.json

Needs a CUDA card with at least that much memory. The processes run side by side: nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt import __version__  # noqa: E402
from fitgpt.config.argv import walk  # noqa: E402
from fitgpt.config.run_config import RunConfig, config_from  # noqa: E402
from fitgpt.core.units import MiB, parse_bytes, show_bytes  # noqa: E402
from fitgpt.hardware.allocator_env import child_environment  # noqa: E402
from fitgpt.hardware.gpus import find  # noqa: E402

SHORT = ["--max_iters=6", "--eval_interval=3", "--eval_iters=4", "--log_interval=1", "--gradient_accumulation_steps=4"]
LOSSY = ["--weights=bfloat16", "--residual=bfloat16", "--optimizer=adam8bit", "--saved_activations=input"]
XL = ["--dtype=bfloat16", "--max_iters=3", "--eval_interval=3", "--eval_iters=1", "--eval_batch_size=1",
      "--log_interval=1", "--gradient_accumulation_steps=2"]
CASES: dict[str, list[dict[str, Any]]] = {
    "notes": [dict(config=config, flags=[*SHORT, f"--dtype={dtype}", f"--compile={compiled}"])
              for config, dtype, compiled in product(("config/notes_77m.py", "config/notes_30m.py"),
                                                     ("float16", "bfloat16"), (False, True))],
    # each evaluates, trains, evaluates, saves, and resumes from what it saved: a second process continues to step 4
    "xl": [dict(config="config/gpt2_1558m.py", flags=[*XL, *LOSSY, f"--batch_size={batch}"], resume=True)
           for batch in (2, 8)],
    "xl-exact": [dict(config="config/gpt2_1558m.py", flags=[*XL, "--offload=gradients", "--saved_activations=input",
                                                            "--batch_size=2"], resume=True)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="4070")
    parser.add_argument("--cases", choices=CASES, default="notes")
    parser.add_argument("--cap", default="", help="the allocator's, such as 11.3GiB; default: what the GPU leaves it")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--folder", help="where the runs' folders go, for a while: GPT-2 XL's checkpoints are large")
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    card = find(options.gpu)
    assert card.usable_mib is not None
    assert card.outside_mib is not None
    cap = parse_bytes(options.cap) if options.cap else (card.usable_mib - card.outside_mib) * MiB
    common = {"cap": cap, "dataset": options.dataset, "folder": options.folder}
    cases = [{**case, **common} for case in CASES[options.cases]]
    with ThreadPoolExecutor(len(cases) if options.cases == "notes" else 1) as pool:
        rows = list(pool.map(measure, cases))
    Path(options.out).write_text(json.dumps(
        {"what": "peaks in bytes of short runs under an allocator cap", "date": time.strftime("%Y-%m-%d"),
         "card": card.name, "cap_bytes": cap, "fitgpt": __version__, "command": command(), "rows": rows},
        indent=1) + "\n")
    for row in rows:
        print(f"{row['config']:24} {' '.join(row['flags'][-3:])}", row.get("error") or as_text(row, cap))


def command() -> str:
    """As typed, but for the folder the result goes to: that is the same for everybody."""
    words = [f"bench/results/{Path(word).name}" if word.endswith(".json") else word for word in sys.argv[1:]]
    return " ".join(["python", "bench/capped.py", *words])


def as_text(row: dict[str, Any], cap: int) -> str:
    return (f"train {show_bytes(row['train_reserved'])} eval {show_bytes(row['eval_reserved'])} reserved, of "
            f"{show_bytes(cap)}; val loss {row['val_loss']:.3f}; steps {row['steps']}; "
            f"{row['tokens_per_s']:,.0f} tok/s; " + " + ".join(f"{each:.0f} s" for each in row["seconds"]))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Runs one case, each part in its own process; returns its peaks, or how it failed."""
    parts = [case["flags"], [*case["flags"], "--init_from=resume", "--max_iters=4"]][:1 + case.get("resume", False)]
    seconds = []
    with tempfile.TemporaryDirectory(dir=case["folder"]) as folder:
        for flags in parts:
            order = json.dumps({**case, "flags": flags, "out_dir": str(Path(folder) / "out")})
            started = time.perf_counter()
            done = subprocess.run([sys.executable, __file__, "--dataset=", "-o=", "--child", order], cwd=ROOT,
                                  env=child_environment({**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}),
                                  capture_output=True, text=True)
            seconds.append(time.perf_counter() - started)
            if done.returncode:
                print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
                return {**case, "error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no words"}
        rows = [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()]
    steps, evals = ([row for row in rows if row["kind"] == kind] for kind in ("step", "eval"))
    rehearsed = {phase: seen for row in rows if row["kind"] == "rehearsal" for phase, seen in row["phases"].items()}

    def allocated(seen: list[dict[str, Any]], *phases: str) -> int:
        """A replayed recording's tensors are not counted: the rehearsal, where work first runs as it is, shows them."""
        return max([*(row["memory"]["peak_allocated"] for row in seen),
                    *(rehearsed[phase]["allocated_bytes"] for phase in phases if phase in rehearsed)])

    return {**case, "seconds": seconds, "save_s": [row["seconds"] for row in rows if row["kind"] == "save"],
            "step_s": [row["seconds"] for row in steps], "dtype": rows[0]["dtype"], "compile": rows[0]["compiled"],
            "versions": rows[0]["versions"], "device_name": rows[0]["device_name"],
            "train_allocated": allocated(steps, "first_train", "train"),
            "train_reserved": max(row["memory"]["peak_reserved"] for row in steps),
            "first_eval_allocated": allocated(evals[:1], "first_eval"),
            "first_eval_reserved": evals[0]["memory"]["peak_reserved"],
            "eval_allocated": allocated(evals, "first_eval", "eval"),
            "eval_reserved": max(row["memory"]["peak_reserved"] for row in evals),
            "losses": [row["loss"] for row in steps], "steps": [row["step"] for row in steps],
            "tokens_per_s": max(row["tokens_per_s"] for row in steps), "val_loss": evals[-1]["losses"][1]["mean"]}


def child(case: dict[str, Any]) -> None:
    import torch

    from fitgpt.training.run import run

    torch.cuda.set_per_process_memory_fraction(case["cap"] / torch.cuda.get_device_properties(0).total_memory)
    flags = [*case["flags"], f"--dataset={case['dataset']}", f"--out_dir={case['out_dir']}"]
    config, notes = config_from(walk([str(ROOT / case["config"]), *flags], RunConfig))
    run(config.to_dict(), notes, lambda: False)


if __name__ == "__main__":
    main()
