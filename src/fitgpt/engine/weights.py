"""Weight files: written as safetensors, read as tensors only, and compared with the model they are for. Formats:
nanoGPT's ckpt.pt in nanogpt_checkpoint.py, Hugging Face folders in huggingface.py, fitgpt's own in
training/checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config.architectures import GPTConfig, parameter_shapes
from ..core.errors import CheckpointError, FitError
from ..core.units import MiB, show_bytes
from .model import GPT

TIED_HEAD, TIED_TO = "lm_head.weight", "transformer.wte.weight"
DIFFERENCES_SHOWN = 5
MAX_PICKLE_BYTES = 16 * MiB  # of a ckpt.pt without its tensors; GPT-2 XL's has less than 1 MiB
MAX_STEP = 10**12            # of a checkpoint
_READ_BYTES = 4 * MiB
_FIX_COPY = "Copy it again from its source, or use another."
_FIX_DIFFERENT = "Use a file that matches: this one was changed after it was written, or is of another model."
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}


@dataclass(frozen=True)
class WeightSource:
    """Weights and what is stored with them. Tensors may be views of memory-mapped files, in the stored dtype."""

    gpt: GPTConfig
    weights: dict[str, Tensor]                                  # without the tied head
    optimizer: dict[str, Tensor] = field(default_factory=dict)  # empty: none
    state: dict[str, Any] = field(default_factory=dict)         # of the training; empty: weights only
    config: dict[str, Any] = field(default_factory=dict)        # of the run, by RunConfig's names
    place: str = ""
    notes: tuple[str, ...] = ()


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
        digest.update(head)
        file.write(head)
        for name in names:
            content = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            digest.update(content)
            file.write(content)
    return FileSeal(len(head) + end, digest.hexdigest())


# ---- reading

def unpickle_tensors(path: Path, error_type: type[FitError]) -> Any:
    """Reads a .pt or .bin file with torch's weights_only loader, the only way pickles are read. Its records are
    compared with their CRC-32 first, and what it claims with its size."""
    if not path.is_file():
        raise error_type(f"There is no file {path}.", "Check the path.")
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_records(path, error_type)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to developers
            # only the zip format can be memory-mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        _check_claims(content, path, error_type)
        return content
    except FitError:
        raise
    except PermissionError as error:
        raise error_type(f"Cannot read {path}: {error.strerror}.", "Make it readable for this user.") from error
    except Exception as error:  # a damaged or hostile pickle can raise anything at all
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked:
            what = f"{path} wants to call {asked[1]} when it is opened, which weights have no need of. Nothing was run."
        else:
            what = f"{path} is damaged, or holds more than tensors and plain values. Nothing in it was run."
        raise error_type(what, "Use a file from a source you trust, saved as safetensors if there is one.") from error


def _check_records(path: Path, error_type: type[FitError]) -> None:
    """Reads every record of a zip file. torch maps records into memory: it does not look at their checksums, and would
    take compressed bytes for tensors."""
    with zipfile.ZipFile(path) as opened:
        records = opened.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise error_type(f"{path} has compressed records: another program than torch.save wrote it.",
                             "Use the file as torch.save wrote it, not one that was packed again.")
        claimed, size = sum(record.file_size for record in records), path.stat().st_size
        pickled = max((record.file_size for record in records if record.filename.endswith(".pkl")), default=0)
        if claimed > size or pickled > MAX_PICKLE_BYTES:
            raise error_type(f"{path} has {show_bytes(size)} and claims {show_bytes(claimed)}, of which "
                             f"{show_bytes(pickled)} without tensors, where the limit is "
                             f"{show_bytes(MAX_PICKLE_BYTES)}: it is damaged, or made to use up memory.", _FIX_COPY)
        for record in records:
            try:
                with opened.open(record) as content:
                    while content.read(_READ_BYTES):
                        pass
            except zipfile.BadZipFile as error:
                raise error_type(f"{path} is damaged: the record {record.filename} does not match its CRC-32.",
                                 _FIX_COPY) from error


def _check_claims(content: Any, path: Path, error_type: type[FitError]) -> None:
    """Raises unless all tensors are dense and together not larger than the file. A tensor with strides of 0 can claim
    any size; two names of one tensor, such as a tied head, count once."""
    claims: dict[tuple[Any, ...], int] = {}
    waiting, seen = [content], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:  # a list may hold itself
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.layout != torch.strided or item.is_meta or item.is_quantized:
                raise error_type(f"{path} holds a sparse, quantized or meta tensor, which weights are not.",
                                 _FIX_DIFFERENT)
            claims[item.untyped_storage().data_ptr(), item.storage_offset(), item.shape, item.stride()] = item.nbytes
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
    claimed, size = sum(claims.values()), path.stat().st_size
    if claimed > size:
        raise error_type(f"{path} has {show_bytes(size)} and claims tensors of {show_bytes(claimed)}: it is damaged, "
                         "or made to use up memory.", _FIX_COPY)


def nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """What is wrong with the values of weights or of an optimizer's state: the first that is NaN, infinite, or negative
    where that cannot be; empty if nothing is. Needs no memory."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype not in _DTYPE_NAMES:
            continue  # others, such as float4, no caller accepts
        values = tensor.float() if tensor.element_size() == 1 else tensor  # aminmax has no float8
        low, high = (bound.item() for bound in torch.aminmax(values))
        if not math.isfinite(low) or not math.isfinite(high):
            return f"{name} has values that are NaN or infinite"
        if low < 0 and name.endswith((".exp_avg_sq", ".step")):
            return f"{name} is negative"
    return ""


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    if wrong := nonfinite(tensors):
        raise CheckpointError(f"{where} cannot be used: {wrong}.",
                              "Use an earlier checkpoint, or a copy from its source: the run it is of has diverged, or "
                              "the file is damaged.")


def checked_parameters(config: GPTConfig, found: Mapping[str, Tensor], where: object,
                       error_type: type[FitError]) -> dict[str, Tensor]:
    """The weights of this GPT in its own order, without the tied head. Raises, naming the first few differences, unless
    `found` is exactly its parameters."""
    if config.n_layer > len(found):  # before a damaged file makes this list arbitrarily long
        raise error_type(f"{where} says n_layer={config.n_layer} and holds {len(found)} tensors.", _FIX_DIFFERENT)
    expected = parameter_shapes(config)
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is no parameter of this shape of GPT" for name in found
              if name not in expected and name != TIED_HEAD]
    for name in (name for name in expected if name in found):
        if tuple(found[name].shape) != expected[name]:
            wrong.append(f"{name} is {list(found[name].shape)} where {list(expected[name])} is due")
    wrong += [f"{name} holds {tensor.dtype}, and weights are one of {', '.join(map(str, _WEIGHT_DTYPES))}"
              for name, tensor in found.items() if tensor.dtype not in _WEIGHT_DTYPES]
    if wrong:
        more = f"; and {len(wrong) - DIFFERENCES_SHOWN} more" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise error_type(f"{where} does not match its own configuration: {'; '.join(wrong[:DIFFERENCES_SHOWN])}{more}.",
                         _FIX_DIFFERENT)
    if TIED_HEAD in found and not torch.equal(found[TIED_HEAD], found[TIED_TO]):
        raise error_type(f"{where} has a {TIED_HEAD} that differs from {TIED_TO}; in this GPT they are one tensor.",
                         "Use weights whose head is tied, as GPT-2's and nanoGPT's are.")
    return {name: found[name] for name in expected}


def fill(model: GPT, weights: Mapping[str, Tensor], place: str) -> None:
    """Copies weights into a model after comparing every name and shape."""
    model.load_weight_tensors(checked_parameters(model.config, weights, place, CheckpointError))
