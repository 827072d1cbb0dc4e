"""Names for tensors and spans of the passes. Here they do nothing.

A memory forecast runs the engine's files on tensors without data (tapes/shapes.py) and puts its own two functions in
the place of these, so that its tape can say which tensor or which layer an allocation belongs to.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

_NOTHING = nullcontext()


def named(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself; `name` is what the tape calls it, within the layer of the current span."""
    return tensor


def span(name: str, layer: int | None = None) -> AbstractContextManager[None]:
    """A part of a pass: "forward" or "backward" of one layer, or "embedding", "head" … of none."""
    return _NOTHING
