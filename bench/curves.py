"""Do the exact and the lossy engine learn as the plain way does? The same model, from the same weights, on the same
batches: by bench/plain.py, by `fitgpt train`, and by `fitgpt train` with the lossy savers, each several times, for no
way ends in the same place twice.

    python bench/curves.py --dataset data/stdlib-gpt2 -o bench/results/curves_h200.json

Needs a CUDA card. All run side by side: nothing here is timed. tools/curves.py draws the picture.
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
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from fitgpt import __version__  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.hardware.allocator_env import child_environment  # noqa: E402
from fitgpt.runs.metrics import read_metrics  # noqa: E402

SETTINGS: dict[str, Any] = dict(
    n_layer=6, n_head=6, n_embd=384, block_size=512, batch_size=16, gradient_accumulation_steps=4, vocab_size=50304,
    dtype="bfloat16", max_iters=500, lr_decay_iters=500, warmup_iters=50, learning_rate=1e-3, min_lr=1e-4,
    eval_interval=500, eval_iters=20, log_interval=1, seed=1337)
LOSSY = dict(weights="bfloat16", residual="bfloat16", optimizer="adam8bit")
CURVES: dict[str, dict[str, Any]] = {"plain": {}, "exact": {}, "lossy": LOSSY}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="other settings, to try it out")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, settings = options.child
        print(json.dumps((train_plain if name == "plain" else train_ours)(RunConfig(**json.loads(settings)))))
        return
    changes = {key: json.loads(value) for key, value in (word.split("=", 1) for word in options.set)}
    settings = {**SETTINGS, **changes}
    with tempfile.TemporaryDirectory() as folder:
        children = {name: [start(name, {**settings, **lossy, "dataset": options.dataset,
                                        "out_dir": str(Path(folder) / f"{name}{number}")})
                           for number in range(options.repeats)] for name, lossy in CURVES.items()}
        curves = {name: together([json.loads(each.communicate()[0].splitlines()[-1]) for each in started])
                  for name, started in children.items()}
    for name, curve in curves.items():
        print(f"{name:6} first {curve['losses'][0]:.4f}, last 50 {sum(curve['losses'][-50:]) / 50:.4f}, "
              f"val {curve['val_loss']:.4f}; of each run {curve['runs']}")
    Path(options.out).write_text(json.dumps(
        {"what": "training loss of each step, from the same weights and batches, the mean of several runs",
         "date": time.strftime("%Y-%m-%d"), "fitgpt": __version__, "settings": {**settings, "lossy": LOSSY},
         "device": curves["exact"]["device"], "torch": curves["exact"]["torch"], "curves": curves,
         "command": f"python bench/curves.py --dataset {options.dataset} -o bench/results/{Path(options.out).name}"},
        indent=1) + "\n")


def start(name: str, settings: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, "--dataset=", "-o=", "--child", name, json.dumps(settings)],
                            env=child_environment(os.environ), stdout=subprocess.PIPE, text=True)


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of several runs of one way, and where each of them ended."""
    return {**runs[0], "losses": [sum(at) / len(runs) for at in zip(*(run["losses"] for run in runs), strict=True)],
            "val_loss": sum(run["val_loss"] for run in runs) / len(runs),
            "runs": [{"last_50": round(sum(run["losses"][-50:]) / 50, 4), "val_loss": round(run["val_loss"], 4)}
                     for run in runs]}


def train_ours(config: RunConfig) -> dict[str, Any]:
    rows = metrics_of(config)
    return {"losses": [row["loss"] for row in rows if row["kind"] == "step"],
            "val_loss": [row for row in rows if row["kind"] == "eval"][-1]["losses"][1]["mean"],
            "device": rows[0]["device_name"], "torch": rows[0]["versions"]["torch"]}


def metrics_of(config: RunConfig) -> list[Any]:
    """`fitgpt train`, in this process → the rows of its metrics.jsonl; what it would print goes to stderr."""
    from contextlib import redirect_stdout

    from fitgpt.training.run import run

    with redirect_stdout(sys.stderr):
        run(config.to_dict(), [], lambda: False)
    return list(read_metrics(Path(config.out_dir) / "metrics.jsonl"))


def train_plain(config: RunConfig) -> dict[str, Any]:
    """The same by autograd and autocast: only the first weights, the batches and the schedule are fitgpt's."""
    import torch
    from plain import PlainGPT

    from fitgpt.data.dataset import open_dataset
    from fitgpt.engine.batches import training_batches
    from fitgpt.engine.device import resolve_device
    from fitgpt.engine.model import build_model
    from fitgpt.training.loop import learning_rate_at

    device = torch.device(resolve_device(config.device, config.dtype, config.compile).device)
    dataset, micro_batches = open_dataset(config.dataset), config.gradient_accumulation_steps
    model = PlainGPT(config.gpt_config()).to(device)
    load_weights(model, build_model(config.gpt_config(), device, config.seed).weight_tensors())
    fast = torch.compile(model) if device.type == "cuda" else model
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=True)
    feed, losses = training_batches(config, dataset, device), []
    for step in range(config.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config)
        total = torch.zeros((), device=device)
        for micro in range(micro_batches):
            with torch.autocast(device.type, torch.bfloat16):
                _, loss = fast(*feed.get(step * micro_batches + micro))
            (loss / micro_batches).backward()
            total += loss.detach() / micro_batches
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    feed.close()
    return {"losses": [loss.item() for loss in losses], "val_loss": validation_loss(model, config)}


def validation_loss(model: Any, config: RunConfig) -> float:
    """The loss on the windows that `fitgpt train` evaluates, of another's model, which returns (logits, mean loss)."""
    import numpy as np
    import torch

    from fitgpt.data.dataset import open_dataset
    from fitgpt.engine.batches import evaluation_splits

    device = next(model.parameters()).device
    read, windows = evaluation_splits(open_dataset(config.dataset), ("val",), seed=config.seed, block=config.eval_block,
                                      windows=config.eval_iters * config.batch_size)["val"]
    means = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for first in range(0, windows, 8):  # whole windows of one length: the mean of means is the mean
            numbers = np.arange(first, min(first + 8, windows))
            tokens = torch.from_numpy(read(numbers)).to(device)
            means.append(model(tokens[:, :-1], tokens[:, 1:].contiguous())[1].item() * len(numbers))
    return sum(means) / windows


def load_weights(model: Any, weights: dict[str, Any]) -> None:
    """nanoGPT's names → the plain baseline's."""
    inside = {"ln_1": "norm_1", "attn.c_attn": "qkv", "attn.c_proj": "proj", "ln_2": "norm_2", "mlp.c_fc": "up",
              "mlp.c_proj": "down"}
    named = {"transformer.wte.weight": "tokens.weight", "transformer.wpe.weight": "positions.weight",
             "transformer.ln_f.weight": "norm.weight"}
    for layer in range(len(model.blocks)):
        for ours, plain in inside.items():
            named[f"transformer.h.{layer}.{ours}.weight"] = f"blocks.{layer}.{plain}.weight"
    model.load_state_dict({named[name]: tensor for name, tensor in weights.items()}
                          | {"head.weight": weights["transformer.wte.weight"]})


if __name__ == "__main__":
    main()
