"""Attributes of torch that are replaced while a trace runs."""

from __future__ import annotations

from typing import Any


class Patches:
    """Replaces attributes and puts them back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, bool]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        own = name in vars(target)
        self._replaced.append((target, name, vars(target).get(name), own))
        setattr(target, name, value)

    def undo(self) -> None:
        for target, name, value, own in reversed(self._replaced):
            if own:
                setattr(target, name, value)
            else:
                delattr(target, name)
        self._replaced.clear()
