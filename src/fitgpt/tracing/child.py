"""In the child process: runs a script as `python script.py` would and traces it. `run_script` is its entry.

The script's folder is first on sys.path, `__name__` is "__main__" and `sys.argv` is its own. It stops after a number
of optimizer steps. Files of weights are not written: torch.save, safetensors and save_pretrained do nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from ..planning.budget import Target
from .patches import Patches
from .trace import LiveTrace, StepsDone, trace


def run_script(argv: Sequence[str], target: Target, steps: int | None, *, module: bool = False) -> LiveTrace:
    """`argv`: the script, or with `module` the name after -m, and its arguments. Errors of the script are its own."""
    sys.argv = list(argv)
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(argv[0]))
    replaced = Patches()
    with trace(target=target, stop_after=steps) as found:
        write_nothing(replaced)
        try:
            if module:
                runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(argv[0], run_name="__main__")
        except StepsDone:
            pass
        except SystemExit as stopped:
            if stopped.code not in (None, 0):
                raise
        finally:
            replaced.undo()
    return found


def write_nothing(patches: Patches) -> None:
    import torch

    patches.set(torch, "save", lambda *args, **kwargs: None)
    try:
        import safetensors.torch as safetensors
    except ImportError:
        return
    patches.set(safetensors, "save_file", lambda *args, **kwargs: None)
    patches.set(safetensors, "save_model", lambda *args, **kwargs: None)
