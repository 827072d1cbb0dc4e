"""faults.c compiled, and controlled from Python."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

COUNT, KILL, TORN, FAIL, FAIL_FROM_HERE, FAIL_AFTERWARDS = range(6)  # as in faults.c


def library(folder: Path) -> Path:
    """Compiles faults.c into the folder; for LD_PRELOAD."""
    built = folder / "faults.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", built, Path(__file__).with_name("faults.c"), "-ldl"],
                   check=True)
    return built


def arm(folder: Path, at: int, action: int, error: int, log: Path) -> None:
    """From now on calls of this process that change files below the folder are counted, and one has a fault."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faults_arm = ctypes.CDLL(None).faults_arm
    faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    faults_arm(str(folder).encode(), at, action, error, descriptor)
