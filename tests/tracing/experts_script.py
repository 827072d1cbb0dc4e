"""Trains a small mixture of experts of transformers. Arguments: how its experts run, and the dtype of its weights."""

from __future__ import annotations

import sys
from typing import Any

import torch


def build(experts: str | None, dtype: str = "bfloat16") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
                                  num_key_value_heads=2, vocab_size=128, num_experts=8, num_experts_per_tok=2,
                                  moe_intermediate_size=32, use_cache=False)
    return AutoModelForCausalLM.from_config(config, experts_implementation=experts, dtype=dtype)


def train(model: Any, device: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        tokens = torch.arange(32, device=device).reshape(2, 16)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(build(*(sys.argv[1:] or [None])).to("cuda"), "cuda")
