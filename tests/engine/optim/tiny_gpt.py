"""A GPT of two layers, its batches and the settings of its optimizer."""

from __future__ import annotations

import torch

from fitgpt import GPT, GPTConfig
from fitgpt.engine.optim.adamw import AdamWSettings

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, weight_decay=0.1)
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=67, block_size=16)
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(67, (4, 17))
    return tokens[:, :-1], tokens[:, 1:]
