"""bitsandbytes without its CUDA library: 8-bit and paged optimizers, 8-bit and 4-bit layers.

bitsandbytes allocates GPU memory in Python: its operations make results and temporary tensors with torch, and pass
their addresses to functions of a C library. That Python code, of the version that is installed, runs in a trace as it
does on a GPU; the C functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ..core.units import show_bytes
from .device import TracedGpu
from .monkeypatch import Patches

NAME = "bitsandbytes"
PAGED = ("Paged optimizer state is not in the plan ({}): it is in CUDA's unified memory, which moves to the CPU's "
         "memory where the GPU's is short.")
OUTLIERS = ("8-bit layers of bitsandbytes keep columns of their input with large values (llm_int8_threshold) in 16 "
            "bits, too. How many depends on values: none are in the plan.")


def install(patches: Patches, device: TracedGpu) -> None:
    """Replaces the C library, in a bitsandbytes that is imported already and in one that the script imports."""
    library, load = Library(device), ctypes.LibraryLoader.LoadLibrary

    def loaded(loader: Any, path: Any) -> Any:
        return library if NAME in Path(str(path)).name else load(loader, path)

    patches.set(ctypes.LibraryLoader, "LoadLibrary", loaded)
    if NAME not in sys.modules:
        return
    import_module(f"{NAME}.backends.cuda.ops")  # without a GPU, it was not
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{NAME}."):
            for attribute, value in list(vars(module).items()):
                if attribute == "lib":
                    patches.set(module, attribute, library)
                elif attribute.startswith("str2optimizer"):  # name → C functions, one per dtype
                    patches.set(module, attribute, {optimizer: (library.function,) * len(functions)
                                                    for optimizer, functions in value.items()})
                elif hasattr(value, "cache_clear"):  # it may remember another GPU
                    patches.set(module, attribute, functools.cache(value.__wrapped__))


class Library:
    """In place of the C library. Its functions return 0, which is success."""

    def __init__(self, device: TracedGpu) -> None:
        self._device, self._paged = device, list[mmap.mmap]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        return functools.partial(self._call, name)  # ctypes' functions have attributes, too

    def _call(self, name: str, *args: Any) -> int:
        if TracedGpu.active is None:
            raise RuntimeError(f"{NAME} was first imported while fitgpt traced, without its CUDA library. Import "
                               f"{NAME} before the trace.")
        if name == "cint8_vector_quant" and args[3]:  # the threshold
            self._device.recorder.notes[OUTLIERS] = None
        return self._paged_memory(args[0].value) if name == "cget_managed_ptr" else 0

    def _paged_memory(self, nbytes: int) -> int:
        """The address of memory of the host, which nobody touches: the system provides none until then."""
        notes, before = self._device.recorder.notes, sum(map(len, self._paged))
        notes.pop(PAGED.format(show_bytes(before)), None)
        notes[PAGED.format(show_bytes(before + nbytes))] = None
        self._paged.append(mmap.mmap(-1, nbytes))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._paged[-1]))
