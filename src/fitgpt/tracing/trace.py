"""Code → the memory it needs on a GPU that need not be there: `recording`, and `fitgpt.trace` and `fitgpt.estimate`.

    with fitgpt.trace(gpu="4070") as memory:    # CUDA tensors inside have shapes but no storage
        train_a_few_steps()
    print(memory)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.errors import UsageError
from ..planning.budget import Target, target_for
from . import composites, patches
from .device import TracedGpu
from .modules import ModuleCalls
from .monkeypatch import Patches
from .plan import TracedPlan, plan_trace
from .recorder import Recorder
from .trace_file import trace_of

STEPS = 4  # optimizer steps that `estimate` takes


@contextmanager
def recording(recorder: Recorder, target: Target, stop_after: int | None = None) -> Iterator[TracedGpu]:
    """CUDA tensors made in the `with` block have shapes and no storage; the recorder gets their memory on the target.

    `stop_after`: StepsDone is raised at the first forward pass after that many optimizer steps.
    """
    device, replaced = TracedGpu(target.platform, Recorder()), Patches()
    with device:
        device.calibrate()
    device.use(recorder)
    calls, hooks = ModuleCalls(device, stop_after), list[Any]()
    library = composites.install(target.platform)
    device.autocast.install()
    try:
        patches.install(replaced, device, target)
        calls.install(replaced)
        hooks += [register_optimizer_step_pre_hook(calls.before_step),
                  register_optimizer_step_post_hook(calls.after_step)]
        TracedGpu.active = device
        with device:
            yield device
    finally:
        TracedGpu.active = None
        calls.finish()
        for hook in hooks:
            hook.remove()
        replaced.undo()
        device.autocast.uninstall()
        library._destroy()


class TracedBlock:
    """The TracedPlan of a `with` block, once the block has ended: every attribute is the plan's."""

    def __init__(self) -> None:
        self.plan: TracedPlan | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __str__(self) -> str:
        return str(self._found)

    def __repr__(self) -> str:
        return "<fitgpt.trace: the block has not ended>" if self.plan is None else repr(self.plan)

    @property
    def _found(self) -> TracedPlan:
        if self.plan is None:
            raise UsageError("The plan of a traced block is there when the block has ended.",
                             "with fitgpt.trace(gpu=\"4070\") as memory: …, then print(memory)")
        return self.plan


@contextmanager
def trace(gpu: str = "", *, others: str = "", budget: str = "", allocator: str = "") -> Iterator[TracedBlock]:
    """Traces the code in the `with` block for a GPU, by default the one in this machine. Sizes are as typed: "2GiB";
    `allocator`: native or expandable, by default as the environment says."""
    target, block, recorder = _target(gpu, others, budget), TracedBlock(), Recorder()
    with recording(recorder, target):
        yield block
    block.plan = _plan(recorder, target, allocator)


def estimate(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | Callable[[Any], Any] | None = None, *,
             gpu: str = "", others: str = "", budget: str = "", allocator: str = "", steps: int = STEPS,
             loss: Callable[[Any], torch.Tensor] | None = None, autocast: torch.dtype | None = None) -> TracedPlan:
    """What training a model on batches like `batch` needs. Neither the model nor the optimizer is changed.

    `batch`: a dict of keyword arguments, a tuple of arguments, or one argument. `optimizer`: an optimizer of the model,
    or a function that makes one of parameters; by default AdamW. `loss`: the model's output → the loss; by default its
    attribute `loss`, or the output itself. `autocast`: torch.bfloat16 or torch.float16 for mixed precision. Without a
    GPU, torch disables an autocast that is entered outside.
    """
    target, recorder = _target(gpu, others, budget), Recorder()
    with recording(recorder, target):
        moved = {id(each): each.detach().to("cuda") for each in (*model.parameters(), *model.buffers())}
        moved |= {id(each): nn.Parameter(moved[id(each)], each.requires_grad) for each in model.parameters()}
        original = getattr(model, "_orig_mod", model)  # of torch.compile(module)
        trained = copy.deepcopy(original, dict(moved))
        used = _same_optimizer(optimizer, moved, trained)
        trained = trained if original is model else torch.compile(trained)
        for _ in range(steps):
            inputs = _on_gpu(batch)
            with torch.autocast("cuda", autocast) if autocast else nullcontext():
                output = (trained(**inputs) if isinstance(inputs, Mapping) else
                          trained(*inputs) if isinstance(inputs, list | tuple) else trained(inputs))
                value = loss(output) if loss else getattr(output, "loss", output)
            value.backward()
            used.step()
            used.zero_grad()
            del inputs, output, value
    return _plan(recorder, target, allocator)


def _target(gpu: str, others: str, budget: str) -> Target:
    return target_for(gpu, "auto", others=others, budget=budget, torch=torch.__version__)


def _plan(recorder: Recorder, target: Target, allocator: str) -> TracedPlan:
    return plan_trace(trace_of(recorder, ("Python code",), target.platform, torch.__version__), target, allocator)


def _same_optimizer(given: Any, moved: Mapping[int, Any], model: nn.Module) -> Any:
    if given is None:
        return torch.optim.AdamW(model.parameters())
    if not isinstance(given, torch.optim.Optimizer):
        return given(model.parameters())
    groups = [{**group, "params": [moved[id(each)] for each in group["params"]]} for group in given.param_groups]
    accepted = inspect.signature(type(given)).parameters
    return type(given)(groups, **{name: value for name, value in given.defaults.items() if name in accepted})


def _on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("cuda")
    if isinstance(value, Mapping):
        return {name: _on_gpu(each) for name, each in value.items()}
    return type(value)(_on_gpu(each) for each in value) if isinstance(value, list | tuple) else value
