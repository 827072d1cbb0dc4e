"""Reads nanoGPT's ckpt.pt: shape, weights and optimizer state, without executing anything in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config.architectures import GPTConfig, parameter_shapes
from ..core.errors import CheckpointError
from .weights import TIED_HEAD, TIED_TO, check_parameters, check_tied_head, unpickle_tensors

_PREFIXES = ("_orig_mod.", "module.")  # torch.compile's and DistributedDataParallel's
_MASK_BUFFER = ".attn.bias"            # before torch 2.0 nanoGPT kept its causal mask as a buffer
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIX = "Name a ckpt.pt as nanoGPT's train.py wrote it."


class NanoGPTCheckpoint(NamedTuple):
    config: GPTConfig
    model: dict[str, Tensor]             # without the tied head; in the stored dtype
    optimizer: dict[str, Tensor] | None  # <param>.exp_avg, <param>.exp_avg_sq, <param>.step; None: no step yet
    state: dict[str, Any]                # step, best_val_loss, config: nanoGPT's own


def read_ckpt(path: Path | str) -> NanoGPTCheckpoint:
    """nanoGPT's checkpoint. Tensors may be views of the memory-mapped file: copy them before it is closed."""
    ckpt = unpickle_tensors(Path(path), CheckpointError)
    wanted = {"model": dict, "optimizer": dict, "model_args": dict, "iter_num": int, "config": dict}
    missing = [key for key, kind in wanted.items()
               if not isinstance(ckpt, dict) or not isinstance(ckpt.get(key), kind)]
    if missing:
        raise CheckpointError(f"{path} is no checkpoint of nanoGPT: it lacks {', '.join(missing)}.", _FIX)
    try:
        best = float(ckpt["best_val_loss"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise CheckpointError(f"{path} is no checkpoint of nanoGPT: it lacks best_val_loss.", _FIX) from None
    model = _model(ckpt["model"], path)
    config = _config(ckpt["model_args"], model, path)
    check_parameters(config, model, path, CheckpointError)
    return NanoGPTCheckpoint(config, {name: model[name] for name in parameter_shapes(config)},
                    _optimizer(ckpt["optimizer"], config, path),
                    {"step": ckpt["iter_num"], "best_val_loss": best, "config": ckpt["config"]})


def _model(stored: Mapping[Any, Any], path: object) -> dict[str, Tensor]:
    """Prefixes stripped, mask buffers and the tied head dropped."""
    model: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        name = str(key)
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if name in model:
            raise CheckpointError(f"{path} holds {name} twice, under different prefixes.", _FIX)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} holds no tensor as {name}.", _FIX)
        if not name.endswith(_MASK_BUFFER):
            model[name] = tensor
    check_tied_head(model, path, CheckpointError)
    model.pop(TIED_HEAD, None)
    return model


def _config(args: Mapping[str, Any], model: Mapping[str, Tensor], path: object) -> GPTConfig:
    sizes: dict[str, Any] = {key: args.get(key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    odd = [f"{key}={value!r}" for key, value in sizes.items() if type(value) is not int or value < 1]
    if not odd and sizes["n_embd"] % sizes["n_head"]:
        odd.append(f"n_embd={sizes['n_embd']} is no multiple of n_head={sizes['n_head']}")
    bias = args.get("bias", "transformer.ln_f.bias" in model)  # its first versions had no such choice
    dropout = args.get("dropout", 0.0)
    if type(bias) is not bool:
        odd.append(f"bias={bias!r}")
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        odd.append(f"dropout={dropout!r}")
    if odd:
        raise CheckpointError(f"{path} has model_args that no GPT has: {', '.join(odd)}.", _FIX)
    return GPTConfig(**sizes, dropout=float(dropout), bias=bias)


def _optimizer(stored: Mapping[str, Any], config: GPTConfig, path: object) -> dict[str, Tensor] | None:
    """AdamW's state by parameter name; nanoGPT's file has parameter numbers only."""
    shapes = parameter_shapes(config)
    try:
        state = stored["state"]
        groups = [list(group["params"]) for group in stored["param_groups"]]
        if not state:
            return None
        order = _param_order(shapes, [len(group) for group in groups])
        numbers = [number for group in groups for number in group]
        if order is None or len(set(numbers)) != len(numbers) or set(state) != set(numbers):
            raise ValueError("its parameters cannot be distinguished")
        flat: dict[str, Tensor] = {}
        for name, number in zip(order, numbers, strict=True):
            entry = dict(state[number])
            flat[f"{name}.step"] = torch.tensor(float(entry.pop("step")))
            for moment in _MOMENTS:
                tensor = entry.pop(moment)
                if tuple(tensor.shape) != shapes[name]:
                    raise ValueError(f"{moment} of {name} is {list(tensor.shape)}")
                flat[f"{name}.{moment}"] = tensor.float()
            if entry:
                raise ValueError(f"{name} has {', '.join(map(str, entry))}")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"The optimizer in {path} is not the AdamW that nanoGPT makes for this model ({error}).", _FIX
        ) from error
    return flat


def _param_order(shapes: Mapping[str, tuple[int, ...]], group_sizes: Sequence[int]) -> list[str] | None:
    """Parameter names in the order of their numbers. The sizes of the groups tell nanoGPT's two orders apart."""
    decayed = [name for name, shape in shapes.items() if len(shape) >= 2]
    others = [name for name, shape in shapes.items() if len(shape) < 2]
    # until May 2023 embeddings were not decayed and the names were sorted
    old_decayed = sorted(name for name in decayed if name not in (TIED_TO, "transformer.wpe.weight"))
    old_others = sorted(set(shapes) - set(old_decayed))
    for first, second in ((decayed, others), (old_decayed, old_others)):
        if list(group_sizes) == [len(first), len(second)]:
            return first + second
    return None
