"""Where the GPU's time goes in a step: every kernel's share, and how long the GPU was idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

STEPS = 3
# The first word that a kernel's name contains says what it is for.
KINDS = {"cross_entropy": "loss", "flash": "attention", "fmha": "attention", "cudnn": "attention", "sdpa": "attention",
         "rounded_adamw": "optimizer", "multi_tensor": "optimizer", "Adam": "optimizer", "gemm": "products",
         "nvjet": "products", "cutlass": "products", "splitK": "products", "triton_": "pointwise", "norm_": "pointwise",
         "CatArray": "joining", "copy": "copies", "Memset": "copies", "Memcpy": "copies", "fill": "copies"}


def profile(step: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds a step, by kind and by kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [(event.start_ns(), event.duration_ns(), event.name()) for event in
               profiler.profiler.kineto_results.events() if str(event.device_type()) == "DeviceType.CUDA"]
    kernels.sort()
    took: dict[str, list[int]] = defaultdict(list)
    busy, reached = 0, kernels[0][0]
    for start, duration, name in kernels:
        took[name].append(duration)
        busy += max(0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
    whole = reached - kernels[0][0]
    kinds: dict[str, int] = defaultdict(int)
    for name, durations in took.items():
        kinds[next((kind for word, kind in KINDS.items() if word in name), "other")] += sum(durations)
    a_step = 1e6 * STEPS
    return {"whole": whole / a_step, "idle": (whole - busy) / a_step, "kernels": len(kernels) / STEPS,
            "kinds": {kind: total / a_step for kind, total in sorted(kinds.items(), key=lambda each: -each[1])},
            "by_kernel": [{"ms": sum(each) / a_step, "calls": len(each) / STEPS, "name": name[:160]}
                          for name, each in sorted(took.items(), key=lambda item: -sum(item[1]))]}
