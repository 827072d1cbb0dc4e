"""The tape of `fitgpt sample`: float32 weights, keys and values of a whole block, one token at a time."""

from __future__ import annotations

from dataclasses import replace

from ..config import RunConfig
from .gpt import parameters, sizes
from .passes import Passes
from .setting import Setting
from .tape import Tape, Writer

PROMPT = 16  # tokens: a short one


def write(config: RunConfig, setting: Setting) -> Tape:
    """A process of its own: the optimizer and the gradients are not there."""
    w = Writer()
    shape = sizes(replace(config, weights="float32", residual="float32"), setting, 1, PROMPT, training=False)
    passes = Passes(w, shape)
    w.phase("sample")
    for name, numbers, _ in parameters(config):
        w.alloc(name, "weights", 4 * numbers)
    for layer in range(shape.layers):
        for part in ("keys", "values"):
            w.alloc(f"{layer}.{part}", "activations", shape.product * config.block_size * shape.c)
    w.alloc("prompt", "data", 8 * PROMPT)
    passes.embed("prompt")
    for layer in range(shape.layers):
        passes.forward(layer, None)
    passes.norm("hidden", f"{shape.layers}.x")
    w.free(f"{shape.layers}.x")
    passes.product("logits", "wte", shape.vocab * shape.c, shape.product * shape.vocab, owner="logits")
    if shape.product < 4:
        w.alloc("logits.wide", "logits", 4 * shape.vocab)
    w.free("hidden", "prompt")
    return w.tape()
