"""The variables that `__main__.py` changes for fitgpt's own processes, as they were before: for a script it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

CHANGED = ("PYTHONPATH", "PYTHONSAFEPATH")
given: dict[str, str | None] = {}  # empty where fitgpt was not started as a command


def restore(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
