"""GPU work recorded once and replayed: the host then launches one thing a micro-step instead of hundreds.

All recordings share one pool of memory. That is safe because they never run at the same time, and because a result
is read before the next replay overwrites it. The pool is of no use to work that runs as it is, and the first training
step does, after an evaluation was recorded: so what is recorded is forgotten before anything new, and recorded again
when it is next wanted, beside the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
Recording = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]  # where it reads, and where its result appears


class Recorder:
    """Makes replaying versions of functions of tensors that always read and write the same places."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._warn = warn
        self._gave_up = False
        self._made: list[dict[Shapes, Recording]] = []  # by each function

    def replaying(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The first call of a shape runs as it is (kernels compile, libraries wake up), the second records."""
        met: set[Shapes] = set()
        recorded: dict[Shapes, Recording] = {}
        self._made.append(recorded)

        def call(*inputs: Tensor) -> Tensor:
            shapes = tuple(tuple(each.shape) for each in inputs)
            if shapes not in met:
                met.add(shapes)
                if any(self._made):
                    self._forget()
                return function(*inputs)
            if self._gave_up:
                return function(*inputs)
            if shapes not in recorded:
                recording = self._record(function, inputs)
                if recording is None:
                    return function(*inputs)
                recorded[shapes] = recording
            graph, places, result = recorded[shapes]
            for place, value in zip(places, inputs, strict=True):
                place.copy_(value, non_blocking=True)
            graph.replay()
            return result

        return call

    def _forget(self) -> None:
        """All recordings at once, and the workspaces they write to: torch may free these with any one of them."""
        torch.cuda.synchronize()
        for recorded in self._made:
            recorded.clear()
        self._pool = torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def _record(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Recording | None:
        """None where it does not work: recording runs nothing, so the same call can still be made as it is."""
        places = tuple(each.clone() for each in inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            # Recording first gives unused memory back to the card. Other threads may go on meanwhile: one pins batches.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function(*places)
        except torch.OutOfMemoryError:
            self._forget()  # a pool in which a recording broke off is of no more use
            raise           # a matter for whoever guards the run: with less memory in use it may work
        except RuntimeError as error:
            self._gave_up = True
            self._warn(f"The card's work could not be recorded ({str(error).splitlines()[0]}); it is launched piece by "
                       "piece instead, which may be slower. To say so from the start: --cuda_graphs=False")
            return None
        return graph, places, result
