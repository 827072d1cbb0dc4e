"""Are step time, MFU and tokens/s right in the first report after an evaluation?

    python bench/step_times.py -o bench/results/step_times_h200.json

GPT-2 124M trains for some dozen steps, compiled and eager, with a report every 1, 3 and 10 steps. Evaluations and
checkpoints come between reports, while steps are still queued on the GPU. A report covers the steps since the last one:
those with an evaluation among them must show the same time per step as the others. Timed: it wants the GPU to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SOURCE = os.environ.get("FITGPT_SOURCE") or str(ROOT / "src")  # to time another version
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))}
EVAL_INTERVAL, WARM_UP = 7, 12  # steps; the first ones compile and are captured
RUN = ["--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024", "--batch_size=16", "--vocab_size=50304",
       "--gradient_accumulation_steps=1", "--dtype=bfloat16", "--max_iters=70", "--eval_iters=2", "--warmup_iters=10",
       f"--eval_interval={EVAL_INTERVAL}"]
CASES = [(True, 1), (True, 3), (True, 10), (False, 1), (False, 3), (False, 10)]  # compiled, log_interval


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            np.random.default_rng(0).integers(0, 50257, 400_000, dtype=np.uint16).tofile(Path(folder, f"{split}.bin"))
        rows = [timed(Path(folder), compiled, interval) for compiled, interval in CASES]
    for row in rows:
        after = [report["seconds"] for report in row["reports"] if report["evaluation"]]
        print(f"compile={row['compile']} log_interval={row['log_interval']}: usually "
              f"{1e3 * usual(rows, row['compile']):.2f} ms per step, with an evaluation {1e3 * min(after):.2f} to "
              f"{1e3 * max(after):.2f} ms, MFU at most {max(report['mfu'] for report in row['reports']):.1%}")
    if options.out:
        about = {"what": "time per step of GPT-2 124M, 16 × 1024, in reports with and without an evaluation",
                 "date": time.strftime("%Y-%m-%d"), "command": "python bench/step_times.py"}
        Path(options.out).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def timed(folder: Path, compiled: bool, interval: int) -> dict[str, Any]:
    name = f"run-{compiled}-{interval}"
    subprocess.run([sys.executable, "-P", "-m", "fitgpt", "train", *RUN, "--dataset=.", f"--out_dir={name}",
                    f"--compile={compiled}", f"--log_interval={interval}"], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    reports, before = [], -1
    for row in rows:
        if row["kind"] == "step":
            covered = range(before + 1, row["step"] + 1)  # an evaluation is made before the step of its number
            if covered[0] >= WARM_UP:
                reports.append({"step": row["step"], "seconds": row["seconds"], "mfu": row["mfu"],
                                "tokens_per_s": row["tokens_per_s"],
                                "evaluation": any(step % EVAL_INTERVAL == 0 for step in covered)})
            before = row["step"]
    return {"device_name": rows[0]["device_name"], "versions": rows[0]["versions"], "compile": compiled,
            "log_interval": interval, "reports": reports}


def usual(rows: list[dict[str, Any]], compiled: bool) -> float:
    """Seconds per step in reports without an evaluation: the median."""
    return statistics.median(report["seconds"] for row in rows if row["compile"] == compiled
                             for report in row["reports"] if not report["evaluation"])


if __name__ == "__main__":
    sys.exit(main())
