"""Recording needs a card; that it gives up in good order does not."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from fitgpt.engine.graphs import Recorder


class FakeGraph:
    """Stands in for the card: replaying runs the recorded function again on the same places."""

    def replay(self) -> None:
        self.rerun()  # type: ignore[attr-defined]


def test_where_recording_fails_the_work_is_done_as_it_is_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refusing(graph: object, **how: object) -> object:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", refusing)
    said: list[str] = []
    double = Recorder(said.append).replaying(lambda x: 2 * x)
    for value in (1.0, 2.0, 3.0):
        assert double(torch.tensor([value])).item() == 2 * value
    assert len(said) == 1
    assert "not permitted when stream is capturing)" in said[0]
    assert "--cuda_graphs=False" in said[0]


def test_the_first_call_of_a_shape_runs_the_second_records_and_later_ones_replay(
        monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    @contextmanager
    def recording(graph: FakeGraph, **how: object) -> object:
        runs.append("record")
        yield
        graph.rerun = lambda: runs.append("replay")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    double = Recorder(runs.append).replaying(lambda x: 2 * x)
    for _ in range(4):
        double(torch.ones(3))
    double(torch.ones(5))
    assert runs == ["record", "replay", "replay", "replay"]
