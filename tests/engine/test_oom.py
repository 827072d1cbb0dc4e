"""What is let go of when memory runs out, and what figures and messages say of it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusing import SMALL, WORDS

import fitgpt.training.run as run_module
from fitgpt.core.units import GiB
from fitgpt.engine.oom import Dice, Refusal, attempt, is_out_of_memory
from fitgpt.engine.signs import fragmentation, in_pieces, spill
from fitgpt.nouns import MemoryReading, StepReport
from fitgpt.training.reporter import Signs
from helpers import tiny_config

# ---- letting go


def test_an_attempt_that_is_refused_leaves_no_tensor_behind() -> None:
    kept: list[weakref.ref[Any]] = []

    def inner() -> None:
        tensor = torch.zeros(1000)
        kept.append(weakref.ref(tensor))
        try:
            raise ValueError("first")
        finally:
            raise torch.OutOfMemoryError(WORDS)

    assert attempt(inner) == Refusal(WORDS)
    assert kept[0]() is None
    assert Refusal(WORDS).short == "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_only_a_lack_of_memory_is_forgiven() -> None:
    def broken() -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        attempt(broken)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_dice_are_put_back() -> None:
    dice = Dice(torch.device("cpu"))
    first = torch.rand(3)
    dice.put_back()
    assert torch.equal(torch.rand(3), first)


def test_recorded_work_is_forgotten_with_its_gradients(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path, **SMALL), dtype="float32", vocab_size=64)
    training = run_module.build_training(config, run_module.resolve_device("cpu", "float32", False))
    training.accumulate, training.gradients_stay = (lambda *batch: torch.zeros(())), True  # as if it were recorded
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.forget_recorded_work()
    assert training.accumulate == training.model.accumulate
    assert all(parameter.grad is None for parameter in training.model.parameters())


# ---- signs


def test_memory_in_pieces_is_named() -> None:
    message = (f"{WORDS} Of the allocated memory 5.00 GiB is allocated by PyTorch, and 3.10 GiB is reserved by "
               "PyTorch but unallocated.")
    assert in_pieces(message) == " (3.10 GiB were held and lay unused, but in pieces too small.)"
    assert in_pieces(message.replace("3.10 GiB", "1.10 GiB")) == ""
    assert in_pieces("DefaultCPUAllocator: can't allocate memory") == ""
    assert "the rest lies between blocks" in fragmentation(8 * GiB, 4 * GiB)
    assert fragmentation(8 * GiB, 7 * GiB) == ""
    assert fragmentation(GiB, GiB // 4) == ""


def test_each_sign_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitgpt.training.reporter.may_spill", lambda: True)
    signs, memory = Signs(card_bytes=12 * GiB), MemoryReading(0, 13 * GiB, 5 * GiB, 13 * GiB)
    report = StepReport(0, 1.0, 1.0, 1.0, 1.0, 1.0, None, 0, 1.0, memory, 1.0)
    assert [note.split(":")[0] for note in signs.of(report, 5 * GiB)] == ["memory", "memory"]
    assert signs.of(report, 5 * GiB) == []


def test_a_step_that_is_replayed_from_a_recording_is_no_memory_in_pieces() -> None:
    """Its tensors are counted only while it is recorded."""
    replayed = MemoryReading(0, 5 * GiB, 2 * GiB, 5 * GiB)
    report = StepReport(0, 1.0, 1.0, 1.0, 1.0, 1.0, None, 0, 1.0, replayed, 1.0)
    assert Signs(card_bytes=12 * GiB).of(report, most_allocated=int(4.5 * GiB)) == []


def test_a_spill_into_the_hosts_memory_is_named() -> None:
    card = 12 * GiB
    assert "13.00 GiB are held, and the card has 12.00 GiB" in spill(MemoryReading(0, 13 * GiB), card, 1.0, 1.0)
    assert "4.0 times as long" in spill(MemoryReading(0, 11 * GiB), card, 4.0, 1.0)
    assert spill(MemoryReading(0, 11 * GiB), card, 1.1, 1.0) == ""   # full, and as fast as ever
    assert spill(MemoryReading(0, 6 * GiB), card, 9.0, 1.0) == ""    # slow for another reason
