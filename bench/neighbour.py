"""What happens to a run when another process takes the GPU's memory during it?

    python bench/neighbour.py -o bench/results/neighbour_h200.json

The same short run of GPT-2 124M twice: alone, and beside a process that waits for some steps, then takes all that is
free but for a little, and whatever the run releases, for as long as it stays. A run that has all it will ever need
does not notice such a neighbour: PyTorch keeps what it once had. So this one has no rehearsal, and its evaluations need
more than its training: the first of them after the neighbour came is recorded anew, asks for memory that is gone, and
lets go of what training will want again.

It passes if both runs end well, memory ran out at least once in a training step, and every step was taken once, in
order. The losses of the two are compared before the first time it ran out and after: two runs of the same settings
differ on a card, which adds up gradients in no fixed order, and that is the measure of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt import __version__  # noqa: E402
from fitgpt.core.units import GiB, MiB, parse_bytes, show_bytes  # noqa: E402

RUN = ["--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024", "--batch_size=16", "--dtype=bfloat16",
       "--gradient_accumulation_steps=2", "--eval_batch_size=384", "--eval_iters=24", "--eval_interval=40",
       "--log_interval=1", "--warmup_iters=10", "--lr_decay_iters=200", "--vocab_size=50304", "--rehearse=False",
       "--step_up"]
LARGE, CHUNK = 8 * GiB, 64 * MiB
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="data/stdlib-gpt2", help="real text: a loss that falls evenly compares")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--after", type=int, default=6, help="steps before the neighbour comes")
    parser.add_argument("--stays_s", type=float, default=20.0)
    parser.add_argument("--leaves", default="1GiB", help="what it leaves free")
    parser.add_argument("-o", "--out", default="")
    parser.add_argument("--neighbour", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.neighbour:
        be_the_neighbour(Path(options.neighbour), options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        alone = run(Path(folder), "alone", options)
        beside = run(Path(folder), "beside", options, neighbour=True)
    verdict = judge(alone, beside, options.steps)
    result = {"what": "GPT-2 124M, 2 × 16 × 1024, alone and beside a process that takes the GPU's memory",
              "date": time.strftime("%Y-%m-%d"), "fitgpt": __version__,
              "command": "python bench/neighbour.py", "steps": options.steps, "leaves": options.leaves,
              **verdict, "alone": alone, "beside": beside}
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(verdict, indent=1))
    return 0 if verdict["passed"] else 1


def run(folder: Path, name: str, options: argparse.Namespace, *, neighbour: bool = False) -> dict[str, Any]:
    """`fitgpt train` as a user types it, and its record."""
    out = folder / name
    training = subprocess.Popen([sys.executable, "-m", "fitgpt", "train", *RUN, f"--dataset={options.dataset}",
                                 f"--max_iters={options.steps}", f"--out_dir={out}"], env=ENVIRONMENT,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    other = None
    if neighbour:
        other = subprocess.Popen([sys.executable, __file__, "--neighbour", str(out / "metrics.jsonl"), "--after",
                                  str(options.after), "--stays_s", str(options.stays_s), "--leaves",
                                  options.leaves], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    said, _ = training.communicate()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "exit_code": training.returncode, "last_words": said.replace(str(folder), "…").strip().splitlines()[-4:],
        "device_name": rows[0]["device_name"], "versions": rows[0]["versions"],
        "losses": {row["step"]: row["loss"] for row in rows if row["kind"] == "step"},
        "val_losses": {row["step"]: row["losses"][1]["mean"] for row in rows if row["kind"] == "eval"},
        "events": [row for row in rows if row["kind"] in ("oom", "step_down", "step_up", "warning", "note")],
        "steps_in_order": [row["step"] for row in rows if row["kind"] == "step"],
        "plan": next((row for row in rows if row["kind"] == "plan"), None)}
    if other is not None:
        output, _ = other.communicate(timeout=120)
        found["neighbour"] = json.loads(output.strip().splitlines()[-1]) if output.strip() else {}
    return found


def be_the_neighbour(metrics: Path, options: argparse.Namespace) -> None:
    """Waits for the run, then takes what is free, chunk by chunk."""
    import torch

    torch.empty(1, device="cuda")  # a context, before it counts
    leaves, held, most = parse_bytes(options.leaves), [], 0
    while steps_done(metrics) < options.after:
        time.sleep(0.02)
    end = time.monotonic() + options.stays_s
    while time.monotonic() < end:
        free, _ = torch.cuda.mem_get_info()
        try:
            if free > leaves + LARGE + CHUNK:  # quickly at first, then carefully
                held.append(torch.empty(LARGE, dtype=torch.uint8, device="cuda"))
            elif free > leaves + CHUNK:
                held.append(torch.empty(CHUNK, dtype=torch.uint8, device="cuda"))
            else:
                time.sleep(0.002)
        except torch.OutOfMemoryError:
            time.sleep(0.002)
        most = max(most, sum(map(len, held)))
    print(json.dumps({"took_bytes": most, "took": show_bytes(most), "stayed_s": options.stays_s,
                      "run_was_at_step": steps_done(metrics)}), flush=True)


def steps_done(metrics: Path) -> int:
    try:
        rows = metrics.read_text().splitlines()
    except OSError:
        return 0
    return sum('"kind": "step"' in row for row in rows)


def judge(alone: dict[str, Any], beside: dict[str, Any], steps: int) -> dict[str, Any]:
    first = min((row["step"] for row in beside["events"] if row["kind"] == "oom"), default=steps)
    differences = {int(step): abs(beside["losses"][step] / loss - 1) for step, loss in alone["losses"].items()
                   if step in beside["losses"]}
    ran_out = {phase: sum(row["kind"] == "oom" and row.get("phase") == phase for row in beside["events"])
               for phase in ("train", "step", "eval")}
    ended = alone["exit_code"] == beside["exit_code"] == 0
    once = beside["steps_in_order"] == list(range(steps))
    return {"passed": ended and once and ran_out["train"] > 0,
            "both_ended_well": ended, "every_step_taken_once": once, "ran_out": ran_out,
            "stepped_down": [row["text"] for row in beside["events"] if row["kind"] == "step_down"],
            "stepped_up": [row["text"] for row in beside["events"] if row["kind"] == "step_up"],
            "first_ran_out_at_step": first,
            "largest_difference_of_a_loss_before": max((each for at, each in differences.items() if at < first),
                                                       default=None),
            "largest_difference_of_a_loss_after": max((each for at, each in differences.items() if at >= first),
                                                      default=None),
            "neighbour": beside.get("neighbour")}


if __name__ == "__main__":
    sys.exit(main())
