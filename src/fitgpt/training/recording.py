"""The peaks of each phase of a short run on random tokens, in a process of its own; and the rates of the GPU.

    python -P -m fitgpt.training.recording   one line of JSON in: a request; one out: the result

A run does what `fitgpt train` does, in its order: load, evaluation, three iterations, evaluation, one more iteration, a
checkpoint. `fitgpt record` and bench/record.py start it with the allocator's environment that they want.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config.run_config import RunConfig
from ..engine.attention import kernel_for, split_heads
from ..engine.batches import Prefetcher
from ..engine.device import resolve_device
from ..engine.evaluate import evaluate
from ..engine.oom import cap_memory
from ..engine.ranks import ALONE, Ranks
from ..planning.gpu_record import SUM_COLUMNS, SUM_ROWS
from . import checkpoint
from .build import build_training
from .loop import learning_rate_at, train_step

ITERATIONS = 3
EVAL_BATCHES = 2     # of each split
MATMUL_SIZE, COPY_BYTES, REPEATS = 4096, 2**28, 20


def main() -> int:
    request = json.loads(sys.stdin.readline())
    device = request["device"]
    if "cap" in request:
        cap_memory(device, request["cap"])
    result = gpu_figures(device) if "run" not in request else recorded(request["run"], device)
    print(json.dumps(result), flush=True)
    return 0


# ---- a run


def recorded(run: dict[str, Any], device: str) -> dict[str, Any]:
    """The phases of a run, the attention kernel, and what of the GPU's memory is used outside the allocator then, with
    what other processes use."""
    config = RunConfig(**run["config"])
    force_kernel(run["kernel"])
    watch = PhaseWatch()
    failed = record_phases(config, device, watch)
    if failed:
        return {"error": failed}
    free, total = torch.cuda.mem_get_info(device)
    used_outside = total - free - torch.cuda.memory_reserved(device)
    return {"phases": watch.peaks, "used_outside": used_outside, "attention": attention_kernel(config, device)}


def record_phases(config: RunConfig, device: str, watch: PhaseWatch, *, save: bool = True, ranks: Ranks = ALONE) -> str:
    """Fills `watch`. → what torch said if memory ran out, or an empty text."""
    choice = resolve_device(device, config.dtype, config.compile)
    rng = np.random.default_rng(0)

    def read(number: int) -> Any:
        return rng.integers(0, config.vocab_size, (config.batch_size, config.block_size + 1))

    def read_windows(numbers: Any) -> Any:
        return rng.integers(0, config.vocab_size, (len(numbers), config.eval_block + 1))

    try:
        with watch.phase("load"):
            training = build_training(config, choice, ranks)
        splits = {split: (read_windows, EVAL_BATCHES * config.eval_batch * config.ranks) for split in ("train", "val")}
        last = (ITERATIONS + 1) * config.micro_batches - 1
        feed = Prefetcher(read, torch.device(choice.device), last=last)

        def look(phase: str, step: int) -> None:
            """An evaluation resets the peak counters when it is done, and returns what they were."""
            with watch.phase(phase):
                evaluation = evaluate(training.model, splits, batch=config.eval_batch, block=config.eval_block,
                                      step=step, token_losses=training.token_losses, ranks=training.ranks)
                assert evaluation is not None
                watch.seen(evaluation.memory.peak_allocated, evaluation.memory.peak_reserved)

        def iterate(phase: str) -> None:
            with watch.phase(phase):
                train_step(training, config, feed, learning_rate_at(training.step, config), lambda: False)
                training.step += 1

        look("first_eval", 0)
        for step in range(ITERATIONS):
            iterate("first_train" if step == 0 else "train")
        look("eval", ITERATIONS)
        iterate("train")
        with watch.phase("save"), tempfile.TemporaryDirectory() as folder:
            if save:
                checkpoint.save(Path(folder), 1, training.model.weight_tensors(), training.optimizer.tensors(), {},
                                best=True, keep_last=2)
        feed.close()
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0]
    return ""


def force_kernel(kernel: str) -> None:
    """Leaves torch only one kernel of attention; an empty name leaves the choice to torch."""
    if kernel:
        torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
        torch.backends.cuda.enable_flash_sdp(kernel == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(kernel == "efficient")


def attention_kernel(config: RunConfig, device: str) -> str:
    """The kernel that torch chooses for the run, with the strides that the engine has."""
    qkv = torch.empty(config.batch_size, config.block_size, 3 * config.n_embd, device=device,
                      dtype=getattr(torch, config.dtype), requires_grad=True)
    q, k, v = split_heads(qkv, config.n_head)
    return kernel_for(q, k, v, config.dropout)


class PhaseWatch:
    """Peaks of each phase."""

    def __init__(self) -> None:
        self.now = ""
        self.peaks: dict[str, dict[str, int]] = {}

    def seen(self, allocated: int, reserved: int) -> None:
        """Peaks that the phase reached before something reset the counters."""
        before = self.peaks.get(self.now, {})
        self.peaks[self.now] = {"allocated": max(allocated, before.get("allocated", 0)),
                                "reserved": max(reserved, before.get("reserved", 0))}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.now = name
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            self.seen(stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"])


# ---- the GPU


def gpu_figures(device: str) -> dict[str, Any]:
    """What torch knows of the GPU, the cuBLAS workspace, and the rates of plain matmuls and copies."""
    properties = torch.cuda.get_device_properties(device)
    dtype = torch.bfloat16 if properties.major >= 8 else torch.float16
    small = torch.ones(64, 64, device=device, dtype=dtype)
    before = torch.cuda.memory_allocated(device)
    product = small @ small
    del product
    workspace = torch.cuda.memory_allocated(device) - before
    rows = torch.ones(SUM_ROWS, SUM_COLUMNS, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rows.sum(0)
    sum_bytes = torch.cuda.max_memory_allocated(device) - before
    del rows
    factors = [torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype) for _ in range(2)]
    out = torch.empty_like(factors[0])
    matmul = seconds(lambda: torch.mm(*factors, out=out))
    source = torch.empty(COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source))
    return {"name": properties.name, "cc": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count, "threads": properties.max_threads_per_multi_processor,
            "l2_bytes": properties.L2_cache_size, "usable_bytes": properties.total_memory,
            "workspace_bytes": workspace, "sum_bytes": sum_bytes,
            "matmul_tflops": round(2e-12 * MATMUL_SIZE**3 / matmul, 1), "copy_gbs": round(2e-9 * COPY_BYTES / copy, 1),
            "torch": torch.__version__, "cuda": torch.version.cuda or ""}


def seconds(work: Callable[[], object]) -> float:
    """Of one call, over about a second: what a GPU keeps up, not the clock of its first moment."""
    for _ in range(REPEATS):
        work()
    torch.cuda.synchronize()
    begun, calls = time.perf_counter(), 0
    while time.perf_counter() - begun < 1.0:
        for _ in range(REPEATS):
            work()
        torch.cuda.synchronize()
        calls += REPEATS
    return (time.perf_counter() - begun) / calls


if __name__ == "__main__":
    sys.exit(main())
