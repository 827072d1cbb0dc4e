"""The tape of `fitgpt sample`: float32 weights, keys and values of a whole block, one token at a time.

engine/sample.py itself, run on tensors without data (../shapes.py). Seven recorded runs make the same blocks of more
than 512 bytes. Left out are scalars, and what a draw makes after its softmax. Nothing is compiled by default.
"""

from __future__ import annotations

from dataclasses import replace

from ...config.run_config import RunConfig
from ...memory.platform import Platform
from ...memory.tape import Tape, Writer
from ..shapes import engine_module
from .run import BYTES, attention_kernel, gpu_of

PROMPT = 16   # tokens: a short one
# Drawn after the first one. The most is allocated from the first on; pages are mapped until the logits of two tokens,
# the last and the next, have found places to change between. tests/tapes/engine/test_sampling.py compares with forty.
TOKENS = 4


def write(config: RunConfig, platform: Platform) -> Tape:
    """A process of its own: the optimizer and the gradients are not there."""
    config = replace(config, weights="float32", residual="float32", casts="transient", compile=False, dropout=0.0)
    writer, sample, build = Writer(), engine_module("sample"), engine_module("build")
    gpu = gpu_of(config, platform, writer, masked_attention=masked_attention(config, platform))
    writer.phase("sample")
    with gpu.section():
        model = build.make_model(config, gpu.device, dtype=config.dtype, compiled=False)
        tokens = sample.generate(model, [0] * PROMPT, TOKENS + 1, sample.SamplingOptions(), 0)
        for _ in range(TOKENS + 1):
            next(tokens)
    return writer.tape()


def masked_attention(config: RunConfig, platform: Platform) -> str:
    """torch's choice (sdp_utils.cpp) for one query and a mask: flash takes none, and heads are not padded here."""
    kernel, head, itemsize = attention_kernel(config, platform), config.n_embd // config.n_head, BYTES[config.dtype]
    if kernel == "cudnn" and head % 8 == 0:
        return "cudnn"
    by_tensor_cores = platform.capability >= ((8, 0) if itemsize == 4 else (7, 0))
    fits = head % (16 // itemsize) == 0 or not by_tensor_cores
    return "efficient" if kernel != "math" and fits else "math"
