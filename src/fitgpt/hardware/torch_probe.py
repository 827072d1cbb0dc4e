"""What torch says of this machine, asked in a process of its own: one that hangs or crashes takes nothing with it."""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import DeviceError, FitError
from .nvidia import ALLOCATOR_VARIABLES, check_allocator_env, child_environment

TORCH_TIMEOUT_S = 180      # a first import from a slow disk takes minutes
COMPILER_TIMEOUT_S = 60
PACKAGES = ("numpy", "safetensors", "tiktoken")  # what training needs besides torch
ABSENT = "is not installed"


def ask_torch(environment: Mapping[str, str]) -> dict[str, Any]:
    """What `answer_for_torch` says in a process of its own, started as `train` starts its own; or `died`: how."""
    told = child_environment(environment)
    try:
        check_allocator_env(told)
    except DeviceError:  # a finding of its own: torch should not stumble over it as well
        told = {name: value for name, value in told.items() if name not in ALLOCATOR_VARIABLES}
    script = "from fitgpt.hardware.torch_probe import answer_for_torch; answer_for_torch()"
    command = [sys.executable, "-P", "-c", script]
    try:
        done = subprocess.run(command, env=told, capture_output=True, text=True, errors="replace",
                              timeout=TORCH_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"died": f"did not answer within {TORCH_TIMEOUT_S} s"}
    last_line = done.stdout.strip().splitlines()[-1:]
    with suppress(ValueError):
        answer = json.loads(last_line[0]) if last_line else None
        if isinstance(answer, dict):
            return answer
    return {"died": _death(done.returncode, done.stderr)}


def _death(code: int, stderr: str) -> str:
    words = stderr.strip().splitlines()[-1:] or ["without a word"]
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        return f"crashed ({name}): {words[0]}"
    return f"ended with exit code {code}: {words[0]}"


def answer_for_torch() -> None:
    """Runs in the process that doctor starts. Prints one line of JSON."""
    answer: dict[str, Any] = {"packages": {name: _loads(name) for name in PACKAGES}}
    answer["broken"] = _loads("torch")
    if not answer["broken"]:
        import torch

        from ..engine import device

        answer |= {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
        try:
            host = device.read_host()
            answer["tools"] = asdict(host.tools)
            choice = device.choose("auto", "auto", "auto", host)
            answer |= {"device": choice.device, "name": choice.name, "dtype": choice.dtype, "compile": choice.compile,
                       "notes": choice.notes, "computes": _computes(choice.device)}
        except FitError as error:
            answer["refused"] = [error.what, error.fix]
    print(json.dumps(answer))


def _loads(module: str) -> str:
    """Nothing, or why it does not load."""
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        return ABSENT if error.name == module else str(error)
    except Exception as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def _computes(device: str) -> str:
    """A product, really computed there: nothing, or what torch says instead."""
    import torch

    try:
        ones = torch.ones(64, 64, device=device)
        right = (ones @ ones).sum().item() == 64**3
    except Exception as error:
        return " ".join(str(error).split())[:300]
    return "" if right else "a product of matrices of ones came out wrong"


def try_compiler(environment: Mapping[str, str]) -> str:
    """Builds what triton would build: nothing, or the compiler's first complaint."""
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
    complaint = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
    return "" if done.returncode == 0 else f"{compiler} says: {complaint[0].replace(folder, '').strip()}"
