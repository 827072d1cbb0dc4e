"""Which shape has the model in a folder that a run starts from? Read without torch, so that `plan` plans what `train`
will build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config.run_config import GPT2_VOCAB
from ..core.errors import DataError
from ..nouns import GPTConfig
from .folder import recorded_config, step_folders

LAYER_NORM_EPSILON = 1e-5
_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")


def shape_in(folder: Path) -> dict[str, Any]:
    """By its knobs: of a run or a checkpoint of fitgpt, or of a folder in Hugging Face format. Empty where only torch
    can tell: a ckpt.pt of nanoGPT's."""
    run = folder.parent.parent if (folder / "state.json").is_file() else folder
    recorded = recorded_config(run) if step_folders(run / "checkpoints") else None
    if recorded is not None:
        return {knob: recorded[knob] for knob in SHAPE if knob in recorded}
    if folder.is_file() or (folder / "ckpt.pt").is_file():
        return {}
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} holds no weights to start from: neither a checkpoint of fitgpt or nanoGPT nor a "
                        "model in Hugging Face format.",
                        "Name the --out_dir of a run, or a folder that transformers' save_pretrained wrote.")
    shape, _ = hugging_face_shape(folder / "config.json")
    return {knob: getattr(shape, knob) for knob in SHAPE}


def hugging_face_shape(file: Path) -> tuple[GPTConfig, tuple[str, ...]]:
    """Of a config.json that transformers wrote; and notes, each a sentence."""
    told = read_object(file)
    if not told:
        raise DataError(f"{file} is missing or is no JSON object.",
                        "Name a folder that transformers' save_pretrained wrote.")
    if told.get("model_type") != "gpt2":
        raise DataError(f"{file} does not describe a GPT-2: model_type is {told.get('model_type')!r}.",
                        "Name a folder that transformers opens as GPT2LMHeadModel.")
    # a knob that the file leaves out has the value of transformers' GPT2Config
    sizes: dict[str, Any] = {
        "n_layer": told.get("n_layer", 12), "n_head": told.get("n_head", 12), "n_embd": told.get("n_embd", 768),
        "block_size": told.get("n_positions", told.get("n_ctx", 1024)),
        "vocab_size": told.get("vocab_size", GPT2_VOCAB),
    }
    odd = [f"{key}={value!r}" for key, value in sizes.items() if type(value) is not int or not 0 < value < 2**31]
    if not odd and sizes["n_embd"] % sizes["n_head"]:
        odd.append(f"n_embd={sizes['n_embd']} is no multiple of n_head={sizes['n_head']}")
    activation = told.get("activation_function", "gelu_new")
    accepted = {
        "activation_function": ("gelu", *_TANH_GELUS),
        "n_inner": (None, 4 * sizes["n_embd"] if not odd else None),
        "layer_norm_epsilon": (LAYER_NORM_EPSILON,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    odd += [f"{key}={told[key]!r}" for key, values in accepted.items() if key in told and told[key] not in values]
    if odd:
        raise DataError(f"{file} describes a model that nanoGPT's GPT is not: {', '.join(odd)}.",
                        "Use a GPT-2 without these changes.")
    notes = () if activation == "gelu" else (
        f"These weights were trained with {activation}, an approximation by tanh; as in nanoGPT they run with the "
        "exact GELU, and outputs differ slightly.",)
    return GPTConfig(**sizes, bias=True), notes


def read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
