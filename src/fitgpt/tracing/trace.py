"""PyTorch code → LiveTrace: the tape of its GPU memory, with optimizer steps and the origin of each tensor.

    with fitgpt.trace(gpu="4070") as memory:    # CUDA tensors inside have shapes but no storage
        train_a_few_steps()
    memory.tape, memory.steps, memory.tensors   # complete when the `with` block ends

    fitgpt.estimate(model, batch, optimizer, gpu="4070") → Trace

A Trace knows nothing of budgets and text; `memory.timeline.replay(trace.tape)` gives bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..memory.platform import Platform
from ..memory.tape import Tape
from ..planning.budget import Target, target_for
from . import composites, patches
from .device import TracedGpu
from .modules import ModuleCalls, StepsDone
from .recorder import BACKWARD, Recorder, TracedTensor

STEPS = 4  # optimizer steps that `estimate` takes


@dataclass
class LiveTrace:
    """The memory of a traced program."""

    target: Target                                     # the GPU it was traced for, with its budget
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def platform(self) -> Platform:
        return self.target.platform

    @property
    def tape(self) -> Tape:
        """Phases: load, forward, backward, optimizer, eval."""
        return self.recorder.tape()

    @property
    def steps(self) -> tuple[int, ...]:
        """The number of the tape's events after each optimizer step."""
        return tuple(self.recorder.steps)

    @property
    def tensors(self) -> Mapping[str, TracedTensor]:
        """By name on the tape: size, owner, operation, module, source line, shape, dtype."""
        return {tensor.name: tensor for tensor in self.recorder.tensors}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trace cannot know, one sentence each."""
        return tuple(self.recorder.notes)


@contextmanager
def trace(gpu: str = "", *, device: str = "cuda", torch_version: str = "", target: Target | None = None,
          stop_after: int | None = None) -> Iterator[LiveTrace]:
    """Records the GPU memory of the code in the `with` block. `stop_after`: raises StepsDone at the first forward
    pass after so many optimizer steps."""
    target = target or target_for(gpu, device, torch=torch_version or ".".join(torch.__version__.split(".")[:2]))
    result = LiveTrace(target)
    with recording(result.recorder, target, stop_after):
        yield result


@contextmanager
def recording(recorder: Recorder, target: Target, stop_after: int | None = None) -> Iterator[TracedGpu]:
    mode, replaced = TracedGpu(target.platform, Recorder()), patches.Patches()
    with mode:
        mode.calibrate()
    mode.use(recorder)
    calls = ModuleCalls(mode, stop_after)
    library = composites.install(target.platform)
    mode.autocast.install()
    hooks: list[Any] = []
    try:
        patches.install(replaced, mode, target.platform, target.card, target.budget.usable)
        calls.install(replaced)
        hooks = [register_optimizer_step_pre_hook(calls.before_step), register_optimizer_step_post_hook(calls.after_step)]
        TracedGpu.active = mode
        with mode:
            yield mode
    finally:
        TracedGpu.active = None
        calls.finish()
        for hook in hooks:
            hook.remove()
        replaced.undo()
        mode.autocast.uninstall()
        library._destroy()


def estimate(model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None, *,
             gpu: str = "", loss: Callable[[Any], torch.Tensor] | None = None, steps: int = STEPS) -> LiveTrace:
    """Memory of training `model` on batches like `batch` (a dict of keyword arguments, a tuple, or a tensor)."""
    raise NotImplementedError
