"""What does nanoGPT's own train.py hold, phase by phase? Run as it is, with readings taken where it calls torch.

    python bench/nanogpt.py tests/recorded/nanogpt/cases/common_shapes.json --nanogpt ../nanoGPT \\
        -o tests/recorded/nanogpt/common_shapes.json

The cases are drawn by bench/drawn.py. `--nanogpt` is a checkout of it (the forecasts are of commit 3adf61e1). Each case
runs in a process of its own, on random tokens: load, evaluation (4 batches of each split), 8 iterations, evaluation, 8
iterations, evaluation. An evaluation begins and ends where the model's mode changes, an iteration ends where gradients
are freed. Nothing is timed, so the processes run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt.core.files import write_over  # noqa: E402
from fitgpt.core.units import GiB  # noqa: E402

SCHEDULE = ["--eval_iters=4", "--eval_interval=8", "--max_iters=16", "--log_interval=100", "--wandb_log=False"]
TOKENS = 400_000



def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases")
    parser.add_argument("--nanogpt", required=True, help="the folder with its train.py")
    parser.add_argument("--at_once", type=int, default=8)
    parser.add_argument("-o", "--out", default="")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(json.loads(options.cases), Path(options.nanogpt))))
        return 0
    cases = json.loads(Path(options.cases).read_text(encoding="utf-8"))["cases"]
    rows, writing = dict[str, dict[str, Any]](), threading.Lock()

    def record(case: dict[str, Any]) -> None:
        """Written after each case, so that what is there counts if time runs out."""
        row = in_own_process(case, options.nanogpt)
        with writing:
            rows[case["name"]] = row
            if options.out:
                write(Path(options.out), options.cases, [rows[each["name"]] for each in cases if each["name"] in rows])

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(record, sorted(cases, key=lambda case: not case["config"]["compile"])))
    for row in rows.values():
        print(row["name"], row.get("error") or f"{row['train_reserved'] / GiB:.3f} GiB reserved")
    return int(any("error" in row for row in rows.values()))


# ---- running


def in_own_process(case: dict[str, Any], nanogpt: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as caches:
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2",
                       "TORCHINDUCTOR_CACHE_DIR": caches}
        if case.get("expandable"):
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        done = subprocess.run([sys.executable, __file__, json.dumps(case), "--one", "--nanogpt", nanogpt],
                              capture_output=True, text=True, env=environment, check=False)
    output = done.stdout.strip().splitlines()
    return {**case, **(json.loads(output[-1]) if done.returncode == 0 and output else {"error": done.stderr[-600:]})}


def one(case: dict[str, Any], nanogpt: Path) -> dict[str, Any]:
    """In the child: train.py from its first line to its last."""
    import torch

    nanogpt, readings = nanogpt.resolve(), Readings()
    with tempfile.TemporaryDirectory() as folder:
        enter(Path(folder), nanogpt, case["config"]["vocab_size"])
        take(readings)
        sys.argv = arguments(case["config"], folder, SCHEDULE)
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(nanogpt / "train.py"), run_name="__main__")
        leave()
    return {**readings.row, "torch": torch.__version__, "device": torch.cuda.get_device_name()}


def enter(folder: Path, nanogpt: Path, vocab_size: int, tokens: Path | None = None) -> None:
    """Into a folder where train.py finds data (random, or the folder `tokens`) and its configurator, and Python finds
    its model."""
    os.chdir(folder)
    if tokens is None:
        write_tokens(Path("data") / "drawn", vocab_size)
    else:
        Path("data").mkdir()
        Path("data", "drawn").symlink_to(tokens)
    Path("configurator.py").symlink_to(nanogpt / "configurator.py")
    sys.path.insert(0, str(nanogpt))


def leave() -> None:
    os.chdir("/")


def arguments(config: dict[str, Any], folder: str, schedule: list[str]) -> list[str]:
    settings = {key: value for key, value in config.items() if key != "vocab_size"}
    return ["train.py", "--dataset=drawn", f"--out_dir={folder}/out", *schedule,
            *(f"--{key}={value}" for key, value in settings.items())]


def write_tokens(folder: Path, vocab_size: int) -> None:
    import pickle

    import numpy as np

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        rng.integers(0, min(vocab_size, 2**16), TOKENS, dtype=np.uint16).tofile(folder / f"{split}.bin")
    if vocab_size != 50304:  # else train.py takes GPT-2's, padded
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


class Readings:
    """Peaks between two moments, under the names that tests/recorded/nanogpt/models_30m_to_124m.json has."""

    def __init__(self) -> None:
        self.row: dict[str, int] = {}
        self.training = True
        self.evaluations = self.iterations = 0

    def at(self, moment: str) -> None:
        import torch

        torch.cuda.synchronize()
        stats, row = torch.cuda.memory_stats(), self.row
        allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        if moment == "an evaluation begins" and self.evaluations:
            row["idle"] = stats["allocated_bytes.all.current"]
        elif moment == "an evaluation ends":
            if self.evaluations:
                row["eval_peak"] = max(row.get("eval_peak", 0), allocated)
            else:
                row |= {"eval_first_peak": allocated, "eval_first_reserved": reserved}
            self.evaluations += 1
        elif moment == "an iteration ends":
            if self.iterations:
                row["train_peak"] = max(row.get("train_peak", 0), allocated)
                row["train_reserved"] = max(row.get("train_reserved", 0), reserved)
            else:
                row["train_first_peak"] = allocated
            self.iterations += 1
        torch.cuda.reset_peak_memory_stats()


def take(readings: Readings) -> None:
    """Where nanoGPT's loop calls what is torch's or its model's; nothing is saved, for that takes minutes of disk."""
    import model  # type: ignore[import-not-found]
    import torch

    change_mode, let_go = model.GPT.train, torch.optim.AdamW.zero_grad

    def train(self: Any, mode: bool = True) -> Any:
        if readings.training != mode:  # the model's own word is changed before this is called where it is compiled
            readings.training = mode
            readings.at("an evaluation ends" if mode else "an evaluation begins")
        return change_mode(self, mode)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        let_go(self, set_to_none)
        readings.at("an iteration ends")

    model.GPT.train, torch.optim.AdamW.zero_grad = train, zero_grad
    torch.save = lambda *_, **__: None


def write(path: Path, cases: str, rows: list[dict[str, Any]]) -> None:
    write_over(path, json.dumps(
        {"what": "nanoGPT's own train.py (commit 3adf61e1), run as it is, on one GPU; bytes; order of a run: load, "
         "evaluation (4 batches of each split), 8 iterations, evaluation, 8 iterations, evaluation",
         "date": time.strftime("%Y-%m-%d"), "torch": next((row["torch"] for row in rows if "torch" in row), None),
         "card": next((row["device"] for row in rows if "device" in row), None),
         "command": f"python bench/nanogpt.py {cases} --nanogpt FOLDER", "rows": rows},
        indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
