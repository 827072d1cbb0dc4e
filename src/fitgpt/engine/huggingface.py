"""Writes and reads folders that Hugging Face transformers opens as GPT2LMHeadModel."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import __version__
from ..config.architectures import NORM_EPSILON, GPTConfig
from ..core.errors import DataError, UsageError
from ..core.extras import install_command
from ..core.files import disk_faults, folder_atomically, home, read_json_object, read_limited, recover_folder
from ..data.tokenizers import (
    FILE_NAMES,
    TOKENIZER_KEY,
    VERSION_KEY,
    ByteTokenizer,
    GPT2Tokenizer,
    tokenizer_of_export,
)
from ..runs.model_shape import hugging_face_shape
from .weights import (
    TIED_HEAD,
    TIED_TO,
    WeightSource,
    check_finite,
    checked_parameters,
    unpickle_tensors,
    write_safetensors,
)

_ENDS_OF_TEXT = {each.name: each.end_of_text for each in (GPT2Tokenizer, ByteTokenizer)}

_CONFIG, _GENERATION, _WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
_WEIGHT_FILES = (_WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# GPT-2 keeps these four matrices input-first (its Conv1D); nanoGPT's Linear keeps them output-first
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")


# ---- writing

def write_folder(out: Path | str, config: GPTConfig, model: Mapping[str, Tensor], *,
                 tokenizer: str = "unknown", files: Mapping[str, dict[str, Any]] | None = None) -> Path:
    """Writes the export, the tokenizer's `files` with it, whole or not at all; an earlier one of ours is replaced.

    The tensors have GPT-2's names and layout; where the model has no biases they are zero.
    """
    _check_overwrite(Path(out))
    out = Path(os.path.abspath(out))  # so that '.' has a name too
    with disk_faults("look at", out):
        recover_folder(out)
    end_of_text = _ENDS_OF_TEXT.get(tokenizer)
    described = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", VERSION_KEY: __version__,
        # nanoGPT's nn.GELU() is the exact one; GPT-2's own default is an approximation by tanh
        "activation_function": "gelu",
        "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "n_inner": None,
        "n_positions": config.block_size, "n_ctx": config.block_size, "vocab_size": config.vocab_size,
        "attn_pdrop": config.dropout, "embd_pdrop": config.dropout, "resid_pdrop": config.dropout,
        "layer_norm_epsilon": NORM_EPSILON, "initializer_range": 0.02,
        "scale_attn_weights": True, "tie_word_embeddings": True, "use_cache": True,
        "bos_token_id": end_of_text, "eos_token_id": end_of_text,
        "torch_dtype": str(model[TIED_TO].dtype).removeprefix("torch."),
        TOKENIZER_KEY: tokenizer,
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.items():
        if name == TIED_HEAD:
            continue
        tensors[name] = tensor.t() if name.endswith(_TRANSPOSED) else tensor
        if not config.bias and not name.endswith(("wte.weight", "wpe.weight")):
            tensors[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
    documents = {_CONFIG: described, **(files or {})}
    if end_of_text is not None:
        documents[_GENERATION] = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    with disk_faults("write the export", out), folder_atomically(
            out, out.with_name(f".tmp-{out.name}-{os.getpid()}")) as folder:
        write_safetensors(folder / _WEIGHTS, tensors, {"format": "pt"})
        for name, content in documents.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return out


def _check_overwrite(out: Path) -> None:
    """Only nothing, an empty folder and an export of ours may be written over."""
    with disk_faults("look at", out):
        try:
            os.lstat(out)
        except FileNotFoundError:
            return
        except ValueError as error:
            raise UsageError(f"{str(out)!r} is not a name a file system accepts: {error}.",
                             "Choose another folder with -o.") from error
        names = {path.name for path in out.iterdir()} if out.is_dir() else {""}
    tokenizer = FILE_NAMES if VERSION_KEY in read_json_object(out / FILE_NAMES[1]) else ()
    ours = names <= {_CONFIG, _GENERATION, _WEIGHTS, *tokenizer} and VERSION_KEY in read_json_object(out / _CONFIG)
    if names and not ours:
        raise UsageError(f"{out} exists and is not an earlier export: it is not overwritten.",
                         "Choose another folder with -o.")


# ---- reading

def read_folder(path: Path) -> WeightSource:
    """A GPT-2 folder: config.json and safetensors or pytorch_model.bin, in one file or several."""
    config, notes = hugging_face_shape(path / _CONFIG)
    model: dict[str, Tensor] = {}
    for stored_name, tensor in _tensors_in(path):
        name = str(stored_name)
        if not name.startswith("transformer.") and name != TIED_HEAD:
            name = f"transformer.{name}"
        if not name.endswith(_MASK_BUFFERS):
            model[name] = tensor.t() if name.endswith(_TRANSPOSED) and tensor.dim() == 2 else tensor
    check_finite(model, path)
    weights = {name: each.contiguous() for name, each in checked_parameters(config, model, path, DataError).items()}
    return WeightSource(config, weights, state=tokenizer_of_export(path), place=str(path), notes=notes)


def _tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    for file in _weight_files(path):
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        yield name, opened.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise DataError(f"{file} cannot be read as safetensors: {error}.", "Fetch it again.") from error
        else:
            stored = unpickle_tensors(file, DataError)
            if not isinstance(stored, dict) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
                raise DataError(f"{file} does not hold named tensors.", "Fetch it again.")
            yield from stored.items()


def _weight_files(path: Path) -> list[Path]:
    """The one weight file, or all that the index names."""
    first = next((path / name for name in _WEIGHT_FILES if (path / name).is_file()), None)
    if first is None:
        raise DataError(f"{path} holds no weights: none of {', '.join(_WEIGHT_FILES)} is there.",
                        "Name a folder that transformers' save_pretrained wrote.")
    if first.suffix != ".json":
        return [first]
    index = read_json_object(first).get("weight_map")
    names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
    strays = [name for name in names if Path(name).name != name or not (path / name).is_file()]
    if not names or strays:
        raise DataError(f"{first} names {strays[0]!r}, which is not in {path}." if strays
                        else f"{first} names no files.", "Fetch the folder again.")
    return [path / name for name in names]


# ---- GPT-2 by name

def find_gpt2(name: str) -> Path:
    """The folder of OpenAI's weights: here, in ./models, in the hub's cache, or fetched from the hub."""
    for folder in _likely_places(name):
        if (folder / _CONFIG).is_file() and any((folder / file).is_file() for file in _WEIGHT_FILES):
            return folder
    by_hand = (f"On a machine with a connection: hf download openai-community/{name} {_CONFIG} {_WEIGHTS} "
               f"--local-dir {name}   then put the folder here as ./{name}")
    try:
        import huggingface_hub
    except ImportError:
        raise DataError(f"The weights of {name} are not on this machine.",
                        f"{install_command('hub')} and run this again to fetch them. {by_hand}") from None
    try:
        return Path(huggingface_hub.snapshot_download(
            f"openai-community/{name}", allow_patterns=[_CONFIG, _WEIGHTS]))
    except Exception as error:  # whatever the hub's client raises, the user needs the same sentence
        reason = textwrap.shorten(str(error).strip().split("\n")[0].removeprefix("Got: "), 300).rstrip(".")
        raise DataError(f"The weights of {name} are not on this machine, and fetching them failed: {reason}.",
                        by_hand) from error


def _likely_places(name: str) -> Iterator[Path]:
    yield Path(name)
    yield Path("models") / name
    # where huggingface_hub keeps its files, by its own variables
    given = os.environ.get
    own = given("HF_HOME") or os.path.join(given("XDG_CACHE_HOME") or home() / ".cache", "huggingface")
    hub = Path(os.path.expanduser(given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE") or os.path.join(own, "hub")))
    for repository in (f"models--openai-community--{name}", f"models--{name}"):
        commit = b""
        with suppress(OSError, ValueError):
            commit = read_limited(hub / repository / "refs" / "main", 100)
        if commit:
            yield hub / repository / "snapshots" / os.fsdecode(commit.strip())
        yield from sorted((hub / repository / "snapshots").glob("*"))
