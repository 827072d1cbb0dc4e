"""Experiment trackers log nothing while a script is traced: its losses are made up.

A new one is an entry in VARIABLES if it can be turned off by the environment, else a function in WHEN_IMPORTED.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

VARIABLES = {  # {folder}: a temporary one
    "WANDB_MODE": "disabled", "COMET_MODE": "disabled", "COMET_START_ONLINE": "0", "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "disabled", "MLFLOW_TRACKING_URI": "file:{folder}/mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "TRACKIO_DIR": "{folder}/trackio", "AIM_REPO": "{folder}/aim",
}


def _wandb(module: Any) -> None:
    """An argument of the script would win over the variable."""
    init = module.init
    module.init = lambda *args, **options: init(*args, **{**options, "mode": "disabled"})


def _mlflow(module: Any) -> None:
    module.set_tracking_uri = lambda *_, **__: None


def _tensorboard(module: Any) -> None:
    """The class that writes event files, of tensorboard and of tensorboardX."""
    writer = module.EventFileWriter
    writer.__init__ = lambda self, logdir, *_, **__: setattr(self, "_logdir", logdir)
    for name in ("add_event", "flush", "close", "reopen"):
        setattr(writer, name, lambda *_, **__: None)


WHEN_IMPORTED: dict[str, Callable[[Any], None]] = {
    "wandb": _wandb, "mlflow": _mlflow, "tensorboard.summary.writer.event_file_writer": _tensorboard,
    "tensorboardX.event_file_writer": _tensorboard,
}


def turn_off(folder: str) -> None:
    """For this process and those that it starts. `folder`: where a tracker may write that has no other switch."""
    os.environ.update({name: value.format(folder=folder) for name, value in VARIABLES.items()})
    sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Finds a module of WHEN_IMPORTED as Python would, and changes it once it is loaded."""

    def __init__(self) -> None:
        self._left = dict(WHEN_IMPORTED)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self._left.pop(name, None)  # first: the next line comes here again
        spec = find_spec(name) if change else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def load(module: ModuleType) -> None:
            execute(module)
            assert change is not None
            change(module)

        spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec
