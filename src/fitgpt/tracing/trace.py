"""Code → what it allocates on a GPU that need not be there: `recording` puts the parts of this package together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..planning.budget import Target
from . import composites, patches
from .device import TracedGpu
from .modules import ModuleCalls
from .monkeypatch import Patches
from .recorder import Recorder


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
        patches.install(replaced, device, target.platform, target.card, target.budget.usable)
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
