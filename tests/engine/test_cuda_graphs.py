"""CUDA graphs with a fake GPU: when a call is eager, captured or replayed, and what happens if capture fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from fitgpt.engine.cuda_graphs import GraphCapturer


class FakeGraph:
    """Replays by running the captured function again on the same tensors."""

    def replay(self) -> None:
        self.rerun()  # type: ignore[attr-defined]


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capture: Callable[..., Any], runs: list[str]) -> None:
    """Pools are numbered; empty_cache() is noted among the runs."""
    pools = count()
    for name, fake in {"graph_pool_handle": lambda: next(pools), "CUDAGraph": FakeGraph, "graph": capture,
                       "synchronize": lambda: None, "empty_cache": lambda: runs.append("empty_cache")}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


def test_if_capture_fails_calls_run_eagerly_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def failing(graph: object, **how: object) -> object:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    fake_gpu(monkeypatch, failing, [])
    warnings: list[str] = []
    double = GraphCapturer(warnings.append).replaying(lambda x: 2 * x)
    for value in (1.0, 2.0, 3.0):
        assert double(torch.tensor([value])).item() == 2 * value
    assert len(warnings) == 1
    assert "not permitted when stream is capturing)" in warnings[0]
    assert "--cuda_graphs=False" in warnings[0]


def test_the_first_call_of_a_shape_is_eager_the_second_captured_later_ones_replayed(
        monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    @contextmanager
    def capture(graph: FakeGraph, **how: object) -> object:
        runs.append("capture")
        yield
        graph.rerun = lambda: runs.append("replay")  # type: ignore[attr-defined]

    fake_gpu(monkeypatch, capture, runs)
    double = GraphCapturer(runs.append).replaying(lambda x: 2 * x)
    for _ in range(4):
        double(torch.ones(3))
    double(torch.ones(5))
    assert runs == ["capture", "replay", "replay", "replay", "empty_cache"]


def test_a_new_function_drops_all_graphs_and_known_ones_are_captured_again(
        monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    @contextmanager
    def capture(graph: FakeGraph, *, pool: int, **how: object) -> object:
        runs.append(f"capture in pool {pool}")
        yield
        graph.rerun = lambda: None  # type: ignore[attr-defined]

    fake_gpu(monkeypatch, capture, runs)
    capturer = GraphCapturer(runs.append)

    def named(name: str) -> Callable[[Tensor], Tensor]:
        def work(x: Tensor) -> Tensor:
            runs.append(name)
            return x
        return capturer.replaying(work)

    evaluate, step = named("evaluate"), named("step")
    for each in (evaluate, evaluate, step, step, evaluate, step):
        each(torch.ones(3))
    assert runs == ["evaluate", "capture in pool 0", "evaluate", "empty_cache", "step", "capture in pool 1", "step",
                    "capture in pool 1", "evaluate"]


def test_after_out_of_memory_in_a_capture_the_next_one_has_a_new_pool(
        monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    @contextmanager
    def capture(graph: FakeGraph, *, pool: int, **how: object) -> object:
        runs.append(f"capture in pool {pool}")
        yield
        if pool == 0:
            raise torch.OutOfMemoryError("no room")
        graph.rerun = lambda: None  # type: ignore[attr-defined]

    fake_gpu(monkeypatch, capture, runs)
    double = GraphCapturer(runs.append).replaying(lambda x: 2 * x)
    double(torch.ones(3))
    with pytest.raises(torch.OutOfMemoryError):
        double(torch.ones(3))
    assert double(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert runs == ["capture in pool 0", "empty_cache", "capture in pool 1"]
