"""GPU work recorded once and replayed: the host then launches one thing a micro-step instead of hundreds.

All recordings share one pool of memory. That is safe because they never run at the same time, and because a result
is read before the next replay overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]


class Recorder:
    """Makes replaying versions of functions of tensors that always read and write the same places."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def replaying(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The first call of a shape runs as it is (kernels compile, libraries wake up), the second records."""
        met: set[Shapes] = set()
        recorded: dict[Shapes, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

        def call(*inputs: Tensor) -> Tensor:
            shapes = tuple(tuple(each.shape) for each in inputs)
            if shapes not in met:
                met.add(shapes)
                return function(*inputs)
            if shapes not in recorded:
                recorded[shapes] = self._record(function, inputs)
            graph, places, result = recorded[shapes]
            for place, value in zip(places, inputs, strict=True):
                place.copy_(value, non_blocking=True)
            graph.replay()
            return result

        return call

    def _record(self, function: Callable[..., Tensor],
                inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        places = tuple(each.clone() for each in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):  # which first gives unused memory back to the card
            result = function(*places)
        return graph, places, result
