"""A folder with weights → the model's shape, read without torch, so that `plan` plans what `train` will build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.architectures import NORM_EPSILON, GPTConfig
from ..config.run_config import GPT2_VOCAB
from ..core.errors import DataError
from ..core.files import read_json_object
from .folder import STATE, recorded_config, step_folders

_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")


def shape_in(folder: Path) -> dict[str, Any]:
    """Shape options of a run or a checkpoint of fitgpt, or of a folder in Hugging Face format. Empty where only torch
    can read it: a ckpt.pt of nanoGPT."""
    run = folder.parent.parent if (folder / STATE).is_file() else folder
    recorded = recorded_config(run) if step_folders(run / "checkpoints") else None
    if recorded is not None:
        return {name: recorded[name] for name in SHAPE if name in recorded}
    if folder.is_file() or (folder / "ckpt.pt").is_file():
        return {}
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} holds no weights to start from: neither a checkpoint of fitgpt or nanoGPT nor a "
                        "model in Hugging Face format.",
                        "Name the --out_dir of a run, or a folder that transformers' save_pretrained wrote.")
    shape, _ = hugging_face_shape(folder / "config.json")
    return {name: getattr(shape, name) for name in SHAPE}


def hugging_face_shape(file: Path) -> tuple[GPTConfig, tuple[str, ...]]:
    """The shape in a config.json of transformers; and notes, each a sentence."""
    config = read_json_object(file)
    if not config:
        raise DataError(f"{file} is missing or is not a JSON object.",
                        "Name a folder that transformers' save_pretrained wrote.")
    if config.get("model_type") != "gpt2":
        raise DataError(f"{file} does not describe a GPT-2: model_type is {config.get('model_type')!r}.",
                        "Name a folder that transformers opens as GPT2LMHeadModel.")
    # defaults: those of transformers' GPT2Config
    sizes: dict[str, Any] = {
        "n_layer": config.get("n_layer", 12), "n_head": config.get("n_head", 12), "n_embd": config.get("n_embd", 768),
        "block_size": config.get("n_positions", config.get("n_ctx", 1024)),
        "vocab_size": config.get("vocab_size", GPT2_VOCAB),
    }
    odd = [f"{key}={value!r}" for key, value in sizes.items() if type(value) is not int or not 0 < value < 2**31]
    if not odd and sizes["n_embd"] % sizes["n_head"]:
        odd.append(f"n_embd={sizes['n_embd']} is not a multiple of n_head={sizes['n_head']}")
    activation = config.get("activation_function", "gelu_new")
    accepted = {
        "activation_function": ("gelu", *_TANH_GELUS),
        "n_inner": (None, 4 * sizes["n_embd"] if not odd else None),
        "layer_norm_epsilon": (NORM_EPSILON,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    odd += [f"{key}={config[key]!r}" for key, values in accepted.items()
            if key in config and config[key] not in values]
    if odd:
        raise DataError(f"{file} describes a model that differs from nanoGPT's GPT: {', '.join(odd)}.",
                        "Use a GPT-2 without these changes.")
    notes = () if activation == "gelu" else (
        f"These weights were trained with {activation}, the tanh approximation of GELU; fitgpt, like nanoGPT, "
        "computes the exact GELU, so outputs differ slightly.",)
    return GPTConfig(**sizes, bias=True), notes
