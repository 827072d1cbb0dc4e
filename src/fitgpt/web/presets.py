"""Which models the page offers to begin with: nanoGPT's own seven configs, ours, and GPT-2 in its four sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config.run_config import gpt2_shapes

GPT2_BATCH = {"eval_batch_size": 4}
XL = {**gpt2_shapes["gpt2-xl"], "batch_size": 1, "gradient_accumulation_steps": 32}


class Preset(NamedTuple):
    """The knobs that make a run hold what it holds; all others are at their defaults."""

    group: str
    name: str
    knobs: dict[str, Any]


def _evaluated(size: str) -> dict[str, Any]:
    """nanoGPT's eval_ configs only evaluate; the page plans what training that model would hold."""
    return {**gpt2_shapes[size], "batch_size": 8}


PRESETS = (
    Preset("this project's", "notes_77m: 77M, float16", dict(
        n_layer=12, n_head=12, n_embd=576, batch_size=16, gradient_accumulation_steps=32, dtype="float16")),
    Preset("this project's", "notes_30m: 30M, float16", dict(
        n_layer=6, n_head=6, n_embd=384, block_size=512, batch_size=16, gradient_accumulation_steps=32,
        dtype="float16")),
    Preset("this project's", "train_fineweb: 64M", dict(
        n_layer=12, n_head=8, n_embd=512, batch_size=16, gradient_accumulation_steps=32, eval_batch_size=4)),
    Preset("GPT-2", "small: 124M", {**GPT2_BATCH}),
    Preset("GPT-2", "medium: 350M", dict(
        n_layer=24, n_head=16, n_embd=1024, batch_size=8, gradient_accumulation_steps=60, **GPT2_BATCH)),
    Preset("GPT-2", "large: 774M", dict(
        n_layer=36, n_head=20, n_embd=1280, batch_size=4, gradient_accumulation_steps=120, grad_checkpoint=True,
        **GPT2_BATCH)),
    Preset("GPT-2", "XL: 1.56B", dict(
        n_layer=48, n_head=25, n_embd=1600, batch_size=4, gradient_accumulation_steps=120, grad_checkpoint=True,
        **GPT2_BATCH)),
    Preset("nanoGPT's configs", "train_gpt2", {}),
    Preset("nanoGPT's configs", "train_shakespeare_char", dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, gradient_accumulation_steps=1, dropout=0.2,
        vocab_size=65)),
    Preset("nanoGPT's configs", "finetune_shakespeare: GPT-2 XL", XL),
    Preset("nanoGPT's configs", "eval_gpt2, were it trained", _evaluated("gpt2")),
    Preset("nanoGPT's configs", "eval_gpt2_medium, were it trained", _evaluated("gpt2-medium")),
    Preset("nanoGPT's configs", "eval_gpt2_large, were it trained", _evaluated("gpt2-large")),
    Preset("nanoGPT's configs", "eval_gpt2_xl, were it trained", _evaluated("gpt2-xl")),
)
