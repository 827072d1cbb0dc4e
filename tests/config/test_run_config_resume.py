"""Resuming: options that may change, options that may not, and the error for those."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from fitgpt.config.fields import option_specs
from fitgpt.config.run_config import FROZEN_ON_RESUME, TOGETHER_ON_RESUME, RunConfig, check_resume
from fitgpt.core.errors import CheckpointError


def _other(key: str) -> Any:
    one = option_specs(RunConfig)[key]
    special = {"dtype": "float16", "n_head": 6, "n_embd": 1536, "device": "cpu", "backend": "gloo", "keep_last": 3,
               "block_size": 2048, "init_from": "resume", "min_lr": 1e-6, "learning_rate": 1e-3, "compile": False,
               "cuda_graphs": False, "saved_activations": "input", "weights": "bfloat16", "residual": "bfloat16",
               "optimizer": "adam8bit", "adam8bit": "bitsandbytes", "offload": "optimizer", "casts": "kept",
               "gradients": "kept", "states": "late", "budget": "8GiB", "leave": "2GiB", "rehearse": False,
               "gpus": "0"}
    if key in special:
        return special[key]
    another = {"bool": lambda: not one.default, "text": lambda: one.default + "x", "int": lambda: one.default + 1,
               "float": lambda: one.default * 1.01 + 1e-3}
    return another[one.kind]()


RESUMABLE = {f.name for f in fields(RunConfig)} - FROZEN_ON_RESUME - {*TOGETHER_ON_RESUME}


@pytest.mark.parametrize("key", [f.name for f in fields(RunConfig)])
def test_a_resume_may_change_every_option_that_is_not_frozen(key: str) -> None:
    optimizer = "adam8bit" if key == "adam8bit" else "adamw"
    recorded = RunConfig(gradient_accumulation_steps=1, grad_clip=0.0, optimizer=optimizer)  # which suits every saver
    wanted = replace(recorded, **{key: _other(key) if key != "gradient_accumulation_steps" else 2}).to_dict()
    if key in RESUMABLE:
        check_resume(recorded.to_dict(), wanted, {key})
    else:
        with pytest.raises(CheckpointError, match=key):
            check_resume(recorded.to_dict(), wanted, {key})
        check_resume(recorded.to_dict(), wanted, set())


def test_frozen_options_are_those_of_the_model_and_the_optimizer() -> None:
    assert FROZEN_ON_RESUME.issuperset(
        ["n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "seed", "dtype", "beta1", "beta2"])
    assert RESUMABLE.issuperset(
        ["max_iters", "learning_rate", "device", "compile", "grad_checkpoint", "eval_iters", "out_dir", "dropout",
         "loss_chunk", "init_from", "wandb_log"])


def test_the_error_of_a_resume_lists_every_difference_and_the_fix() -> None:
    recorded = RunConfig(n_layer=2, seed=5).to_dict()
    with pytest.raises(CheckpointError) as caught:
        check_resume(recorded, {**recorded, "n_layer": 3, "seed": 6, "max_iters": 9}, None)
    assert "n_layer=3 (it was 2)" in caught.value.what
    assert "seed=6 (it was 5)" in caught.value.what
    assert "max_iters" not in caught.value.what
    assert "--seed=5 --n_layer=2" in caught.value.fix


def test_a_resume_may_split_a_step_differently_but_not_change_its_size() -> None:
    recorded = RunConfig(batch_size=16, gradient_accumulation_steps=32).to_dict()
    split = {**recorded, "batch_size": 8, "gradient_accumulation_steps": 64}
    check_resume(recorded, split, {"batch_size", "gradient_accumulation_steps"})
    with pytest.raises(CheckpointError, match="512") as caught:
        check_resume(recorded, {**recorded, "batch_size": 8}, {"batch_size"})
    assert caught.value.fix == "--batch_size=8 --gradient_accumulation_steps=64"
    with pytest.raises(CheckpointError) as caught:
        check_resume(recorded, {**recorded, "batch_size": 7}, {"batch_size"})
    assert caught.value.fix == "--batch_size=16 --gradient_accumulation_steps=32"
