"""Tests torch and the C compiler in processes of their own: one that hangs or crashes is a result, not an end."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.errors import DeviceError
from .allocator_env import ALLOCATOR_VARIABLES, check_allocator_env, child_environment

TORCH_TIMEOUT_S = 180      # a first import from a slow disk takes minutes
COMPILER_TIMEOUT_S = 60
NOT_INSTALLED = "is not installed"


def ask_torch(environment: Mapping[str, str]) -> dict[str, Any]:
    """The result of engine.self_test, in a process started like that of `train`; or {"crash": how it ended}."""
    variables = child_environment(environment)
    try:
        check_allocator_env(variables)
    except DeviceError:  # a finding of its own: torch need not fail on it too
        variables = {name: value for name, value in variables.items() if name not in ALLOCATOR_VARIABLES}
    command = [sys.executable, "-P", "-m", "fitgpt.engine.self_test"]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace",
                              timeout=TORCH_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"crash": f"did not finish within {TORCH_TIMEOUT_S} s"}
    last_line = done.stdout.strip().splitlines()[-1:]
    with suppress(ValueError):
        answer = json.loads(last_line[0]) if last_line else None
        if isinstance(answer, dict):
            return answer
    return {"crash": _describe_exit(done.returncode, done.stderr)}


def _describe_exit(code: int, stderr: str) -> str:
    last_line = (stderr.strip().splitlines() or ["without a message"])[-1]
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        return f"crashed ({name}): {last_line}"
    return f"ended with exit code {code}: {last_line}"


def try_compiler(environment: Mapping[str, str]) -> str:
    """Builds a module as triton does. → the compiler's first error; empty where it works."""
    compiler = environment.get("CC") or next((name for name in ("gcc", "clang") if shutil.which(name)), "")
    if not compiler:
        return "there is no C compiler."
    with tempfile.TemporaryDirectory(prefix="fitgpt-") as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\nint probe(void) { return 0; }\n", encoding="utf-8")
        command = [*shlex.split(compiler), "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(source), "-o",
                   str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILER_TIMEOUT_S,
                                  check=False, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} does not run: {error}."
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
    return "" if done.returncode == 0 else f"{compiler} says: {errors[0].replace(folder, '').strip()}"
