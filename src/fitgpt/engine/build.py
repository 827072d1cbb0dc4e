"""RunConfig → the model and the optimizer of a run, in the order in which they allocate memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config.run_config import RunConfig
from .device import triton_works
from .model import GPT, build_model
from .optim.adamw import AdamW, AdamWSettings, LazyOptimizer, Optimizer
from .optim.bitsandbytes import BitsandbytesAdamW
from .optim.low_precision import AdamWInBackward, LowPrecisionAdamW
from .optim.muon import Muon
from .optim.offload import OffloadedAdamW

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_model(config: RunConfig, device: torch.device, *, dtype: str, compiled: bool) -> GPT:
    """A newly initialised model with the precision, recompute policy and casts of the config."""
    model = build_model(config.gpt_config(), device, config.seed)
    model.compute_dtype = DTYPES[dtype]
    model.loss_chunk, model.levels = config.loss_chunk, list(config.levels)
    if compiled:
        model.compile()
    model.residual_dtype = DTYPES[config.residual]
    model.round_matrices(DTYPES[config.weights])
    if config.casts == "kept":
        model.cache_casts()
    return model


def make_optimizer(config: RunConfig, model: GPT) -> Optimizer:
    """The optimizer of the config, over the model's parameters."""
    if config.states == "late":
        return LazyOptimizer(lambda: make_optimizer(replace(config, states="early"), model))
    settings = AdamWSettings(config.beta1, config.beta2, config.weight_decay)
    parameters = dict(model.named_parameters())
    if config.optimizer == "muon":
        return Muon(parameters, settings)
    if config.offload != "none":
        return OffloadedAdamW(parameters, settings, stream=config.offload == "gradients")
    if config.adam8bit == "bitsandbytes":
        return BitsandbytesAdamW(parameters, settings)
    if config.step_in_backward or config.optimizer == "adam8bit" or config.weights == "bfloat16":
        kind = AdamWInBackward if config.step_in_backward else LowPrecisionAdamW
        on_cuda = next(iter(parameters.values())).device.type == "cuda"
        return kind(parameters, settings, eight_bit=config.optimizer == "adam8bit", fused=on_cuda and triton_works(),
                    seed=config.seed)
    return AdamW(parameters, settings)
