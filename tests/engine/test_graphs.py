"""Recording needs a card; that it gives up in good order does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from fitgpt.engine.cuda_graphs import Recorder


class FakeGraph:
    """Stands in for the card: replaying runs the recorded function again on the same places."""

    def replay(self) -> None:
        self.rerun()  # type: ignore[attr-defined]


def card(monkeypatch: pytest.MonkeyPatch, recording: Callable[..., Any], runs: list[str]) -> None:
    """Pools have numbers; that memory is given back is noted among the runs."""
    pools = count()
    for name, stands_in in {"graph_pool_handle": lambda: next(pools), "CUDAGraph": FakeGraph, "graph": recording,
                            "synchronize": lambda: None, "empty_cache": lambda: runs.append("give back")}.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


def test_where_recording_fails_the_work_is_done_as_it_is_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refusing(graph: object, **how: object) -> object:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    card(monkeypatch, refusing, [])
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

    card(monkeypatch, recording, runs)
    double = Recorder(runs.append).replaying(lambda x: 2 * x)
    for _ in range(4):
        double(torch.ones(3))
    double(torch.ones(5))
    assert runs == ["record", "replay", "replay", "replay", "give back"]


def test_what_is_new_finds_nothing_recorded_and_what_was_known_is_recorded_again_without_a_run_as_it_is(
        monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    @contextmanager
    def recording(graph: FakeGraph, *, pool: int, **how: object) -> object:
        runs.append(f"record in pool {pool}")
        yield
        graph.rerun = lambda: None  # type: ignore[attr-defined]

    card(monkeypatch, recording, runs)
    recorder = Recorder(runs.append)

    def named(name: str) -> Callable[[Tensor], Tensor]:
        def work(x: Tensor) -> Tensor:
            runs.append(name)
            return x
        return recorder.replaying(work)

    look, step = named("look"), named("step")
    for each in (look, look, step, step, look, step):
        each(torch.ones(3))
    assert runs == ["look", "record in pool 0", "look", "give back", "step", "record in pool 1", "step",
                    "record in pool 1", "look"]


def test_where_memory_runs_out_while_recording_the_next_try_has_a_pool_of_its_own(
        monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    @contextmanager
    def recording(graph: FakeGraph, *, pool: int, **how: object) -> object:
        runs.append(f"record in pool {pool}")
        yield
        if pool == 0:
            raise torch.OutOfMemoryError("no room")
        graph.rerun = lambda: None  # type: ignore[attr-defined]

    card(monkeypatch, recording, runs)
    double = Recorder(runs.append).replaying(lambda x: 2 * x)
    double(torch.ones(3))
    with pytest.raises(torch.OutOfMemoryError):
        double(torch.ones(3))
    assert double(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert runs == ["record in pool 0", "give back", "record in pool 1"]
