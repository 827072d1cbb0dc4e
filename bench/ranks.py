"""What ranks cost on one GPU, as far as one GPU can show it. Timed: it wants the GPU to itself.

    python bench/ranks.py --out bench/results/ranks

    speed    GPT-2 124M: steps of one rank with an NCCL group of one, and without, in turn
    nccl-N   memory that NCCL allocates outside PyTorch's allocator, with N ranks on this GPU, and its own log of
             allocations. NCCL does not allow two ranks on one GPU; with NCCL_HOSTID it treats them as N machines,
             connected by sockets. Other connections (PCIe, NVLink) allocate other buffers.
    same-B   two ranks on this GPU with backend B: the weights of `fitgpt train` after some steps, against one rank

Each case runs in processes of its own with a time limit; OUT/NAME.json is written after each. How the memory of a
rank is recorded: bench/record.py with tests/recorded/engine/cases/ranks.json. With --device=cpu the same code runs
with gloo, small, to test it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

MODEL = {"cuda": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=16, vocab_size=50304,
                      gradient_accumulation_steps=1, dtype="bfloat16"),
         "cpu": dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=2, vocab_size=64,
                     gradient_accumulation_steps=1, dtype="float32", compile=False)}
ONE_GPU = dict(NCCL_HOSTID="rank{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
WARM_UP, BLOCKS, BLOCK_STEPS = 12, 24, 10  # steps, blocks of steps, steps of a block
SAME = dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=4, gradient_accumulation_steps=4,
            vocab_size=1024, max_iters=30, eval_interval=15, eval_iters=4, warmup_iters=5, lr_decay_iters=30,
            learning_rate=1e-3, min_lr=1e-4, log_interval=10)
PRECISE = {"float32": dict(dtype="float32", compile=False), "bfloat16": dict(dtype="bfloat16")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="cases, separated by commas")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({"speed": speed, "nccl": nccl_memory}[options.child](options.device)))
        return 0
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    backends = ["nccl", "gloo"] if options.device == "cuda" else ["gloo"]
    cases: dict[str, Callable[[], dict[str, Any]]] = {"speed": lambda: children("speed", 1, options.device, 150)[0]}
    if options.device == "cuda":
        cases |= {f"nccl-{world}": lambda world=world: nccl(world) for world in (1, 2, 4, 8)}  # type: ignore[misc]
    cases |= {f"same-{backend}-{dtype}": lambda backend=backend, dtype=dtype:  # type: ignore[misc]
              same_weights(options.device, backend, dtype) for backend in backends
              for dtype in (PRECISE if options.device == "cuda" else ["float32"])}
    for name, measure in cases.items():
        if options.only and name not in options.only.split(","):
            continue
        started = time.time()
        try:
            row = measure()
        except Exception as error:  # the next case runs all the same
            row = {"error": f"{type(error).__name__}: {error}"[-3000:]}
        row |= {"case": name, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.time() - started, 1),
                "command": "python bench/ranks.py --out bench/results/ranks"}
        (out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        shown = {key: value for key, value in row.items() if key not in ("log", "blocks", "command", "date")}
        print(json.dumps(shown)[:1500], flush=True)
    return 0


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def children(kind: str, world: int, device: str, seconds: int, **environment: str) -> list[dict[str, Any]]:
    """The result of each rank, which are processes of their own."""
    port, started = free_port(), []
    for rank in range(world):
        variables = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT / "src"),
                     **{name: value.format(rank=rank) for name, value in environment.items()}}
        command = [sys.executable, __file__, "--out", ".", "--device", device, "--child", kind]
        started.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True))
    ends, results = time.monotonic() + seconds, []
    try:
        for child in started:
            output, errors = child.communicate(timeout=max(ends - time.monotonic(), 1))
            lines = [line for line in output.splitlines() if line.startswith("{")]
            if child.returncode or not lines:
                raise RuntimeError(f"exit code {child.returncode}: {output[-800:]} {errors[-1500:]}")
            results.append({**json.loads(lines[-1]), "log": [line for line in output.splitlines() if "NCCL" in line]})
    finally:
        for child in started:
            child.kill()
            child.wait()
    return results


# ---- speed


def speed(device: str) -> dict[str, Any]:
    """In one process, in turn: blocks of steps without a group, and with groups of one (gloo, and NCCL on a GPU)."""
    import torch
    import torch.distributed as dist

    from fitgpt.config.run_config import RunConfig
    from fitgpt.engine.batches import Prefetcher
    from fitgpt.engine.device import resolve_device, synchronize
    from fitgpt.engine.ranks import ALONE, Ranks
    from fitgpt.training.build import build_training
    from fitgpt.training.loop import train_step

    config = RunConfig(**{"device": device, **MODEL[device]})  # type: ignore[arg-type]
    choice = resolve_device(config.device, config.dtype, config.compile)
    dist.init_process_group("gloo")
    on_gpu = device == "cuda"
    joined = Ranks(joined=True, gradients=dist.new_group(
        backend="nccl", device_id=torch.device(choice.device)) if on_gpu else None)
    training = build_training(config, choice)
    tokens = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1)).numpy()
    feed = Prefetcher(lambda number: tokens, torch.device(choice.device), last=sys.maxsize)

    def block(ranks: Ranks) -> float:
        """Milliseconds per step."""
        training.ranks = ranks
        synchronize(choice.device)
        started = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            train_step(training, config, feed, 1e-4, lambda: False)
            ranks.agreed(None, half_done=False)
        synchronize(choice.device)
        return 1e3 * (time.perf_counter() - started) / BLOCK_STEPS

    for ranks in (ALONE, joined):
        for _ in range(-(-WARM_UP // BLOCK_STEPS)):
            block(ranks)
    before = torch.cuda.memory_stats()["reserved_bytes.all.peak"] if on_gpu else 0
    blocks: dict[str, list[float]] = {"alone": [], "joined": []}
    for number in range(BLOCKS):
        order = [("alone", ALONE), ("joined", joined)]
        for name, ranks in order if number % 2 else reversed(order):
            blocks[name].append(block(ranks))
    feed.close()
    medians = {name: statistics.median(times) for name, times in blocks.items()}
    return {"ms_per_step": medians, "slower_percent": 100 * (medians["joined"] / medians["alone"] - 1),
            "blocks": blocks, "steps_per_block": BLOCK_STEPS, "config": MODEL[device],
            "reserved_bytes": {"before": before, "after": torch.cuda.memory_stats()["reserved_bytes.all.peak"]
                               if on_gpu else 0},
            "torch": torch.__version__, "device": choice.name}


# ---- NCCL's memory


def nccl(world: int) -> dict[str, Any]:
    rows = children("nccl", world, "cuda", 100, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,ALLOC,GRAPH",
                    **ONE_GPU)
    first = rows[0]
    return {**{key: value for key, value in first.items() if key != "log"},
            "log": first["log"][:4000], "log_lines": [len(row["log"]) for row in rows]}


def nccl_memory(device: str) -> dict[str, Any]:
    """Free memory of the GPU before the communicator, after it, and after the first all_reduce; per rank."""
    import torch
    import torch.distributed as dist

    world = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    gradients = [torch.ones(50304 * 768, device="cuda"), torch.ones(768, device="cuda")]
    torch.cuda.synchronize()
    dist.init_process_group("gloo")

    def free() -> int:
        """When all ranks are here."""
        dist.all_reduce(torch.zeros(1))
        found = torch.cuda.mem_get_info()[0]
        dist.all_reduce(torch.zeros(1))
        return found

    figures, allocated = [free()], torch.cuda.memory_reserved()
    group = dist.new_group(backend="nccl", device_id=torch.device("cuda:0"))
    torch.cuda.synchronize()
    figures.append(free())
    for _ in range(3):
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        torch.cuda.synchronize()
        figures.append(free())
    assert gradients[0][0].item() == float(world)**3
    return {"world": world, "free_bytes": figures, "nccl_bytes_per_rank": [
                (figures[0] - figure) // world for figure in figures[1:]],
            "reserved_by_pytorch": [allocated, torch.cuda.memory_reserved()], "nccl": torch.cuda.nccl.version(),
            "torch": torch.__version__, "device": torch.cuda.get_device_name()}


# ---- the same weights


def same_weights(device: str, backend: str, dtype: str) -> dict[str, Any]:
    import numpy as np

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        for split, tokens in (("train", 200_000), ("val", 20_000)):
            (np.cumsum(rng.integers(1, 4, tokens)) % 1024).astype(np.uint16).tofile(folder / f"{split}.bin")
        options = {**SAME, **PRECISE[dtype], "device": device, "backend": backend, "rehearse": False}
        if device == "cpu":
            options |= {"n_embd": 32, "n_layer": 1, "block_size": 32}
        one, one_again = (trained(folder, name, 1, options) for name in ("one", "one_again"))
        two = trained(folder, "two", 2, options, **ONE_GPU)
        again = trained(folder, "again", 2, options, **ONE_GPU)
        return {"backend": backend, "dtype": dtype, "config": SAME,
                "difference": {"one and two ranks": difference(one[0], two[0]),
                               "one rank, twice": difference(one[0], one_again[0]),
                               "two ranks, twice": difference(two[0], again[0])},
                "val_loss": [one[1], one_again[1], two[1], again[1]], "rank_memory": two[2], "of_one": one[2]}


def trained(folder: Path, name: str, world: int, options: dict[str, Any],
            **environment: str) -> tuple[Path, float, Any]:
    """(the last checkpoint, its loss, the memory of the ranks): `fitgpt train` as torchrun starts it."""
    port, started = free_port(), []
    flags = [f"--{key}={value}" for key, value in {**options, "dataset": str(folder), "out_dir": name}.items()]
    for rank in range(world):
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NVIDIA_TF32_OVERRIDE": "0"}
        if world > 1:
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                          "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                          **{key: value.format(rank=rank) for key, value in environment.items()}}
        started.append(subprocess.Popen([sys.executable, "-P", "-m", "fitgpt", "train", *flags], cwd=folder,
                                        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    ends = time.monotonic() + 90
    try:
        for child in started:
            output, _ = child.communicate(timeout=max(ends - time.monotonic(), 1))
            if child.returncode:
                raise RuntimeError(f"{name}: exit code {child.returncode}: {output[-1500:]}")
    finally:
        for child in started:
            child.kill()
            child.wait()
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    loss = [each["mean"] for row in rows if row["kind"] == "eval" for each in row["losses"] if each["split"] == "val"]
    steps = [row for row in rows if row["kind"] == "step"]
    return (sorted((folder / name / "checkpoints").glob("step-*"))[-1], loss[-1],
            steps[-1].get("rank_memory") or steps[-1]["memory"])


def difference(one: Path, other: Path) -> dict[str, float]:
    """Of the weights: the norm of their difference relative to their norm; and the largest difference of a weight,
    relative to the largest weight of its tensor."""
    import torch
    from safetensors.torch import load_file

    ours, theirs = (load_file(each / "model.safetensors") for each in (one, other))
    flat = [torch.cat([each[name].double().flatten() for name in theirs]) for each in (ours, theirs)]
    return {"relative_norm": ((flat[0] - flat[1]).norm() / flat[1].norm()).item(), "largest": max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)}


if __name__ == "__main__":
    sys.exit(main())
