"""nanoGPT's ckpt.pt → shape, weights and optimizer state. Nothing in the file is executed: it is read by torch's
weights_only loader (`unpickle_tensors` in weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.architectures import GPTConfig, parameter_shapes
from ..core.errors import CheckpointError
from ..runs.metrics import SplitLoss
from .weights import MAX_STEP, TIED_TO, WeightSource, check_finite, checked_parameters, unpickle_tensors

_PREFIXES = ("_orig_mod.", "module.")  # torch.compile's and DistributedDataParallel's
_MASK_BUFFER = ".attn.bias"            # before torch 2.0 nanoGPT kept its causal mask as a buffer
_FIX_CKPT = "Name a ckpt.pt as nanoGPT's train.py wrote it."


def read_nanogpt(path: Path) -> WeightSource:
    """Shape, weights and optimizer state of nanoGPT's checkpoint, without executing anything in the file."""
    ckpt = unpickle_tensors(path, CheckpointError)
    wanted = {"model": dict, "optimizer": dict, "model_args": dict, "iter_num": int, "config": dict}
    missing = [key for key, kind in wanted.items()
               if not isinstance(ckpt, dict) or not isinstance(ckpt.get(key), kind)]
    if missing:
        raise CheckpointError(f"{path} is no checkpoint of nanoGPT: it lacks {', '.join(missing)}.", _FIX_CKPT)
    if not 0 <= ckpt["iter_num"] <= MAX_STEP:
        raise CheckpointError(f"{path} is no checkpoint of nanoGPT: its iter_num is {ckpt['iter_num']}.", _FIX_CKPT)
    try:
        best = float(ckpt["best_val_loss"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        raise CheckpointError(f"{path} is no checkpoint of nanoGPT: it lacks best_val_loss.", _FIX_CKPT) from None
    found: dict[str, Tensor] = {}
    for key, tensor in ckpt["model"].items():
        name = str(key)
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if name in found:
            raise CheckpointError(f"{path} holds {name} twice, under different prefixes.", _FIX_CKPT)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} holds no tensor as {name}.", _FIX_CKPT)
        if not name.endswith(_MASK_BUFFER):
            found[name] = tensor
    config = _nanogpt_shape(ckpt["model_args"], "transformer.ln_f.bias" in found, path)
    check_finite(found, path)
    weights = checked_parameters(config, found, path, CheckpointError)
    optimizer = _nanogpt_optimizer(ckpt["optimizer"], config, path)
    check_finite(optimizer, path)
    state = {"step": ckpt["iter_num"], "best": asdict(SplitLoss("val", best, math.inf, 0, config.block_size))
             if math.isfinite(best) else None}
    return WeightSource(config, weights, optimizer, state, ckpt["config"], str(path))


def _nanogpt_shape(args: Mapping[str, Any], has_bias: bool, path: object) -> GPTConfig:
    sizes: dict[str, Any] = {key: args.get(key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    odd = [f"{key}={value!r}" for key, value in sizes.items() if type(value) is not int or value < 1]
    if not odd and sizes["n_embd"] % sizes["n_head"]:
        odd.append(f"n_embd={sizes['n_embd']} is no multiple of n_head={sizes['n_head']}")
    bias = args.get("bias", has_bias)  # nanoGPT's first versions had no such choice
    dropout = args.get("dropout", 0.0)
    if type(bias) is not bool:
        odd.append(f"bias={bias!r}")
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        odd.append(f"dropout={dropout!r}")
    if odd:
        raise CheckpointError(f"{path} has model_args that no GPT has: {', '.join(odd)}.", _FIX_CKPT)
    return GPTConfig(**sizes, dropout=float(dropout), bias=bias)


def _nanogpt_optimizer(stored: Mapping[str, Any], config: GPTConfig, path: object) -> dict[str, Tensor]:
    """AdamW's state by parameter name, where nanoGPT's file has parameter numbers; empty before the first step."""
    shapes = parameter_shapes(config)
    flat: dict[str, Tensor] = {}
    try:
        state = stored["state"]
        groups = [list(group["params"]) for group in stored["param_groups"]]
        if not state:
            return {}
        order = _nanogpt_order(shapes, [len(group) for group in groups])
        numbers = [number for group in groups for number in group]
        if order is None or len(set(numbers)) != len(numbers) or set(state) != set(numbers):
            raise ValueError("its parameters cannot be distinguished")
        for name, number in zip(order, numbers, strict=True):
            entry = dict(state[number])
            flat[f"{name}.step"] = torch.tensor(float(entry.pop("step")))
            for moment in ("exp_avg", "exp_avg_sq"):
                tensor = entry.pop(moment)
                if tuple(tensor.shape) != shapes[name]:
                    raise ValueError(f"{moment} of {name} is {list(tensor.shape)}")
                flat[f"{name}.{moment}"] = tensor.float()
            if entry:
                raise ValueError(f"{name} has {', '.join(map(str, entry))}")
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"The optimizer in {path} is not the AdamW that nanoGPT makes for this model ({error}).",
                              _FIX_CKPT) from error
    return flat


def _nanogpt_order(shapes: Mapping[str, tuple[int, ...]], group_sizes: Sequence[int]) -> list[str] | None:
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
