"""Damage to every kind of file that fitgpt reads: a bit, a byte, a digit, a page of zeros, a cut, growth.

Damage is *noticed* if the file is rejected, or if another one is used and that is said; *harmless* if what is read is
the same; *silent* if something else is read and nothing is said. A format without a checksum cannot be better than what
it stores: for these (UNCHECKED) the campaign requires a result or a clear error. Silent damage is counted, not failed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fitgpt.commands.main import main
from fitgpt.config.architectures import parameter_shapes
from fitgpt.config.config_file import parse_config
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import FitError
from fitgpt.data.dataset import open_dataset
from fitgpt.data.shards import read_meta
from fitgpt.diagnosis.memory_snapshot import explain_snapshot, read_snapshot
from fitgpt.engine import huggingface
from fitgpt.engine.nanogpt_checkpoint import read_nanogpt
from fitgpt.engine.weights import WeightSource
from fitgpt.planning import measured_speeds, plan_file
from fitgpt.runs.folder import recorded_config
from fitgpt.runs.metrics import read_metrics
from fitgpt.training import checkpoint
from fitgpt.training.run import run as train
from tests.helpers import write_dataset

from .faults import PREPARE, must, with_texts
from .outcome import Campaign, Outcome
from .processes import TRAIN, contents, fitgpt, fresh, isolated

REQUIRED = "0 silent of 5,000"
KINDS = ("bit", "byte", "digit", "page", "cut", "growth", "empty")
PER_CHECKED, PER_UNCHECKED = 420, 100
PAGE = 4096
ROOT = Path(__file__).resolve().parents[2]


class Noticed(Exception):
    """The damage was named, and something else used."""


class Target(NamedTuple):
    template: str                     # the folder it is in
    file: str
    read: Callable[[Path], Any]       # the folder → what was read of the file; FitError or Noticed if it noticed


# ---- readers: what counts as read

def digest(tensors: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, each in tensors.items()}


def source(found: WeightSource) -> Any:
    if found.notes:
        raise Noticed
    return digest(found.weights), digest(found.optimizer), found.state, asdict(found.gpt), found.config


def last_checkpoint(folder: Path) -> Any:
    loaded = checkpoint.load(folder / "out" / "checkpoints")
    if loaded.notes:
        raise Noticed
    return loaded.step, digest(loaded.model), digest(loaded.optimizer), loaded.state, loaded.best, loaded.status


def shards(folder: Path) -> Any:
    """A run opens the dataset, which must notice; what it would train on are all tokens."""
    os.chdir(folder)
    shutil.rmtree("out", ignore_errors=True)
    config = RunConfig(dataset="data", out_dir="out", device="cpu", compile=False, n_layer=1, n_head=1, n_embd=8,
                       block_size=8, vocab_size=257, batch_size=2, gradient_accumulation_steps=1, max_iters=1,
                       eval_interval=1, eval_iters=1)
    train(config.to_dict(), [], lambda: False)
    opened = open_dataset("data")
    return [np.fromfile(shard.path, "<u2", offset=shard.start).tobytes()
            for split in ("train", "val") for shard in opened.split(split).shards], asdict(opened.summary)


def prepared(folder: Path) -> Any:
    """`prepare` resumes from the saved state to the end."""
    ended = fitgpt(PREPARE, folder)
    if ended.problem:
        raise RuntimeError(ended.output)
    if ended.code or "is damaged" in ended.output:
        raise Noticed
    return contents(folder, "data/*.shard", "data/manifest.json")


def planned(folder: Path) -> Any:
    return asdict(plan_file.read(str(folder / "plan.json")))


def shown(*argv: str) -> Callable[[Path], Any]:
    """The output of a command that only shows what is in the folder."""
    def read(folder: Path) -> Any:
        os.chdir(folder)
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = main(list(argv))
        if code == 70:
            raise RuntimeError(output.getvalue())
        if code:
            raise Noticed
        return output.getvalue()
    return read


def speeds(folder: Path) -> Any:
    os.environ["FITGPT_HOME"] = str(folder)
    return measured_speeds.load("NVIDIA H200")


def snapshot(folder: Path) -> Any:
    with open(folder / "memory_snapshot.pickle", "rb") as file:
        return explain_snapshot(read_snapshot(file, "memory_snapshot.pickle"))


# ---- the files

def make_run(folder: Path) -> None:
    with_texts(folder)
    must(PREPARE, folder)
    must(["train", *TRAIN, "--max_iters=3"], folder)


def make_stopped_prepare(folder: Path) -> None:
    """Texts and the state of a `prepare` that was stopped after some shards."""
    with_texts(folder)
    from fitgpt.data import pipeline

    def stop_midway() -> None:
        saved, save = [0], pipeline.save_state

        def save_and_die(*state: Any) -> None:
            save(*state)
            saved[0] += 1
            if saved[0] == 2:
                os._exit(75)

        pipeline.save_state = save_and_die  # type: ignore[assignment]

    assert fitgpt(PREPARE, folder, stop_midway).code == 75
    (folder / "data" / ".prepare.lock").unlink(missing_ok=True)


def make_nanogpt(folder: Path) -> None:
    """nanoGPT's ckpt.pt, meta.pkl and .bin files, and Hugging Face folders."""
    config = RunConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=64).gpt_config()
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(config)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    order = [name for name, shape in shapes.items() if len(shape) >= 2]
    order += [name for name, shape in shapes.items() if len(shape) < 2]
    split = sum(len(shape) >= 2 for shape in shapes.values())
    state = {number: {"step": torch.tensor(5.0), "exp_avg": torch.randn(shapes[name], generator=generator),
                      "exp_avg_sq": torch.rand(shapes[name], generator=generator)} for number, name in enumerate(order)}
    groups = [{"params": list(range(split))}, {"params": list(range(split, len(order)))}]
    args = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias",
                                                     "dropout")}
    torch.save({"model": {**weights, "lm_head.weight": weights["transformer.wte.weight"]},
                "optimizer": {"state": state, "param_groups": groups}, "model_args": args, "iter_num": 5,
                "best_val_loss": torch.tensor(3.5), "config": {"batch_size": 4}}, folder / "ckpt.pt")
    huggingface.write_folder(folder / "hf", config, weights)
    shutil.copytree(folder / "hf", folder / "hf_bin")
    (folder / "hf_bin" / "model.safetensors").unlink()
    from safetensors.torch import load_file

    torch.save(load_file(folder / "hf" / "model.safetensors"), folder / "hf_bin" / "pytorch_model.bin")
    write_dataset(folder / "data", vocab=26)
    itos = {number: chr(97 + number) for number in range(26)}
    (folder / "data" / "meta.pkl").write_bytes(pickle.dumps(
        {"vocab_size": 26, "itos": itos, "stoi": {each: number for number, each in itos.items()}}))


def make_others(folder: Path) -> None:
    """A plan, a config file, a memory snapshot, measured speeds, a recorded run."""
    must(["fit", "--gpu=4070", "--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--vocab_size=512",
          "-o", "plan.json"], folder)
    shutil.copy(ROOT / "config" / "fineweb_12gb.py", folder / "config.py")
    shutil.copy(ROOT / "tests" / "recorded" / "memory_snapshot.pickle", folder)
    (folder / "run").mkdir()
    shutil.copy(ROOT / "tests" / "recorded" / "runs" / "h200" / "metrics.jsonl", folder / "run")
    rows = [json.dumps({"gpu": "NVIDIA H200", "torch": "2.13.0", "options": {
                name: getattr(RunConfig(n_embd=96 * number), name) for name in measured_speeds.SPEED_OPTIONS},
                "tokens_per_s": 1000.5 * number, "date": "2026-01-01", "command": "train"}) for number in range(12, 40)]
    (folder / "speeds.jsonl").write_text("\n".join(rows) + "\n")


TEMPLATES = {"run": make_run, "prepare": make_stopped_prepare, "nanogpt": make_nanogpt, "others": make_others}
STEP = "out/checkpoints/step-00000003"
CHECKED = {
    "model.safetensors": Target("run", f"{STEP}/model.safetensors", last_checkpoint),
    "optimizer.safetensors": Target("run", f"{STEP}/optimizer.safetensors", last_checkpoint),
    "state.json": Target("run", f"{STEP}/state.json", last_checkpoint),
    "run.json": Target("run", "out/run.json", lambda folder: recorded_config(folder / "out")),
    "manifest.json": Target("run", "data/manifest.json", shards),
    "train.shard": Target("run", "data/train-00001.shard", shards),
    "val.shard": Target("run", "data/val-00000.shard", shards),
    "progress.json": Target("prepare", "data/progress.json", prepared),
    "carry.bin": Target("prepare", "data/carry-2.bin", prepared),
    "ckpt.pt": Target("nanogpt", "ckpt.pt", lambda folder: source(read_nanogpt(folder / "ckpt.pt"))),
    "pytorch_model.bin": Target("nanogpt", "hf_bin/pytorch_model.bin",
                                lambda folder: source(huggingface.read_folder(folder / "hf_bin"))),
    "plan.json": Target("others", "plan.json", planned),
}
UNCHECKED = {
    "hf/model.safetensors": Target("nanogpt", "hf/model.safetensors",
                                   lambda folder: source(huggingface.read_folder(folder / "hf"))),
    "hf/config.json": Target("nanogpt", "hf/config.json",
                             lambda folder: source(huggingface.read_folder(folder / "hf"))),
    "train.bin": Target("nanogpt", "data/train.bin", shards),
    "meta.pkl": Target("nanogpt", "data/meta.pkl", lambda folder: read_meta(folder / "data" / "meta.pkl")),
    "config.py": Target("others", "config.py", lambda folder: parse_config(
        (folder / "config.py").read_text(errors="replace"), "config.py", RunConfig().to_dict())),
    "memory_snapshot.pickle": Target("others", "memory_snapshot.pickle", snapshot),
    "speeds.jsonl": Target("others", "speeds.jsonl", speeds),
    "metrics.jsonl": Target("others", "run/metrics.jsonl",
                            lambda folder: (read_metrics(folder / "run" / "metrics.jsonl"),
                                            shown("watch", "run", "--once")(folder))),
    "metrics.jsonl in a report": Target("others", "run/metrics.jsonl", shown("report", "run", "-o", "report.html")),
}


# ---- the campaign

def damaged(content: bytes, kind: str, chance: random.Random) -> bytes:
    if kind == "empty":
        return b""
    if kind == "cut":
        return content[:chance.randrange(len(content))]
    if kind == "growth":
        return content + chance.choice([b"\0" * chance.randint(1, PAGE), chance.randbytes(chance.randint(1, PAGE)),
                                        content[-chance.randint(1, len(content)):]])
    at = chance.randrange(len(content))
    changed = bytearray(content)
    if kind == "digit" and (digits := [each for each, byte in enumerate(content) if chr(byte).isdecimal()]):
        at = chance.choice(digits)
        changed[at] = chance.choice(b"0123456789".replace(content[at:at + 1], b""))
    elif kind == "page":
        start = at // PAGE * PAGE
        changed[start:start + PAGE] = bytes(min(PAGE, len(content) - start))
    else:
        changed[at] ^= 1 << chance.randrange(8) if kind == "bit" else chance.randrange(1, 256)
    return bytes(changed)


def campaign(folder: Path) -> Campaign:
    for name, make in TEMPLATES.items():
        (folder / name).mkdir()
        make(folder / name)
    targets, case, clean = {**CHECKED, **UNCHECKED}, folder / "case", dict[str, str]()
    os.environ.update(XDG_CACHE_HOME=str(folder), FITGPT_HOME=str(folder), COLUMNS="200")

    def read(target: Target, content: bytes | None = None) -> str:
        fresh(folder / target.template, case)
        if content is not None:
            (case / target.file).write_bytes(content)
        return repr(target.read(case))

    def run(named: str) -> Outcome:
        name, kind, _ = named.rsplit("/", 2)
        target = targets[name]
        content = (folder / target.template / target.file).read_bytes()
        changed = damaged(content, kind, random.Random(named))
        if name not in clean:
            undamaged = isolated(lambda: Outcome(_hash(read(target))))
            if not undamaged.ok:
                raise RuntimeError(f"{name} cannot be read undamaged: {undamaged.note}")
            clean[name] = undamaged.kind

        def outcome() -> Outcome:
            try:
                found = read(target, changed)
            except (FitError, Noticed):
                return Outcome(f"{name}: noticed")
            if changed == content or _hash(found) == clean[name]:
                return Outcome(f"{name}: harmless")
            at = next((at for at, (old, new) in enumerate(zip(content, changed, strict=False)) if old != new),
                      len(content))
            near = f"byte {at} of {len(content)}: {content[at - 20:at + 20]!r} → {changed[at - 20:at + 20]!r}"
            return Outcome(f"{name}: silent", name in UNCHECKED, near)

        done = isolated(outcome)
        return done if ":" in done.kind else done._replace(kind=f"{name}: {done.kind}")

    cases = [f"{name}/{KINDS[number % len(KINDS)] if number else 'empty'}/{number:03d}" for name in targets
             for number in range(PER_CHECKED if name in CHECKED else PER_UNCHECKED)]
    return Campaign([case for case in cases if "/empty/" not in case or case.endswith("/000")], run)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
