"""Fine-tunes a model in 4 or 8 bits with LoRA adapters: QLoRA, with bitsandbytes and PEFT."""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

parser = argparse.ArgumentParser()
parser.add_argument("--make", action="store_true", help="only write the pretrained model")
parser.add_argument("--arch", default="llama")
parser.add_argument("--bits", type=int, default=4)
parser.add_argument("--quant_type", default="nf4")
parser.add_argument("--double", action="store_true", help="quantize the scales, too")
parser.add_argument("--compute", default="bfloat16")
parser.add_argument("--stored", default="bfloat16", help="precision of the pretrained model")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--optimizer", default="PagedAdamW8bit")
parser.add_argument("--targets", default="q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj")
parser.add_argument("--no_checkpointing", action="store_true")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=6)
args = parser.parse_args()

FOLDER = "pretrained"
if args.make:
    config = AutoConfig.for_model(args.arch, hidden_size=2048, intermediate_size=5632, num_hidden_layers=8,
                                  num_attention_heads=16, num_key_value_heads=8, vocab_size=32000)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.stored)).save_pretrained(FOLDER)
    sys.exit()
if not Path(FOLDER).is_dir():
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--make"], check=True)

compute = getattr(torch, args.compute)
quantized = BitsAndBytesConfig(load_in_8bit=True) if args.bits == 8 else BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type=args.quant_type, bnb_4bit_use_double_quant=args.double,
    bnb_4bit_compute_dtype=compute)
model = AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config=quantized, device_map={"": 0},
                                             dtype=getattr(torch, args.stored))
model.config.use_cache = False
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=not args.no_checkpointing,
                                        gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
                                         target_modules=args.targets.split(",")))
model.train()
import bitsandbytes  # noqa: E402

optimizer = getattr(bitsandbytes.optim, args.optimizer)([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for step in range(args.steps):
    for _ in range(args.accumulate):
        ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
        with torch.autocast("cuda", compute) if args.autocast else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
