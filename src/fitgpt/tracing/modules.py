"""Which module and which optimizer step the program is in: module paths, owners of parameters and gradients, steps."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from .device import TracedGpu
from .errors import ONE_PROCESS, Untraceable
from .monkeypatch import Patches
from .recorder import BACKWARD, SETTLED

NO_OPTIMIZER = "The script has no optimizer of torch: each of its backward passes counts as an optimizer step."
UNKNOWN_RNNS = "On a GPU, cuDNN runs recurrent layers (LSTM, GRU) in kernels of its own, whose memory is not known."


class StepsDone(BaseException):
    """Stops a program that has taken the wanted number of optimizer steps. Not an Exception: programs catch those."""


def elements(parameter: Tensor) -> int:
    """Of bitsandbytes' 4-bit weights: as many as before they were packed."""
    packed = getattr(parameter, "quant_state", None)
    return parameter.numel() if packed is None else prod(packed.shape)


class ModuleCalls:
    """Follows calls of modules and optimizers."""

    def __init__(self, device: TracedGpu, stop_after: int | None) -> None:
        self.device, self.recorder, self.stop_after = device, device.recorder, stop_after
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._parameters = WeakTensorKeyDictionary()  # names of parameters
        self._stepped: set[int] = set()  # optimizers that have stepped since the last forward pass
        self._last = 0                   # the number of events after the last of these steps
        self._passes = 0  # the number of backward passes that count as steps
        self._trained: dict[int, int] = {}  # elements of the parameters of all optimizers, by address

    def install(self, patches: Patches) -> None:
        original: Callable[..., Any] = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            stack = self.recorder.modules
            if not stack:
                self.recorder.mark_lines()
                self.recorder.evaluates = not torch.is_grad_enabled()
                self._begin(module)
            stack.append(self._names.get(module, type(module).__name__))
            try:
                return original(module, *args, **kwargs)
            finally:
                stack.pop()

        init = Optimizer.__init__

        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self.recorder.has_optimizer = True
            init(optimizer, *args, **kwargs)

        enter, evaluate = torch.no_grad.__enter__, nn.Module.eval

        def entered(context: torch.no_grad) -> None:
            self.recorder.mark_lines()
            enter(context)

        def evaluated(module: nn.Module) -> nn.Module:
            self.recorder.mark_lines()
            return evaluate(module)

        patches.set(torch.no_grad, "__enter__", entered)
        patches.set(nn.Module, "eval", evaluated)
        patches.set(nn.Module, "__call__", call)
        patches.set(Optimizer, "__init__", made)

    def _begin(self, module: nn.Module) -> None:
        """A call that no other module makes: of the whole model, or of a part that the program calls itself."""
        if torch._C._current_graph_task_id() == -1 and not self.device.in_optimizer:
            if self.stop_after is not None and not self.recorder.has_optimizer:
                self._step_without_optimizer()
            self._finish_step()
        if type(module).__name__ == "FullyShardedDataParallel":
            raise Untraceable("the script uses FullyShardedDataParallel, whose memory is not traced.", ONE_PROCESS)
        if module not in self._names and not any(map(is_lazy, module.parameters())):
            for name, each in module.named_modules():
                self._names[each] = name or type(each).__name__
                if isinstance(each, nn.Embedding):
                    self.recorder.has_embedding(each.num_embeddings)
                if isinstance(each, nn.RNNBase):
                    self.recorder.bounded[UNKNOWN_RNNS] = None
            self._parameters.update({each: name for name, each in module.named_parameters()})
            self.recorder.params = max(self.recorder.params, sum(map(elements, module.parameters())))
            for name, each in (*module.named_parameters(), *module.named_buffers()):
                self._own(each, "weights", name)

    def _step_without_optimizer(self) -> None:
        passes = sum(phase == BACKWARD for phase, _ in self.recorder.phases)
        if passes > self._passes:
            self._passes, self._last = passes, self.recorder.length
            self._stepped.add(0)
            self.recorder.notes[NO_OPTIMIZER] = None

    def _own(self, tensor: Tensor, owner: str, name: str) -> None:
        """`name`: of the parameter that it is, or belongs to."""
        block = self.device.block_of(tensor)
        if block is not None and block.owner not in SETTLED:
            block.owner, block.module = owner, name or block.module

    def before_step(self, optimizer: Any, *_: Any) -> None:
        self.device.in_optimizer = True
        params = [each for group in optimizer.param_groups for each in group["params"]]
        for each in params:
            name = self._parameters.get(each, "")
            self._own(each, "weights", name)
            if each.grad is not None:
                self._own(each.grad, "gradients", name)
        self._trained |= {id(each): elements(each) for each in params}
        self.recorder.params = max(self.recorder.params, sum(self._trained.values()))

    def after_step(self, optimizer: Any, *_: Any) -> None:
        self.device.in_optimizer = False
        for parameter, state in optimizer.state.items():
            for each in state.values() if isinstance(state, dict) else ():
                if isinstance(each, Tensor):
                    self._own(each, "optimizer", self._parameters.get(parameter, ""))
        if id(optimizer) in self._stepped:
            self._finish_step()
        self._stepped.add(id(optimizer))
        self._last = self.recorder.length

    def _finish_step(self) -> None:
        if self._stepped:
            self._stepped.clear()
            self.recorder.steps.append(self._last)
            if self.stop_after is not None and len(self.recorder.steps) >= self.stop_after:
                raise StepsDone

    def finish(self) -> None:
        self.stop_after = None
        self._finish_step()
