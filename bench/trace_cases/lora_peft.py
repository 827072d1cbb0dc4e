"""Fine-tunes a frozen model with LoRA adapters of PEFT."""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--arch", default="llama")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--lora_dropout", type=float, default=0.05)
parser.add_argument("--targets", default="q_proj,k_proj,v_proj,o_proj")
parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
parser.add_argument("--checkpointing", default="", choices=["", "reentrant", "non-reentrant"])
parser.add_argument("--device", default="cuda")
args = parser.parse_args()

torch.manual_seed(0)
config = AutoConfig.for_model(args.arch, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                              num_attention_heads=16, num_key_value_heads=8, vocab_size=32000, use_cache=False)
with torch.device(args.device):
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
if args.checkpointing:
    model.gradient_checkpointing_enable({"use_reentrant": args.checkpointing == "reentrant"})
    model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, lora_dropout=args.lora_dropout,
                                         target_modules=args.targets.split(","), task_type="CAUSAL_LM"))
model.print_trainable_parameters()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)

for step in range(args.steps):
    for _ in range(args.accumulate):
        ids = torch.randint(0, 32000, (args.batch, args.seq), device=args.device)
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
