"""A package that is installed and does not load: one sentence and exit code 5, in every command that needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import TINY, write_dataset


@pytest.mark.parametrize("error", ["ImportError('libcudart.so.12: cannot open shared object file')",
                                   "OSError('libtorch_cpu.so: undefined symbol')"], ids=["ImportError", "OSError"])
@pytest.mark.parametrize("command", ["train", "rehearse", "sample", "eval", "export"])
def test_a_torch_that_does_not_load_is_one_sentence_and_exit_code_5(tmp_path: Path, command: str, error: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    run = [*(f"--{key}={value}" for key, value in TINY.items()), f"--dataset={write_dataset(tmp_path / 'data')}",
           f"--out_dir={tmp_path / 'out'}"]
    given = {"train": run, "rehearse": run, "export": ["out", "-o", "exported"]}.get(command, ["out"])
    done = subprocess.run([sys.executable, "-m", "fitgpt", command, *given], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
                          cwd=tmp_path)
    assert done.returncode == 5
    what, fix = done.stderr.splitlines()
    assert what.startswith(f"fitgpt: torch is installed for {sys.executable}, but does not load: lib")
    assert fix == f"  {sys.executable} -m pip install --force-reinstall torch"
