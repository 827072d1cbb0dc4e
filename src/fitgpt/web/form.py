"""What the page's form offers: GPUs, presets, and every option that affects memory, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import __version__
from ..config.argv import walk
from ..config.command_options import PlanOptions
from ..config.fields import option_specs
from ..config.memory_savers import LEVELS
from ..config.run_config import PAGE_OPTIONS, RunConfig, diff, gpt2_shapes, resolve
from ..core.errors import DeviceError
from ..core.units import show_count
from ..hardware import gpus as cards
from ..hardware.nvidia import gpus
from ..memory.platform import TORCH_VERSIONS
from .query import RUN_OPTIONS

EXAMPLE = "RTX 4070"  # selected at first if this machine has no GPU
CONFIGS = Path(__file__).parents[1] / "configs"
DATASET_VOCAB = {"demo": 256, "shakespeare_char": 65}  # config files leave the vocabulary to the dataset
GROUPS = {"size": PAGE_OPTIONS["size"], "savers": PAGE_OPTIONS["less"], "more": PAGE_OPTIONS["more"]}
# The stops of each slider. Any other number can be typed beside it.
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
STOPS: dict[str, tuple[int, ...]] = {
    "batch_size": _COUNTS, "gradient_accumulation_steps": _COUNTS, "n_layer": (*range(1, 37), 40, 42, 44, 48, 56, 64),
    "block_size": (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    "n_embd": (), "n_head": (),  # each depends on the other: they come with the plan
    "eval_batch_size": (0, *_COUNTS), "loss_chunk": (0, 128, 256, 512, 1024, 2048, 4096, 8192),
}
OTHERS_MIB = (0, 128, 256, 512, 768, 1024, 1536, 2118, 2560, 3072, 4096, 5120, 6144, 8192)


def form() -> dict[str, Any]:
    own = option_specs(PlanOptions)
    return {
        "version": __version__, "example": EXAMPLE, "here": _here(),
        "gpus": [{"name": card.name, "memory": f"{card.memory_gb} GB", "group": _family(card)}
                  for card in cards.load() if card.vendor in ("nvidia", "amd")],
        "presets": presets(),
        "groups": {group: [_control(name) for name in names] for group, names in GROUPS.items()},
        "trainers": list(own["trainer"].choices), "torch": list(TORCH_VERSIONS), "others": OTHERS_MIB,
        "help": {name: own[name].help for name in ("gpu", "others", "budget", "trainer", "torch")},
    }


def presets() -> list[dict[str, Any]]:
    """The config files of this project, smallest model first, and nanoGPT's own that differ from them."""
    own = {file.stem: _config_of(file) for file in CONFIGS.glob("*.py")}
    params = {name: config.gpt_config().count_params() for name, config in own.items()}
    theirs = {"train_gpt2": RunConfig(), "finetune_shakespeare: GPT-2 XL": RunConfig(
        **gpt2_shapes["gpt2-xl"], batch_size=1, gradient_accumulation_steps=32)}
    for size, shape in gpt2_shapes.items():  # these only evaluate; the page plans what training that model takes
        theirs[f"eval_{size.replace('-', '_')}, trained"] = RunConfig(**shape, batch_size=8)
    return [*(_preset("config/", f"{name}: {show_count(params[name])}", own[name])
              for name in sorted(own, key=params.__getitem__)),
            *(_preset("nanoGPT's configs", name, config) for name, config in theirs.items())]


def _config_of(file: Path) -> RunConfig:
    assignments = [each for each in walk([str(file)], RunConfig) if each.key in RUN_OPTIONS]
    return resolve(assignments, {"vocab_size": DATASET_VOCAB.get(file.stem, 0)})[0]


def _preset(group: str, name: str, config: RunConfig) -> dict[str, Any]:
    """With the options that are not at their default: choosing the preset resets all others."""
    return {"group": group, "name": name,
            "settings": {key: str(value) for key, _, value in diff(RunConfig(), config)}}


def _control(name: str) -> dict[str, Any]:
    """An option as its dataclass field declares it."""
    one = option_specs(RunConfig)[name]
    choices = list(one.choices)
    if name == "recompute":
        choices = list(LEVELS)
    elif one.kind in ("bool", "auto"):
        choices = ["auto", "True", "False"] if one.kind == "auto" else []
    kind = "switch" if one.kind == "bool" else "choice" if choices else "slider" if name in STOPS else "number"
    return {"name": name, "kind": kind, "default": str(one.default), "help": one.help, "choices": choices,
            "stops": list(STOPS.get(name, ())), "integer": one.kind == "int"}


def _family(card: cards.GpuModel) -> str:
    """The group of a GPU in the list, by its name: RTX 40, RTX 30, workstation, data centre."""
    words = card.name.split()
    if card.vendor == "amd":
        return "AMD: needs a budget"
    if words[0] in ("RTX", "GTX") and words[1].isdecimal() and len(words[1]) == 4 and words[1] != "6000":
        return f"{words[0]} {words[1][:2]}"
    return "workstation" if words[0] in ("RTX", "TITAN") else "data centre"


def _here() -> str:
    """The name of this machine's GPU, from the driver; empty if there is none."""
    try:
        found = gpus()
    except DeviceError:
        return ""
    return max(found, key=lambda gpu: gpu.free_bytes or 0).name if found else ""
