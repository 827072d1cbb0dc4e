"""The contenders of bench/engine.py, each with `step(batches)` and `evaluate(idx, targets)`."""

from __future__ import annotations

from typing import Any

import torch
from plain import PlainTrainer, TransformersTrainer
from torch import Tensor

from fitgpt.engine.loop import Training
from fitgpt.engine.model import build_model
from fitgpt.engine.optim import AdamW, AdamWSettings, Scaler, apply_gradients
from fitgpt.nouns import GPTConfig


class OurTrainer:
    def __init__(self, config: GPTConfig, dtype: str, *, compiled: bool, accumulation: int, levels: str,
                 graphs: bool = True) -> None:
        device = torch.device("cuda")
        self.model = build_model(config, device, seed=0)
        self.model.compute_dtype = getattr(torch, dtype)
        self.model.levels = [levels] * config.n_layer
        if compiled:
            self.model.compile()
        self.training = Training(self.model, AdamW(dict(self.model.named_parameters()), AdamWSettings(0.9, 0.95, 0.1)),
                                 Scaler(device, scaling=dtype == "float16"))
        if graphs:
            self.training.record_gpu_work()
        self.accumulation = accumulation

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        training = self.training
        scale = training.scaler.scale / self.accumulation
        for idx, targets in batches:
            training.accumulate(idx, targets, scale)
        apply_gradients(self.model, training.optimizer, training.scaler, 1e-4, grad_clip=1.0,
                        stay=training.gradients_stay)

    def evaluate(self, idx: Tensor, targets: Tensor) -> float:
        self.model.eval()
        loss = self.training.token_losses(idx, targets).mean().item()
        self.model.train()
        return loss


def make_trainer(case: dict[str, Any]) -> tuple[Any, GPTConfig]:
    torch.set_float32_matmul_precision("high")
    config = GPTConfig(n_layer=case["n_layer"], n_head=case["n_head"], n_embd=case["n_embd"],
                       block_size=case["block_size"], vocab_size=50304, bias=False)
    shared = dict(compiled=case["compiled"], accumulation=case["accumulation"])
    if case["kind"] == "ours":
        return OurTrainer(config, case["dtype"], levels=case["levels"], graphs=case.get("graphs", True), **shared), config
    kind = {"plain": PlainTrainer, "transformers": TransformersTrainer}[case["kind"]]
    return kind(config, case["dtype"], **shared), config
