"""Weights are not saved while a script is traced, and the script goes on as if they were."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .errors import Untraceable
from .monkeypatch import Patches


def loads_unwritten(file: str) -> tuple[str, str]:
    return (f"the script loads {file}, which it saved before, and a trace saves nothing.",
            "Trace it without that part, or let it stop before: --steps 1.")


@contextmanager
def saving_nothing() -> Iterator[set[str]]:
    """torch.save and safetensors, which save_pretrained uses, write nothing. Other files are the script's own.

    Programs save to a temporary name and rename it, copy the best checkpoint, delete old ones, print sizes: that works
    for files that were never written, too. Loading one does not. The set gets the paths of these files.
    """
    unwritten, patches = set[str](), Patches()

    def is_unwritten(file: Any) -> bool:
        return isinstance(file, str | os.PathLike) and os.path.abspath(file) in unwritten and not os.path.exists(file)

    def save(_: Any, file: Any = None, *args: Any, **kwargs: Any) -> None:
        file = kwargs.get("filename", kwargs.get("f", file))
        if isinstance(file, str | os.PathLike):
            unwritten.add(os.path.abspath(file))

    def unless_unwritten(module: Any, name: str, otherwise: Callable[..., Any]) -> None:
        original = getattr(module, name)
        patches.set(module, name, lambda file, *args, **kwargs: otherwise(file, *args) if is_unwritten(file)
                    else original(file, *args, **kwargs))

    def copy(_: Any, to: Any, *args: Any) -> Any:
        unwritten.add(os.path.abspath(to))
        return to

    def load(file: Any, *_: Any) -> None:
        raise Untraceable(*loads_unwritten(str(file)))

    patches.set(torch, "save", save)
    unless_unwritten(torch, "load", load)
    with suppress(ImportError):
        import safetensors.torch as safetensors

        for name in ("save_file", "save_model"):
            patches.set(safetensors, name, save)
        unless_unwritten(safetensors, "load_file", load)
    for module, names in ((os, ("replace", "rename", "link", "symlink")), (shutil, ("copyfile", "copy", "copy2"))):
        for name in names:
            unless_unwritten(module, name, copy)
    for name in ("remove", "unlink"):
        unless_unwritten(os, name, lambda file, *_: unwritten.discard(os.path.abspath(file)))
    unless_unwritten(os.path, "getsize", lambda *_: 0)
    try:
        yield unwritten
    finally:
        patches.undo()
