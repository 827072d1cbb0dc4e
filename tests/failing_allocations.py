"""A small run on the CPU in which any allocation can fail, as on a full GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB
from fitgpt.planning.plan_file import FallbackPlan

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.50 GiB of which …"
SMALL: dict[str, Any] = dict(n_layer=1, n_embd=8, n_head=1, block_size=4, batch_size=2, gradient_accumulation_steps=2,
                             max_iters=2, eval_interval=2, eval_iters=1, save_interval=1)
# One window at a time; then also recomputation, and the optimizer in CPU RAM.
FALLBACKS = (FallbackPlan({"batch_size": 1, "gradient_accumulation_steps": 4}, 3 * GiB, "batch 1 × 4"),
             FallbackPlan({"batch_size": 1, "gradient_accumulation_steps": 4, "saved_activations": "input",
                           "loss_chunk": 3, "offload": "optimizer"}, 2 * GiB,
                          "batch 1 × 4, saved activations input, optimizer in CPU RAM"))


class FailingAllocations(TorchDispatchMode):
    """Counts operations that allocate, and fails some of them, by number, before anything is computed."""

    def __init__(self, failing: Iterable[int] = ()) -> None:
        super().__init__()
        self.count = 0
        self._failing = set(failing)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper would take a third of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if allocates(func):
            self.count += 1
            if self.count in self._failing:
                raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


class Parts:
    """The loop's evaluations, steps and saves, numbered in order. In one of them some allocations fail; only that one
    is watched, since watching is slow. Without one, all are watched and counted."""

    def __init__(self, counted_part: int | None, failing: Iterable[int]) -> None:
        self.counts: list[tuple[str, int]] = []
        self._watched, self._failing = counted_part, tuple(failing)
        self._begun = 0

    def of(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def part(*given: Any, **named: Any) -> Any:
            number, self._begun = self._begun, self._begun + 1
            if self._watched not in (None, number):
                return work(*given, **named)
            with FailingAllocations(self._failing) as mode:
                done = work(*given, **named)
            self.counts.append((kind, mode.count))
            return done

        return part


_known: dict[Any, bool] = {torch.ops.aten._unsafe_view.default: False}  # a view, though its schema does not say so


def allocates(func: Any) -> bool:
    """By its schema: it returns a tensor that is not an argument."""
    if func not in _known:
        _known[func] = any(each.alias_info is None and "Tensor" in str(each.type) for each in func._schema.returns)
    return _known[func]


class Ended:
    """`parts`: what the loop did, and how many allocations each took."""

    def __init__(self, config: RunConfig, parts: list[tuple[str, int]]) -> None:
        self.config, self.parts = config, parts
        self.out = Path(config.out_dir)

    def steps(self) -> list[tuple[int, int]]:
        """(the number of the part, its allocations)."""
        return [(number, count) for number, (kind, count) in enumerate(self.parts) if kind == "step"]

    @property
    def last(self) -> Path:
        return sorted((self.out / "checkpoints").glob("step-*"))[-1]

    def bits(self) -> tuple[bytes, bytes]:
        """Weights, moments and the optimizer's count of its steps."""
        return (self.last / "model.safetensors").read_bytes(), (self.last / "optimizer.safetensors").read_bytes()

    def rows(self, *kinds: str) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] in kinds]

    def steps_applied(self) -> set[float]:
        found = load_file(self.last / "optimizer.safetensors")
        return {each.item() for name, each in found.items() if name.endswith((".step", "steps"))}

    def farthest(self, other: Ended) -> float:
        """The largest difference of a weight, relative to the largest weight of its tensor."""
        ours, theirs = (load_file(each.last / "model.safetensors") for each in (self, other))
        return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)
