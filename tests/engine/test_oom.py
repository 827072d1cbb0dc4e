"""What is freed when memory runs out, fragmentation, and a spill into CPU RAM."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fitgpt.training.run as run_module
from fitgpt.core.units import GiB
from fitgpt.engine.oom import (
    OutOfMemory,
    RngState,
    attempt,
    fragmentation,
    fragmentation_hint,
    is_out_of_memory,
    spill,
)
from fitgpt.runs.metrics import MemoryReading
from tests.failing_allocations import MESSAGE, SMALL
from tests.helpers import tiny_config

# ---- freeing


def test_an_attempt_that_is_out_of_memory_keeps_no_tensor_alive() -> None:
    kept: list[weakref.ref[Any]] = []

    def inner() -> None:
        tensor = torch.zeros(1000)
        kept.append(weakref.ref(tensor))
        try:
            raise ValueError("first")
        finally:
            raise torch.OutOfMemoryError(MESSAGE)

    assert attempt(inner) == OutOfMemory(MESSAGE)
    assert kept[0]() is None
    assert OutOfMemory(MESSAGE).short == "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_only_out_of_memory_errors_are_caught() -> None:
    def broken() -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        attempt(broken)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_rng_state_is_restored() -> None:
    state = RngState(torch.device("cpu"))
    first = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), first)


def test_cuda_graphs_are_dropped_with_their_gradients(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path, **SMALL), dtype="float32", vocab_size=64)
    training = run_module.build_training(config, run_module.resolve_device("cpu", "float32", False))
    training.accumulate, training.gradients_stay = (lambda *batch: torch.zeros(())), True  # as with CUDA graphs
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.drop_cuda_graphs()
    assert training.accumulate == training.model.accumulate
    assert all(parameter.grad is None for parameter in training.model.parameters())


# ---- warnings


def test_fragmentation_is_reported() -> None:
    message = (f"{MESSAGE} Of the allocated memory 5.00 GiB is allocated by PyTorch, and 3.10 GiB is reserved by "
               "PyTorch but unallocated.")
    assert fragmentation_hint(message) == (
        " (Fragmentation: 3.10 GiB was reserved but unallocated, in blocks that are too small.)")
    assert fragmentation_hint(message.replace("3.10 GiB", "1.10 GiB")) == ""
    assert fragmentation_hint("DefaultCPUAllocator: can't allocate memory") == ""
    assert "memory: fragmentation. 8.00 GiB is reserved" in fragmentation(8 * GiB, 4 * GiB)
    assert fragmentation(8 * GiB, 7 * GiB) == ""
    assert fragmentation(GiB, GiB // 4) == ""


def test_a_spill_into_cpu_ram_is_reported() -> None:
    card = 12 * GiB
    assert "13.00 GiB is reserved, and the GPU has 12.00 GiB" in spill(MemoryReading(0, 13 * GiB), card, 1.0, 1.0)
    assert "4.0 times as long" in spill(MemoryReading(0, 11 * GiB), card, 4.0, 1.0)
    assert spill(MemoryReading(0, 11 * GiB), card, 1.1, 1.0) == ""   # full, and as fast as ever
    assert spill(MemoryReading(0, 6 * GiB), card, 9.0, 1.0) == ""    # slow for another reason
