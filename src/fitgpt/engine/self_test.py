"""`python -m fitgpt.engine.self_test`: imports torch, chooses a device, computes there. Prints one line of JSON.

`fitgpt doctor` starts it (hardware/diagnostics.py) in a process of its own. Nothing is imported before it is tested.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ..core.errors import FitError
from ..hardware.diagnostics import NOT_INSTALLED

PACKAGES = ("numpy", "safetensors", "tiktoken")  # what training needs besides torch


def self_test() -> dict[str, Any]:
    result: dict[str, Any] = {"packages": {name: import_error(name) for name in PACKAGES},
                              "import_error": import_error("torch")}
    if result["import_error"]:
        return result
    import torch

    from . import device

    result |= {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    try:
        host = device.read_host()
        result["tools"] = asdict(host.tools)
        choice = device.choose("auto", "auto", "auto", host)
        result |= {"device": choice.device, "name": choice.name, "dtype": choice.dtype, "compile": choice.compile,
                   "notes": choice.notes, "compute_error": compute_error(choice.device)}
        result["ranks"] = rank_facts()
    except FitError as error:
        result["device_error"] = [error.what, error.fix]
    return result


def rank_facts() -> dict[str, Any]:
    """What training on several GPUs depends on: their names, NCCL's version, and pairs without peer access."""
    import torch

    count = torch.cuda.device_count()
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    has_nccl = count > 0 and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {"gpus": [torch.cuda.get_device_properties(index).name for index in range(count)],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",  # type: ignore[no-untyped-call]
            "no_peer_access": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]}


def import_error(module: str) -> str:
    """Why the module cannot be imported; empty where it can."""
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        return NOT_INSTALLED if error.name == module else str(error)
    except Exception as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def compute_error(device: str) -> str:
    """Why a matmul fails on the device; empty where it works."""
    import torch

    try:
        ones = torch.ones(64, 64, device=device)
        correct = (ones @ ones).sum().item() == 64**3
    except Exception as error:
        return " ".join(str(error).split())[:300]
    return "" if correct else "a matmul of ones has a wrong result"


if __name__ == "__main__":
    print(json.dumps(self_test()))
