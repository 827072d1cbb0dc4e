"""How long does a 124M GPT take to an equal validation loss: nanoGPT's train.py, `fitgpt train` with AdamW, with Muon?

    python bench/fineweb_recipe.py sweep --out FOLDER                       learning rates of both optimizers
    python bench/fineweb_recipe.py final --out FOLDER --nanogpt ../nanoGPT  the runs to compare, each alone on the GPU

The model, the batch and the form of the schedule are those of config/fineweb_12gb.py. The text is 50M tokens of the
Python and Markdown files of the installed packages, tokenized by `fitgpt prepare`: set TIKTOKEN_CACHE_DIR where there
is no network. Results are written to FOLDER/fineweb_recipe.json after each run; runs that are in it are not repeated.
Sweep runs share the GPU, because they are not timed. Both stages try to end within --limit_s: what is left is run by
the same command.

All runs are evaluated on the same windows, which nanoGPT's train.py is made to do where it starts its own evaluation.
The time to a loss is the number of steps to it (interpolated) times the median time per step: neither compilation nor
evaluation is part of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import nanogpt  # noqa: E402

import curves  # noqa: E402
from fitgpt import __version__  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.core.files import write_atomically  # noqa: E402
from fitgpt.data.shards import HEADER_BYTES, SPLITS, read_manifest  # noqa: E402
from fitgpt.hardware.allocator_env import child_environment  # noqa: E402

SETTINGS: dict[str, Any] = dict(
    n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=12, gradient_accumulation_steps=8, vocab_size=50304,
    dtype="bfloat16", compile=True, eval_iters=30, eval_interval=20, log_interval=10)
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=64, batch_size=4, gradient_accumulation_steps=2, compile=False,
            dtype="float32", eval_iters=2, eval_interval=2, log_interval=1, device="cpu")
RATES = {"adamw": (1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3), "muon": (6e-4, 1.2e-3, 2.4e-3, 4.8e-3, 9.6e-3)}
TEXT_TOKENS = 50_000_000
TEXT_BYTES = 250_000_000  # more than 50M tokens: code has about 3 bytes per token
SLOWEST = 420_000         # tokens/s on an H200, to predict whether a run ends in time
START_S = 60              # of a run: imports, compilation, the first evaluation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("sweep", "final"))
    parser.add_argument("--out", required=True, help="the folder of fineweb_recipe.json")
    parser.add_argument("--nanogpt", default="", help="the folder with its train.py")
    parser.add_argument("--data", default="data/packages", help="where the tokens are kept")
    parser.add_argument("--sweep_steps", type=int, default=180)
    parser.add_argument("--final_steps", type=int, default=400)
    parser.add_argument("--at_once", type=int, default=4, help="runs of the sweep that share the GPU")
    parser.add_argument("--limit_s", type=float, default=540)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try it out")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        trainer, settings = options.child
        print(json.dumps(train_nanogpt(json.loads(settings), Path(options.nanogpt)) if trainer == "nanogpt" else
                         train_ours(json.loads(settings))))
        return 0
    return Recipe(options, time.time() + options.limit_s).run()


class Recipe:
    """A stage: the runs it consists of, and the file that keeps their results."""

    def __init__(self, options: argparse.Namespace, until: float) -> None:
        self.options, self.until = options, until
        self.path = Path(options.out) / "fineweb_recipe.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.settings = {**SETTINGS, **(TINY if options.tiny else {})}
        self.found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.writing = threading.Lock()

    def run(self) -> int:
        options = self.options
        data = prepared(Path(options.data), TEXT_BYTES // 100 if options.tiny else TEXT_BYTES,
                        TEXT_TOKENS // 100 if options.tiny else TEXT_TOKENS)
        if self.found and self.found["data"] != data:
            raise SystemExit(f"{self.path} is of other text: {self.found['data']}, here {data}. Use another --out.")
        self.found = {"what": "validation loss and time of a 124M GPT on Python and Markdown files of installed "
                      "packages, on one GPU", "fitgpt": __version__, "settings": self.settings, "data": data,
                      "sweep": {}, "final": {}, **self.found}
        cases = self.sweep() if options.stage == "sweep" else self.final()
        left = {name: case for name, case in cases.items() if name not in self.found[options.stage]}
        with ThreadPoolExecutor(options.at_once if options.stage == "sweep" else 1) as pool:
            done = list(pool.map(self.record, left, left.values()))
        self.found["time_to_equal_loss"] = time_to_equal_loss(self.found["final"])
        self.write()
        print(json.dumps({key: self.found[key] for key in ("data", "time_to_equal_loss")}, indent=1))
        for name, row in self.found[options.stage].items():
            print(f"{name:22} val loss {row['evals'][-1][1]:.4f} after {row['evals'][-1][0]} steps, "
                  f"{1000 * row['step_s']:.1f} ms per step, {row['wall_s']:.0f} s in all")
        return int(not all(done))

    def sweep(self) -> dict[str, dict[str, Any]]:
        """By name, the runs that find the learning rates."""
        steps = self.options.sweep_steps
        return {f"{optimizer} {rate:g}": self.case(optimizer, rate, steps, eval_interval=steps // 4)
                for optimizer, rates in RATES.items() for rate in rates}

    def final(self) -> dict[str, dict[str, Any]]:
        """By name, the runs to compare. Muon also with half the steps: a loss in the middle of a schedule is higher
        than that of a schedule which ends there."""
        if not self.options.nanogpt:
            raise SystemExit("Give the folder of nanoGPT: --nanogpt=../nanoGPT")
        steps, best = self.options.final_steps, best_rates(self.found["sweep"])
        if set(best) != set(RATES):
            raise SystemExit(f"{self.path} has no learning rates: first run the stage sweep with the same --out.")
        return {"nanogpt adamw": {**self.case("adamw", best["adamw"], steps), "trainer": "nanogpt"},
                "fitgpt adamw": self.case("adamw", best["adamw"], steps),
                "fitgpt muon": self.case("muon", best["muon"], steps),
                "fitgpt muon, half": self.case("muon", best["muon"], steps // 2)}

    def case(self, optimizer: str, rate: float, steps: int, **changes: Any) -> dict[str, Any]:
        return {"trainer": "fitgpt", **self.settings, "optimizer": optimizer, "learning_rate": rate,
                "min_lr": rate / 10, "max_iters": steps, "lr_decay_iters": steps, "warmup_iters": steps // 10,
                **changes}

    def record(self, name: str, case: dict[str, Any]) -> bool:
        """Runs a case and writes its result. False: it failed, or there is no time for it."""
        tokens = case["max_iters"] * case["gradient_accumulation_steps"] * case["batch_size"] * case["block_size"]
        sharing = self.options.at_once if self.options.stage == "sweep" else 1
        expected_s = START_S + sharing * tokens / SLOWEST
        if not self.options.tiny and time.time() + expected_s > self.until:
            print(f"{name}: left for the next call, it takes about {expected_s:.0f} s", flush=True)
            return False
        print(f"{name}: started", flush=True)
        begun = time.time()
        row = run_alone(case, Path(self.options.data).resolve(), self.options.nanogpt, name)
        with self.writing:
            if "error" in row:
                print(f"{name}: failed\n{row['error']}", flush=True)
                return False
            self.found |= {key: row.pop(key) for key in ("device", "torch")}
            self.found |= {"date": time.strftime("%Y-%m-%d")}
            changes = {key: value for key, value in case.items() if self.settings.get(key) != value}
            self.found[self.options.stage][name] = {**row, "wall_s": round(time.time() - begun, 1), "case": changes}
            self.write()
        print(f"{name}: {row['evals'][-1]} in {time.time() - begun:.0f} s", flush=True)
        return True

    def write(self) -> None:
        write_atomically(self.path, json.dumps(self.found, indent=1) + "\n")


def best_rates(sweep: dict[str, Any]) -> dict[str, float]:
    """Of each optimizer the learning rate that ended with the lowest validation loss."""
    best: dict[str, tuple[float, float]] = {}
    for row in sweep.values():
        found = (row["evals"][-1][1], row["case"]["learning_rate"])
        best[row["case"]["optimizer"]] = min(found, best.get(row["case"]["optimizer"], found))
    return {optimizer: rate for optimizer, (_, rate) in best.items()}


def time_to_equal_loss(final: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each run to the loss at which nanoGPT's ended; None for a run that did not reach it."""
    if "nanogpt adamw" not in final:
        return {}
    target = final["nanogpt adamw"]["evals"][-1][1]
    reached = {name: steps_to(target, row["evals"]) for name, row in final.items()}
    return {"val_loss": target, "runs": {
        name: steps and {"steps": round(steps, 1), "seconds": round(steps * final[name]["step_s"], 1)}
        for name, steps in reached.items()}}


def steps_to(target: float, evals: list[list[float]]) -> float | None:
    """Steps until the loss is first at or below the target, interpolated between two evaluations."""
    for (before, high), (after, low) in pairwise(evals):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None


# ---- the text


def prepared(folder: Path, nbytes: int, tokens: int) -> dict[str, Any]:
    """Tokens of installed packages as nanoGPT's train.bin and val.bin in `folder`, which all runs read."""
    shards = folder.with_name(folder.name + "-shards")
    if not (shards / "manifest.json").exists():
        with tempfile.TemporaryDirectory() as place:
            corpus = Path(place) / "packages.jsonl"
            with corpus.open("w", encoding="utf-8") as file:
                for text in package_texts(nbytes):
                    file.write(json.dumps({"text": text}) + "\n")
            subprocess.run([sys.executable, "-m", "fitgpt", "prepare", str(corpus), f"--out={shards}",
                            f"--max_tokens={tokens}", "--val_fraction=0.02"], check=True,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), *sys.path))})
    manifest = read_manifest(shards)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        with (folder / f"{split}.bin").open("wb") as file:
            for shard in manifest.shards[split]:
                file.write((shards / shard.file).read_bytes()[HEADER_BYTES:])
    return {"tokens": {split: manifest.tokens(split) for split in SPLITS}, "documents": manifest.documents,
            "sha256": hashlib.sha256((folder / "val.bin").read_bytes()).hexdigest(), "python": sys.version.split()[0]}


def package_texts(nbytes: int) -> Iterator[str]:
    """The .py, .md, .rst and .txt files of the standard library and the installed packages, each content once, in the
    order of a hash of their path, up to this many bytes."""
    names: dict[str, Path] = {}
    for root in {Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "purelib", "platlib")}:
        names |= {path.relative_to(root).as_posix(): path for path in root.rglob("*")
                  if path.suffix in (".py", ".md", ".rst", ".txt") and path.is_file()}
    seen = set[str]()
    for name in sorted(names, key=lambda name: hashlib.sha1(name.encode()).digest()):
        text = names[name].read_text(encoding="utf-8", errors="replace")
        if 200 <= len(text) <= 500_000 and text not in seen:  # larger ones are tables
            seen.add(text)
            nbytes -= len(text)
            yield text
        if nbytes < 0:
            return


# ---- a run, in a process of its own


def run_alone(case: dict[str, Any], data: Path, folder: str, name: str) -> dict[str, Any]:
    """Starts the child and passes its progress on, a line every 15 s."""
    with tempfile.TemporaryDirectory() as out:
        settings = {**case, "dataset": str(data), "out_dir": f"{out}/run"}
        trainer = settings.pop("trainer")
        command = [sys.executable, __file__, "final", "--out=", f"--nanogpt={folder}", "--child", trainer,
                   json.dumps(settings)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=child_environment(environment) if trainer == "fitgpt" else environment)
        lines = list[str]()
        assert child.stderr
        assert child.stdout
        shown = time.time()
        for line in child.stderr:
            lines = [*lines[-39:], line]
            if time.time() - shown > 15 and re.search(r"(iter|step) \d+", line):
                print(f"{name}: {line.strip()}", flush=True)
                shown = time.time()
        output = child.stdout.read().splitlines()
        return json.loads(output[-1]) if child.wait() == 0 else {"error": "".join(lines)}


def train_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """`fitgpt train`. Checkpoints are not written: a run has one after each evaluation, 1.5 GB each."""
    from fitgpt.training.loop import CheckpointSaver

    CheckpointSaver.save = lambda *_, **__: None  # type: ignore[method-assign]
    rows = curves.metrics_of(RunConfig(**settings))
    return {"evals": [[row["step"], row["losses"][1]["mean"]] for row in rows if row["kind"] == "eval"],
            "step_s": statistics.median(row["seconds"] for row in rows if row["kind"] == "step"),
            "device": rows[0]["device_name"], "torch": rows[0]["versions"]["torch"]}


def train_nanogpt(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """nanoGPT's train.py, from its first line to its last, evaluated as `fitgpt train` evaluates."""
    import torch

    folder, data = folder.resolve(), settings["dataset"]
    config = RunConfig(**settings)
    clock = Clock(config)
    ours = ("vocab_size", "optimizer", "dataset", "out_dir", "eval_iters")
    options = {key: value for key, value in settings.items() if key not in ours}
    with tempfile.TemporaryDirectory() as here:
        nanogpt.enter(Path(here), folder, config.vocab_size, Path(data))
        clock.attach()
        torch.save = lambda *_, **__: None
        sys.argv = nanogpt.arguments(options, here, ["--eval_iters=1", "--wandb_log=False", "--bias=False"])
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
        nanogpt.leave()
    cuda = torch.cuda.is_available()
    return {"evals": clock.evals, "step_s": statistics.median(clock.step_s[1:] or clock.step_s),
            "device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__}


class Clock:
    """Times nanoGPT's steps between its evaluations, and evaluates on the windows that `fitgpt train` uses."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.evals = list[list[float]]()
        self.step_s = list[float]()  # per interval between two evaluations; the first contains compilation
        self.since = 0.0

    def attach(self) -> None:
        import model  # type: ignore[import-not-found]

        change_mode, training = model.GPT.train, [True]

        def train(gpt: Any, mode: bool = True) -> Any:
            changed, training[0] = training[0] != mode, mode
            result = change_mode(gpt, mode)
            if changed and not mode:
                self.stop(gpt)
            elif changed:
                self.since = self.now()
            return result

        model.GPT.train = train

    def now(self) -> float:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def stop(self, gpt: Any) -> None:
        if self.evals:
            self.step_s.append((self.now() - self.since) / self.config.eval_interval)
        loss = curves.validation_loss(gpt, self.config)
        self.evals.append([len(self.evals) * self.config.eval_interval, loss])
        print(f"step {self.evals[-1][0]}: val loss {loss:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
