"""CUDA graphs: GPU work captured once and replayed, so that the CPU launches one graph per micro-step instead of
hundreds of kernels.

All graphs share one memory pool. That is safe because they never run at the same time, and because a result is read
before the next replay overwrites it. Eager work cannot use the pool, and the first training step runs eagerly after an
evaluation was captured: so all graphs are dropped before anything new runs, and captured again when next needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
CapturedGraph = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]  # the graph, its input tensors, its output


class GraphCapturer:
    """Makes functions of tensors replay CUDA graphs."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._warn = warn
        self._gave_up = False
        self._graphs: list[dict[Shapes, CapturedGraph]] = []  # per function

    def replaying(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function with CUDA graphs. The first call of a shape runs eagerly, so that kernels compile and libraries
        initialise; the second is captured; later ones replay."""
        seen: set[Shapes] = set()
        captured: dict[Shapes, CapturedGraph] = {}
        self._graphs.append(captured)

        def call(*inputs: Tensor) -> Tensor:
            shapes = tuple(tuple(each.shape) for each in inputs)
            if shapes not in seen:
                seen.add(shapes)
                if any(self._graphs):
                    self._drop_all()
                return function(*inputs)
            if self._gave_up:
                return function(*inputs)
            if shapes not in captured:
                graph_of_shape = self._capture(function, inputs)
                if graph_of_shape is None:
                    return function(*inputs)
                captured[shapes] = graph_of_shape
            graph, static_inputs, result = captured[shapes]
            for static, value in zip(static_inputs, inputs, strict=True):
                static.copy_(value, non_blocking=True)
            graph.replay()
            return result

        return call

    def _drop_all(self) -> None:
        """Drops all graphs at once, and the cuBLAS workspaces they use: torch may free these with any one graph."""
        torch.cuda.synchronize()
        for captured in self._graphs:
            captured.clear()
        self._pool = torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def _capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> CapturedGraph | None:
        """None if it does not work: capturing runs nothing, so the same call can still run eagerly."""
        static_inputs = tuple(each.clone() for each in inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph calls empty_cache() first. thread_local: the prefetcher may pin batches meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function(*static_inputs)
        except torch.OutOfMemoryError:
            self._drop_all()  # a pool in which a capture failed cannot be used again
            raise           # training/oom_recovery.py handles it
        except RuntimeError as error:
            self._gave_up = True
            self._warn(f"CUDA graph capture failed ({str(error).splitlines()[0]}); kernels are launched one by one "
                       "instead, which may be slower. To avoid this warning: --cuda_graphs=False")
            return None
        return graph, static_inputs, result
