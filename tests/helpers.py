"""What several tests share: a tiny dataset in nanoGPT's format, a tiny run over it, and a GPT-2 for reference."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fitgpt import GPT
from fitgpt.config.fields import option_specs
from fitgpt.config.memory_savers import SAVERS
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import UsageError

TINY: dict[str, Any] = dict(
    n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, batch_size=4, gradient_accumulation_steps=2,
    max_iters=20, lr_decay_iters=20, warmup_iters=2, learning_rate=1e-2, min_lr=1e-3, eval_interval=10, eval_iters=2,
    device="cpu", compile=False,
)


def without_packages(folder: Path, *names: str) -> dict[str, str]:
    """The environment of a child process in which these packages are not installed: an import hook hides them."""
    (folder / "sitecustomize.py").write_text(f"""import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
""", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}

# The options that decide which optimizer a run has, and which state that keeps.
OPTIMIZER_OPTIONS = ("optimizer", "adam8bit", "states", "weights", "offload", "step_in_backward")


def accepted_settings(*options: str, **fixed: Any) -> list[dict[str, Any]]:
    """Every combination of values of these options that a run with `fixed` accepts. A memory saver brings the settings
    that may be set along with it, where these are not among the options."""
    specs, found = option_specs(RunConfig), list[dict[str, Any]]()
    for values in product(*(specs[option].choices or (False, True) for option in options)):
        chosen = dict(zip(options, values, strict=True))
        brought = {name: value for saver in SAVERS if chosen.get(saver.option) == saver.value
                   for name, value in saver.settings.items()}
        settings = fixed | brought | chosen
        with suppress(UsageError):
            RunConfig(**settings)
            found.append(settings)
    return found


def skip_without_library(options: dict[str, Any]) -> None:
    """bitsandbytes comes with the extra `dev`, but has no build for some machines."""
    if options.get("adam8bit") == "bitsandbytes":
        import pytest  # here, since the campaigns need the rest of this file and no pytest

        pytest.importorskip("bitsandbytes")


def write_dataset(folder: Path, tokens: int = 6000, vocab: int = 64) -> str:
    """Text with structure enough that a loss falls: each token tends to follow from the last."""
    rng = np.random.default_rng(0)
    ids = np.cumsum(rng.integers(1, 4, size=tokens)) % vocab
    folder.mkdir(parents=True, exist_ok=True)
    ids[: tokens * 9 // 10].astype(np.uint16).tofile(folder / "train.bin")
    ids[tokens * 9 // 10:].astype(np.uint16).tofile(folder / "val.bin")
    return str(folder)


def tiny_config(tmp_path: Path, **changes: Any) -> RunConfig:
    dataset = write_dataset(tmp_path / "data")
    return RunConfig(**{**TINY, "dataset": dataset, "out_dir": str(tmp_path / "out"), **changes})


def reference_loss(model: GPT, idx: Tensor, targets: Tensor) -> Tensor:
    """GPT-2 written out a second time, with attention by hand, from the parameters' names alone."""
    w = dict(model.named_parameters())
    C, H = model.config.n_embd, model.config.n_head

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        out = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    def linear(x: Tensor, name: str) -> Tensor:
        out = x @ w[f"{name}.weight"].t()
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    B, T = idx.shape
    x = w["transformer.wte.weight"][idx] + w["transformer.wpe.weight"][:T]
    for i in range(model.config.n_layer):
        h = f"transformer.h.{i}"
        q, k, v = (part.view(B, T, H, C // H).transpose(1, 2)
                   for part in linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(C, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(C // H)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C), f"{h}.attn.c_proj")
        up = linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        x = x + linear(up * 0.5 * (1 + torch.erf(up / math.sqrt(2))), f"{h}.mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].t()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
