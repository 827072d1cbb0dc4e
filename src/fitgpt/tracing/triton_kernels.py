"""Triton without a GPU: kernels compute nothing. They allocate nothing either: the Python code that calls them does."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from ..core.units import MiB
from .device import CARD, TracedGpu
from .monkeypatch import Patches

FLUSHED = 256 * MiB  # of the L2 cache before each measurement: get_empty_cache_for_benchmark() in Triton's driver.py


def install(patches: Patches, device: TracedGpu) -> None:
    if find_spec("triton") is None:
        return
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    platform, measured = device.platform, set[Any]()

    def tune(tuner: Any, *args: Any, **kwargs: Any) -> None:
        """Measures the configurations of a kernel, once for each set of arguments that it is tuned for."""
        given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        dtypes = (getattr(each, "dtype", None) for each in given.values())
        key = tuner, *(given.get(name) for name in tuner.keys), *dtypes
        if len(tuner.configs) > 1 and key not in measured:
            measured.add(key)
            device.recorder.scratch([FLUSHED], "timing of a Triton kernel")

    patches.set(JITFunction, "run", lambda *_, **__: None)
    patches.set(Autotuner, "run", tune)
    target = GPUTarget("cuda", 10 * platform.capability[0] + platform.capability[1], 32)
    properties = {"multiprocessor_count": platform.sms, "max_shared_mem": 101376, "max_num_regs": 65536, "warpSize": 32}
    patches.set(driver, "_active", SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: CARD, get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda *_: properties)))
