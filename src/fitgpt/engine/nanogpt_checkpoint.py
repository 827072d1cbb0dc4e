"""What is in nanoGPT's ckpt.pt? Its shape, weights and optimizer, read without running anything in the file."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import CheckpointError, FitError
from ..nouns import GPTConfig
from ..training.checkpoint import TIED_HEAD, TIED_TO

DIFFERENCES_SHOWN = 5
_PREFIXES = ("_orig_mod.", "module.")  # torch.compile's and DistributedDataParallel's
_MASK_BUFFER = ".attn.bias"            # before torch 2.0 nanoGPT kept its causal mask as a buffer
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIX_DIFFERENT = "Use a file that matches: this one was changed after it was written, or is of another model."
_FIX = "Name a ckpt.pt as nanoGPT's train.py wrote it."


class Imported(NamedTuple):
    config: GPTConfig
    model: dict[str, Tensor]             # without the tied head; as precise as they are stored
    optimizer: dict[str, Tensor] | None  # <param>.exp_avg, <param>.exp_avg_sq, <param>.step; None: not stepped yet
    state: dict[str, Any]                # step, best_val_loss, config: nanoGPT's own


def read_ckpt(path: Path | str) -> Imported:
    """nanoGPT's checkpoint. Tensors may be views of the mapped file: copy them before it goes."""
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
    refuse_differences(config, model, path, CheckpointError)
    return Imported(config, {name: model[name] for name in param_shapes(config)},
                    _optimizer(ckpt["optimizer"], config, path),
                    {"step": ckpt["iter_num"], "best_val_loss": best, "config": ckpt["config"]})


def param_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter, in the order in which nanoGPT's module lists them; the tied head is wte."""
    c = config.n_embd

    def layer(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if config.bias else {})

    shapes: dict[str, tuple[int, ...]] = {TIED_TO: (config.vocab_size, c),
                                          "transformer.wpe.weight": (config.block_size, c)}
    for number in range(config.n_layer):
        block = f"transformer.h.{number}"
        shapes |= layer(f"{block}.ln_1", c)
        shapes |= layer(f"{block}.attn.c_attn", 3 * c, c) | layer(f"{block}.attn.c_proj", c, c)
        shapes |= layer(f"{block}.ln_2", c)
        shapes |= layer(f"{block}.mlp.c_fc", 4 * c, c) | layer(f"{block}.mlp.c_proj", c, 4 * c)
    return shapes | layer("transformer.ln_f", c)


def refuse_differences(
    config: GPTConfig, found: Mapping[str, Tensor], where: object, refusal: type[FitError]
) -> None:
    """Raises, naming the first few, unless `found` is exactly the parameters of this GPT."""
    if config.n_layer > len(found):  # before a list is made as long as a damaged file says
        raise refusal(f"{where} says n_layer={config.n_layer} and holds {len(found)} tensors.", _FIX_DIFFERENT)
    expected = param_shapes(config)
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is no parameter of this shape of GPT" for name in found if name not in expected]
    for name in (name for name in expected if name in found):
        if tuple(found[name].shape) != expected[name]:
            wrong.append(f"{name} is {list(found[name].shape)} where {list(expected[name])} is due")
        elif not found[name].is_floating_point():
            wrong.append(f"{name} holds {found[name].dtype}, not floating-point numbers")
    if wrong:
        more = f"; and {len(wrong) - DIFFERENCES_SHOWN} more" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise refusal(f"{where} does not match its own configuration: {'; '.join(wrong[:DIFFERENCES_SHOWN])}{more}.",
                      _FIX_DIFFERENT)


def unpickle_tensors(path: Path, refusal: type[FitError]) -> Any:
    """A .pt or .bin file through torch's tensors-only reader. There is no other way in."""
    if not path.is_file():
        raise refusal(f"There is no file {path}.", "Check the path.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to developers is none to users
            # only the zip form can be mapped; the older form is read
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError as error:
        raise refusal(f"Cannot read {path}: {error.strerror}.", "Make it readable for this user.") from error
    except Exception as error:  # a damaged or hostile pickle can raise anything at all
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked:
            what = f"{path} wants to call {asked[1]} when it is opened, which weights have no need of. Nothing was run."
        else:
            what = f"{path} is damaged, or holds more than tensors and plain values. Nothing in it was run."
        raise refusal(what, "Use a file from a source you trust, saved as safetensors if there is one.") from error


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
    refuse_untied_head(model, path, CheckpointError)
    model.pop(TIED_HEAD, None)
    return model


def refuse_untied_head(model: Mapping[str, Tensor], where: object, refusal: type[FitError]) -> None:
    head, tied_to = model.get(TIED_HEAD), model.get(TIED_TO)
    if head is not None and tied_to is not None and not torch.equal(head, tied_to):
        raise refusal(f"{where} has a {TIED_HEAD} that differs from {TIED_TO}; in this GPT they are one tensor.",
                      "Use weights whose head is tied, as GPT-2's and nanoGPT's are.")


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
    """AdamW's state by parameter name; nanoGPT's file knows the parameters by number only."""
    shapes = param_shapes(config)
    try:
        state = stored["state"]
        groups = [list(group["params"]) for group in stored["param_groups"]]
        if not state:
            return None
        order = _param_order(shapes, [len(group) for group in groups])
        numbers = [number for group in groups for number in group]
        if order is None or len(set(numbers)) != len(numbers) or set(state) != set(numbers):
            raise ValueError("its parameters cannot be told apart")
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
    """Which parameter has which number. The sizes of the two groups tell nanoGPT's two ways apart."""
    decayed = [name for name, shape in shapes.items() if len(shape) >= 2]
    others = [name for name, shape in shapes.items() if len(shape) < 2]
    # until May 2023 embeddings were not decayed and the names were sorted
    old_decayed = sorted(name for name in decayed if name not in (TIED_TO, "transformer.wpe.weight"))
    old_others = sorted(set(shapes) - set(old_decayed))
    for first, second in ((decayed, others), (old_decayed, old_others)):
        if list(group_sizes) == [len(first), len(second)]:
            return first + second
    return None
