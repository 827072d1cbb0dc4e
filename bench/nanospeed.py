"""How many tokens a second does nanoGPT's own train.py train? Read off the lines that it prints, an iteration each.

    python bench/nanospeed.py --nanogpt ../nanoGPT -o bench/results/nanospeed_h200.json

`--nanogpt` is a checkout of it. Several processes compile and warm up side by side; then each waits for its turn, and
is alone on the card while it is timed. The median of the last iterations counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import drawn
import nanogpt

WARM, TIMED = 10, 14  # iterations
SCHEDULE = ["--eval_iters=1", "--eval_interval=1000", f"--max_iters={WARM + TIMED}", "--log_interval=1",
            "--wandb_log=False"]
TOGETHER = 100  # GiB, of those that share the GPU while they wait
GPT2 = dict(n_layer=12, n_head=12, n_embd=768, batch_size=12, block_size=1024, gradient_accumulation_steps=2,
            dtype="bfloat16", dropout=0.0, bias=False, compile=True, vocab_size=50304)
MEDIUM = {**GPT2, "n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 4}
LARGE = {**GPT2, "n_layer": 36, "n_head": 20, "n_embd": 1280, "batch_size": 4}
CHAR = {**GPT2, "n_layer": 6, "n_head": 6, "n_embd": 384, "batch_size": 64, "block_size": 256, "dropout": 0.2,
        "gradient_accumulation_steps": 1, "vocab_size": 65}
CASES: dict[str, dict[str, Any]] = {
    "124M": GPT2, "124M, eager": {**GPT2, "compile": False}, "124M, batch 1": {**GPT2, "batch_size": 1},
    "124M, biases and dropout": {**GPT2, "bias": True, "dropout": 0.1}, "124M, batch 32": {**GPT2, "batch_size": 32},
    "124M, float32": {**GPT2, "dtype": "float32", "batch_size": 8},
    "124M, 40 micro-batches of 4": {**GPT2, "batch_size": 4, "gradient_accumulation_steps": 40},
    "124M, eager, biases and dropout": {**GPT2, "compile": False, "bias": True, "dropout": 0.1},
    "77M": drawn.NOTES_77M, "77M, eager": {**drawn.NOTES_77M, "compile": False},
    "30M": drawn.NOTES_30M, "30M, eager": {**drawn.NOTES_30M, "compile": False},
    "350M": MEDIUM, "350M, eager": {**MEDIUM, "compile": False}, "774M": LARGE,
    "characters": CHAR, "characters, eager": {**CHAR, "compile": False},
    "124M, block 256": {**GPT2, "block_size": 256, "batch_size": 48},
    "124M, block 4096": {**GPT2, "block_size": 4096, "batch_size": 3},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", required=True, help="the folder with its train.py")
    parser.add_argument("-o", "--out", default="")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(json.loads(options.one[0]), Path(options.one[1]), Path(options.nanogpt))))
        return 0
    rows: list[dict[str, Any]] = []
    for group in groups():
        rows += together(group, options.nanogpt)
        if options.out:
            write(Path(options.out), rows)
    for row in rows:
        print(row["name"], row.get("error") or f"{row['tokens_per_s']:,.0f} tokens/s")
    return int(any("error" in row for row in rows))


def groups() -> list[list[str]]:
    """Cases that fit on the GPU together, in order."""
    found: list[list[str]] = []
    room = 0.0
    for name, config in CASES.items():
        held = drawn.predict(config)["train_reserved"] / drawn.GiB + 1
        if held > room or len(found[-1]) == 10:
            found.append([])
            room = TOGETHER
        found[-1].append(name)
        room -= held
    return found


def together(names: list[str], folder: str) -> list[dict[str, Any]]:
    """All warm up; then each continues once the one before it has ended."""
    with tempfile.TemporaryDirectory() as place:
        signs = [Path(place) / str(number) for number in range(len(names))]
        children = [subprocess.Popen([sys.executable, __file__, "--nanogpt", folder, "--one", json.dumps(CASES[name]),
                                      str(sign)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                     env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"})
                    for name, sign in zip(names, signs, strict=True)]
        while not all(sign.with_suffix(".ready").exists() or child.poll() is not None
                      for sign, child in zip(signs, children, strict=True)):
            time.sleep(0.2)
        rows = []
        for name, sign, child in zip(names, signs, children, strict=True):
            sign.with_suffix(".go").touch()
            output, errors = child.communicate()
            rows.append({"name": name, "config": CASES[name],
                         **(json.loads(output.splitlines()[-1]) if child.returncode == 0 else
                            {"error": errors[-600:]})})
        return rows


def one(config: dict[str, Any], sign: Path, folder: Path) -> dict[str, Any]:
    """In the child: train.py from its first line to its last; it waits once it is warm."""
    import torch

    folder, printed = folder.resolve(), sign.with_suffix(".log")
    with tempfile.TemporaryDirectory() as here:
        nanogpt.enter(Path(here), folder, config["vocab_size"])
        wait_when_warm(sign)
        torch.save = lambda *_, **__: None
        sys.argv = nanogpt.arguments(config, here, SCHEDULE)
        with printed.open("w", encoding="utf-8") as lines, redirect_stdout(lines):
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
        nanogpt.leave()
    times = [float(found) for found in re.findall(r"time ([\d.]+)ms", printed.read_text(encoding="utf-8"))]
    last = times[-(TIMED - 2):]  # the first of them is as long as it waited
    tokens = config["batch_size"] * config["block_size"] * config["gradient_accumulation_steps"]
    return {"tokens_per_s": round(1000 * tokens / statistics.median(last), 1), "ms": last,
            "torch": torch.__version__, "device": torch.cuda.get_device_name()}


def wait_when_warm(sign: Path) -> None:
    import torch

    let_go, done = torch.optim.AdamW.zero_grad, [0]

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        let_go(self, set_to_none)
        done[0] += 1
        if done[0] == WARM:
            torch.cuda.synchronize()
            sign.with_suffix(".ready").touch()
            while not sign.with_suffix(".go").exists():
                time.sleep(0.05)

    torch.optim.AdamW.zero_grad = zero_grad  # type: ignore[method-assign]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    nanogpt.write_over(path, json.dumps(
        {"what": "nanoGPT's own train.py (commit 3adf61e1), run as it is and alone on one GPU: tokens per second, from "
         f"the median of the {TIMED - 2} last iterations that it prints",
         "date": time.strftime("%Y-%m-%d"), "torch": next((row["torch"] for row in rows if "torch" in row), None),
         "card": next((row["device"] for row in rows if "device" in row), None),
         "command": "python bench/nanospeed.py --nanogpt FOLDER", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
