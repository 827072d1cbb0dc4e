"""The errors of fitgpt, each with a message, a fix and an exit code.

    FitError               70  a bug of ours, if it is ever raised bare
    ├── DoesNotFit          1  the plan does not fit the GPU
    ├── UsageError          2  a flag, a config file, a value
    ├── DataError           3  the training data, or weights to start from
    ├── CheckpointError     4  a checkpoint that cannot be trusted or does not match
    ├── DeviceError         5  the GPU, the driver, the torch build
    ├── NumericsError       6  the arithmetic broke down
    ├── SystemFault         7  disk, permissions, another process in the way
    ├── CannotTrace         8  a script that cannot be traced
    ├── ScriptFailed        9  a traced script failed by itself
    └── Interrupted        75  stopped on request, and resumable

`what` says the value and the rule it breaks; `fix` is something to type or do that works.
"""

from __future__ import annotations

from typing import ClassVar


class FitError(Exception):
    exit_code: ClassVar[int] = 70

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n{self.fix}" if self.fix else self.what


class DoesNotFit(FitError):
    exit_code = 1


class UsageError(FitError):
    exit_code = 2


class DataError(FitError):
    exit_code = 3


class CheckpointError(FitError):
    exit_code = 4


class DeviceError(FitError):
    exit_code = 5


class NumericsError(FitError):
    exit_code = 6


class SystemFault(FitError):
    exit_code = 7


class CannotTrace(FitError):
    exit_code = 8


class ScriptFailed(FitError):
    exit_code = 9


class Interrupted(FitError):
    exit_code = 75


STOPPED_AT_ONCE = 130  # a second Ctrl-C: nothing is saved, nothing is broken
