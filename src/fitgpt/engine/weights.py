"""Weight files: written as safetensors, read as tensors only, and compared with the model they are for."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config.architectures import GPTConfig, parameter_shapes
from ..core.errors import CheckpointError, FitError
from .model import GPT

TIED_HEAD, TIED_TO = "lm_head.weight", "transformer.wte.weight"
DIFFERENCES_SHOWN = 5
_FIX_DIFFERENT = "Use a file that matches: this one was changed after it was written, or is of another model."
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}


class FileSeal(NamedTuple):
    size: int
    sha256: str


# ---- writing

def write_safetensors(path: Path, tensors: Mapping[str, Tensor],
                      metadata: Mapping[str, str] | None = None) -> FileSeal:
    """Writes tensor by tensor: at most one of them has a second copy in CPU RAM."""
    # largest element size first keeps every tensor aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for part in chain([memoryview(head)], chain.from_iterable(_raw_bytes(tensors[name]) for name in names)):
            digest.update(part)
            file.write(part)
    return FileSeal(len(head) + end, digest.hexdigest())


def _raw_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, as a view that is valid until the next item."""
    host = tensor.detach().to("cpu").contiguous()
    nbytes = host.numel() * host.element_size()
    if nbytes:
        yield memoryview((ctypes.c_char * nbytes).from_address(host.data_ptr())).cast("B")


# ---- reading

def unpickle_tensors(path: Path, error_type: type[FitError]) -> Any:
    """Reads a .pt or .bin file with torch's weights_only loader, the only way pickles are read."""
    if not path.is_file():
        raise error_type(f"There is no file {path}.", "Check the path.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to developers
            # only the zip format can be memory-mapped
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError as error:
        raise error_type(f"Cannot read {path}: {error.strerror}.", "Make it readable for this user.") from error
    except Exception as error:  # a damaged or hostile pickle can raise anything at all
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked:
            what = f"{path} wants to call {asked[1]} when it is opened, which weights have no need of. Nothing was run."
        else:
            what = f"{path} is damaged, or holds more than tensors and plain values. Nothing in it was run."
        raise error_type(what, "Use a file from a source you trust, saved as safetensors if there is one.") from error


def check_parameters(
    config: GPTConfig, found: Mapping[str, Tensor], where: object, error_type: type[FitError]
) -> None:
    """Raises, naming the first few differences, unless `found` is exactly the parameters of this GPT."""
    if config.n_layer > len(found):  # before a damaged file makes this list arbitrarily long
        raise error_type(f"{where} says n_layer={config.n_layer} and holds {len(found)} tensors.", _FIX_DIFFERENT)
    expected = parameter_shapes(config)
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is no parameter of this shape of GPT" for name in found if name not in expected]
    for name in (name for name in expected if name in found):
        if tuple(found[name].shape) != expected[name]:
            wrong.append(f"{name} is {list(found[name].shape)} where {list(expected[name])} is due")
        elif not found[name].is_floating_point():
            wrong.append(f"{name} holds {found[name].dtype}, not floating-point numbers")
    if wrong:
        more = f"; and {len(wrong) - DIFFERENCES_SHOWN} more" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise error_type(f"{where} does not match its own configuration: {'; '.join(wrong[:DIFFERENCES_SHOWN])}{more}.",
                      _FIX_DIFFERENT)


def check_tied_head(model: Mapping[str, Tensor], where: object, error_type: type[FitError]) -> None:
    head, tied_to = model.get(TIED_HEAD), model.get(TIED_TO)
    if head is not None and tied_to is not None and not torch.equal(head, tied_to):
        raise error_type(f"{where} has a {TIED_HEAD} that differs from {TIED_TO}; in this GPT they are one tensor.",
                      "Use weights whose head is tied, as GPT-2's and nanoGPT's are.")


def fill(model: GPT, weights: Mapping[str, Tensor], place: str) -> None:
    """Copies weights into a model after comparing every name and shape."""
    check_parameters(model.config, weights, place, CheckpointError)
    model.load_weight_tensors(weights)
