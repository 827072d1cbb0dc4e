"""Fine-tunes a small model with the Trainer of transformers."""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--arch", default="gpt2", choices=["gpt2", "llama"])
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16", "fp32"])
parser.add_argument("--optim", default="adamw_torch_fused")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()


class RandomTokens(Dataset):
    def __init__(self, rows: int) -> None:
        self.ids = torch.randint(0, 30000, (rows, args.seq), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index],
                "attention_mask": torch.ones_like(self.ids[index])}


torch.manual_seed(0)
if args.arch == "gpt2":
    model = GPT2LMHeadModel(GPT2Config(n_layer=6))
else:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=6,
                                         num_attention_heads=12, num_key_value_heads=4))
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate,
        max_steps=args.steps, bf16=args.precision == "bf16", fp16=args.precision == "fp16", optim=args.optim,
        gradient_checkpointing=args.checkpointing, eval_strategy="steps" if args.evaluate else "no", eval_steps=3,
        per_device_eval_batch_size=args.batch, logging_steps=1, save_strategy="no", report_to=[],
        dataloader_num_workers=args.workers, use_cpu=args.cpu, prediction_loss_only=True)
    trainer = Trainer(model=model, args=settings, train_dataset=RandomTokens(args.batch * args.accumulate * args.steps),
                      eval_dataset=RandomTokens(2 * args.batch))
    trainer.train()
