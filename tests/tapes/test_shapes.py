"""The engine's files on tensors without data: loaded beside torch or without it."""

from __future__ import annotations

import subprocess
import sys

import torch

from fitgpt.config.run_config import RunConfig
from fitgpt.engine import block
from fitgpt.memory.platform import Platform
from fitgpt.tapes import engine as engine_tape
from fitgpt.tapes import shapes

CONFIG = RunConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=300, batch_size=3, block_size=64, dtype="bfloat16",
                   compile=False)


def test_the_real_torch_is_not_modified() -> None:
    engine_tape.write(CONFIG, Platform())
    assert sys.modules["torch"] is torch
    assert block.torch is torch
    assert shapes.engine_module("block").torch is shapes.TORCH


def test_a_tape_is_written_where_torch_cannot_be_imported() -> None:
    program = ("import sys; sys.modules.update(torch=None, triton=None, numpy=None)\n"
               "from fitgpt.config.run_config import RunConfig\nfrom fitgpt.memory.platform import Platform\n"
               "from fitgpt.tapes import engine\n"
               "config = RunConfig(n_layer=2, vocab_size=300, dtype='bfloat16', compile=True)\n"
               "print(len(engine.write(config, Platform()).events))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100


def test_a_view_has_the_strides_that_torch_gives_it() -> None:
    for shape, stride, wanted in (((2, 3, 4), (12, 4, 1), (6, 4)), ((2, 3, 4), (4, 8, 1), (6, 4)),
                                  ((1, 3, 4), (99, 4, 1), (12,)), ((3, 1, 4), (4, 77, 1), (3, 4))):
        real = torch.empty_strided(shape, stride)
        try:
            expected = real.view(wanted).stride()
        except RuntimeError:
            expected = None
        found = shapes.view_stride(shape, stride, wanted)
        assert (found is None) == (expected is None)
        if found is not None:
            assert real.as_strided(wanted, found).shape == wanted
            assert found == expected


def test_tensors_have_the_names_that_explain_looks_for() -> None:
    names = {event.name for event in engine_tape.write(CONFIG, Platform()).events}
    assert names >= {"wte", "1.c_attn", "1.c_attn.cast", "1.c_attn.grad", "1.c_attn.exp_avg", "logits", "1.x", "1.h1",
                     "1.qkv", "1.att", "1.proj", "1.h2", "1.fc", "1.g"}
