"""Trains a model of transformers on random tokens, as the scripts of the threads in this folder do.

    fitgpt trace --gpu T4 --steps 3 tests/diagnosis/messages/train.py --model GPT2LMHeadModel --batch 4 --tokens 1024

index.json has the arguments of each thread. The threads used older releases; this is what the script does as they did:
attention without a fused kernel, a copy of the logits without the last position, the keys and values that GPT-2 returns
(`use_cache`), optimizers with a loop over the parameters, and gradients that are set to zero and stay allocated.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a class of transformers")
    parser.add_argument("--config", nargs="*", default=[], help="NAME=VALUE of the model's config")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--targets", type=int, default=0, help="tokens of the decoder")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--weights", default="float32", choices=["float32", *HALF])
    parser.add_argument("--autocast", default="", choices=["", *HALF])
    parser.add_argument("--optimizer", default="AdamW", choices=["AdamW", "Adam", "SGD"])
    parser.add_argument("--foreach", action="store_true", help="an optimizer without that loop, as in torch 2")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--lora", nargs="*", default=[], help="freeze the weights; LoRA adapters at these modules")
    parser.add_argument("--attention", default="eager", choices=["eager", "sdpa"])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--padded", action="store_true", help="the batches come with an attention mask")
    parser.add_argument("--next_tokens", action="store_true", help="no copy of the logits: the data has next tokens")
    parser.add_argument("--free_outputs", action="store_true",
                        help="free logits, keys and values before the backward pass, as Trainer and Lightning do")
    parser.add_argument("--no_gradients", action="store_true", help="zero_grad(set_to_none=True)")
    return parser.parse_args()


class LoraLayer(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, rank, bias=False, device="cuda")
        self.up = nn.Linear(rank, base.out_features, bias=False, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4.0 * self.up(self.down(self.dropout(x)))


def build_model(options: argparse.Namespace) -> Any:
    kind = getattr(transformers, options.model)
    config = kind.config_class(**{name: json.loads(value) for name, _, value in
                                  (each.partition("=") for each in options.config)})
    with torch.device("cuda"):  # a checkpoint of 7B parameters would not fit in the RAM of most machines
        model = kind._from_config(config, dtype=getattr(torch, options.weights), attn_implementation=options.attention)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    if options.lora:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name in [name for name, _ in module.named_children() if name in options.lora]:
                setattr(module, name, LoraLayer(getattr(module, name)))
    return model.train()


def batch_of(options: argparse.Namespace, model: Any) -> dict[str, Tensor]:
    def integers(*shape: int, below: int = 100) -> Tensor:
        return torch.randint(0, below, shape).cuda()

    inputs = {"input_ids": integers(options.batch, options.tokens)}
    if options.padded:
        inputs["attention_mask"] = torch.ones(options.batch, options.tokens, dtype=torch.long).cuda()
    if options.targets:
        inputs["labels"] = integers(options.batch, options.targets)
    elif "TokenClassification" in options.model:
        inputs["labels"] = integers(options.batch, options.tokens, below=model.config.num_labels)
    elif "SequenceClassification" in options.model:
        inputs["labels"] = integers(options.batch, below=model.config.num_labels)
    return inputs


def next_token_loss(logits: Tensor, ids: Tensor, next_tokens: bool) -> Tensor:
    if not next_tokens:  # as transformers did until 4.46
        logits, ids = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))


def main() -> None:
    options = arguments()
    model = build_model(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, options.optimizer)(trained, lr=1e-5, foreach=options.foreach)
    scaler = torch.amp.GradScaler("cuda", enabled=options.autocast == "float16")
    autocast = torch.autocast("cuda", HALF[options.autocast]) if options.autocast else nullcontext()
    for _ in range(options.steps):
        for _ in range(options.accumulate):
            inputs = batch_of(options, model)
            with autocast:
                outputs = model(**inputs)
                loss = outputs.loss if "labels" in inputs else next_token_loss(
                    outputs.logits, inputs["input_ids"], options.next_tokens)
            if options.free_outputs:
                del outputs
            scaler.scale(loss).backward()
        if options.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained, options.clip, foreach=options.foreach)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=options.no_gradients)


if __name__ == "__main__":
    main()
