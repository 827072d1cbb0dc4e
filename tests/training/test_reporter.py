"""Warnings about memory in the reports of a run."""

from __future__ import annotations

import pytest

from fitgpt.core.units import GiB
from fitgpt.runs.metrics import MemoryReading, StepReport
from fitgpt.training.reporter import MemoryWarnings


def test_each_warning_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitgpt.training.reporter.may_spill", lambda: True)
    warnings, memory = MemoryWarnings(card_bytes=12 * GiB), MemoryReading(0, 13 * GiB, 5 * GiB, 13 * GiB)
    report = StepReport(0, 1.0, 1.0, 1.0, 1.0, 1.0, None, 0, 1.0, memory, 1.0)
    assert [note.split(":")[0] for note in warnings.of(report, 5 * GiB)] == ["memory", "memory"]
    assert warnings.of(report, 5 * GiB) == []


def test_a_replayed_cuda_graph_is_not_taken_for_fragmentation() -> None:
    """PyTorch counts its tensors only while it is captured."""
    replayed = MemoryReading(0, 5 * GiB, 2 * GiB, 5 * GiB)
    report = StepReport(0, 1.0, 1.0, 1.0, 1.0, 1.0, None, 0, 1.0, replayed, 1.0)
    assert MemoryWarnings(card_bytes=12 * GiB).of(report, most_allocated=int(4.5 * GiB)) == []
