"""The contenders of bench/engine.py, each with `step(batches)` and `evaluate(idx, targets)`."""

from __future__ import annotations

from typing import Any

import torch
from plain import PlainTrainer, TransformersTrainer
from torch import Tensor

from fitgpt.config.architectures import GPTConfig
from fitgpt.config.run_config import RunConfig
from fitgpt.engine.device import resolve_device
from fitgpt.engine.optim.grad_scaler import apply_gradients
from fitgpt.training.build import build_training


class OurTrainer:
    """What `fitgpt train` builds for the same options, with random tokens for data."""

    def __init__(self, config: RunConfig) -> None:
        self.training = build_training(config, resolve_device("cuda", config.dtype, config.compile))
        self.accumulation = config.gradient_accumulation_steps

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        training = self.training
        training.model.refresh_casts()
        scale = training.scaler.scale / self.accumulation
        for idx, targets in batches:
            training.accumulate(idx, targets, scale)
        apply_gradients(training.model, training.optimizer, training.scaler, 1e-4, grad_clip=1.0,
                        stay=training.gradients_stay)

    def evaluate(self, idx: Tensor, targets: Tensor) -> float:
        self.training.model.eval()
        loss = self.training.token_losses(idx, targets).mean().item()
        self.training.model.train()
        return loss


def make_trainer(case: dict[str, Any]) -> tuple[Any, GPTConfig]:
    torch.set_float32_matmul_precision("high")
    shape = {key: case[key] for key in ("n_layer", "n_head", "n_embd", "block_size")}
    config = GPTConfig(**shape, vocab_size=50304, bias=False)
    if case["kind"] == "ours":
        settings = dict(**shape, vocab_size=50304, batch_size=case["batch_size"], dtype=case["dtype"],
                     gradient_accumulation_steps=case["accumulation"], **case["knobs"])
        return OurTrainer(RunConfig(**settings)), config
    kind = {"plain": PlainTrainer, "transformers": TransformersTrainer}[case["kind"]]
    return kind(config, case["dtype"], compiled=case["compiled"], accumulation=case["accumulation"]), config
