"""Trains a transformers model of any architecture on random tokens: one script for many cases.

    python language_model.py --arch llama --precision bf16-autocast --optimizer adamw-fused
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

GATED = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
             num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048)
PLAIN = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=12, vocab_size=32000,
             max_position_embeddings=2048)
EXPERTS = {**GATED, "intermediate_size": 768, "num_experts_per_tok": 4}  # intermediate_size: of one expert
CAUSAL = {
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 384, "num_experts": 32, "head_dim": 128, "vocab_size": 65536},
    "mixtral": {**EXPERTS, "intermediate_size": 1536, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {**EXPERTS, "num_experts": 16, "pad_token_id": 0},
    "deepseek_v3": {**EXPERTS, "intermediate_size": 2048, "moe_intermediate_size": 512, "n_routed_experts": 16,
                    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                    "num_key_value_heads": 12, "q_lora_rank": 384, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
                    "qk_nope_head_dim": 64, "v_head_dim": 64},
    "gpt_oss": {**EXPERTS, "num_local_experts": 16, "head_dim": 64, "sliding_window": 128},
    "granitemoe": {**EXPERTS, "num_local_experts": 16},
    "llama": GATED,
    "mistral": {**GATED, "sliding_window": 512},
    "qwen2": GATED,
    "qwen3": {**GATED, "head_dim": 128, "vocab_size": 65536},
    "gemma2": {**GATED, "head_dim": 64, "sliding_window": 256},
    "gemma3_text": {**GATED, "head_dim": 128, "sliding_window": 256, "vocab_size": 65536},
    "olmo2": GATED,
    "phi3": {**GATED, "pad_token_id": 0},
    "granite": GATED,
    "stablelm": GATED,
    "smollm3": {**GATED, "pad_token_id": 0},
    "gpt2": dict(n_embd=768, n_layer=6, n_head=12, n_positions=2048, vocab_size=50257),
    "gpt_neox": PLAIN,
    "phi": PLAIN,
    "opt": dict(hidden_size=768, word_embed_proj_dim=768, ffn_dim=3072, num_hidden_layers=6, num_attention_heads=12,
                vocab_size=50272, max_position_embeddings=2048),
    "bloom": dict(hidden_size=768, n_layer=6, n_head=12, vocab_size=32000),
    "gptj": dict(n_embd=768, n_layer=6, n_head=12, n_positions=2048, rotary_dim=32, vocab_size=50400),
}
MASKED = {"bert": PLAIN, "roberta": PLAIN, "distilbert": dict(dim=768, hidden_dim=3072, n_layers=6, n_heads=12,
                                                                vocab_size=30522, max_position_embeddings=2048),
          "modernbert": {**{k: v for k, v in PLAIN.items()}, "intermediate_size": 1152, "pad_token_id": 0,
                         "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
          "electra": PLAIN, "deberta-v2": {**PLAIN, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}}
SEQ2SEQ = {"t5": dict(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128,
                      decoder_start_token_id=0),
           "bart": dict(d_model=768, encoder_layers=4, decoder_layers=4, encoder_attention_heads=12,
                        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=50265)}
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}                       # the whole model is cast
AUTOCAST = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}    # weights stay in float32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="llama")
    parser.add_argument("--config", action="append", default=[], help="NAME=VALUE of the model's config")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="bf16-autocast", choices=["fp32", *WEIGHTS, *AUTOCAST])
    parser.add_argument("--optimizer", default="adamw", help="adamw, adamw-fused, adam, sgd, bnb.AdamW8bit …")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--checkpoint", default="", choices=["", "reentrant", "non-reentrant"])
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--padded", action="store_true", help="batches with an attention mask")
    parser.add_argument("--item", action="store_true", help="print the loss of every step")
    parser.add_argument("--evaluate", action="store_true", help="before the first step, and after the third")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--zero", action="store_true", help="zero_grad(set_to_none=False)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def build_model(options: argparse.Namespace) -> Any:
    for kind, auto in ((CAUSAL, transformers.AutoModelForCausalLM), (MASKED, transformers.AutoModelForMaskedLM),
                       (SEQ2SEQ, transformers.AutoModelForSeq2SeqLM)):
        if options.arch in kind:
            changed = {name: number(value) for name, _, value in (each.partition("=") for each in options.config)}
            config = transformers.AutoConfig.for_model(options.arch, **{**kind[options.arch], **changed})
            if options.arch in CAUSAL:
                config.use_cache = False
            model = auto.from_config(config, attn_implementation=options.attention)
            return model.to(WEIGHTS.get(options.precision, torch.float32))
    raise SystemExit(f"unknown architecture {options.arch}")


def number(text: str) -> Any:
    return float(text) if "." in text else int(text) if text.lstrip("-").isdigit() else text


def build_optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=3e-4)
    if name == "adamw-fused":
        return torch.optim.AdamW(groups, lr=3e-4, fused=True)
    if name == "adamw-loop":
        return torch.optim.AdamW(groups, lr=3e-4, foreach=False)
    if name == "adamw-amsgrad":
        return torch.optim.AdamW(groups, lr=3e-4, amsgrad=True)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=3e-4)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "sgd-plain":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=1e-3)
    if name == "adafactor-transformers":
        from transformers.optimization import Adafactor

        return Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    if name == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=1e-4)
    if name.startswith("bnb."):
        import bitsandbytes

        return getattr(bitsandbytes.optim, name[4:])(groups, lr=1e-4)  # type: ignore[no-any-return]
    raise SystemExit(f"unknown optimizer {name}")


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    model = build_model(options).to(options.device)
    model.train()
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": options.checkpoint == "reentrant"})
    optimizer = build_optimizer(model, options.optimizer)
    scaler = torch.amp.GradScaler(options.device, enabled=options.precision == "fp16-autocast")
    autocast = (torch.autocast(options.device, AUTOCAST[options.precision]) if options.precision in AUTOCAST
                else nullcontext())
    run = torch.compile(model) if options.compile else model

    rows = options.batch * options.accumulate * options.steps
    ids = torch.randint(3, 30000, (rows, options.seq))
    mask = torch.ones_like(ids)
    if options.padded:
        lengths = torch.randint(options.seq // 2, options.seq, (rows,))
        mask = (torch.arange(options.seq)[None, :] < lengths[:, None]).long()
    loader = DataLoader(TensorDataset(ids, mask), batch_size=options.batch, num_workers=options.workers,
                        pin_memory=options.pin)

    def loss_of(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "labels": ids}
        if options.padded:
            inputs |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        with autocast:
            return run(**inputs).loss / options.accumulate

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        losses = [loss_of(ids[:options.batch].to(options.device), mask[:options.batch].to(options.device))
                  for _ in range(2)]
        print(f"validation loss {torch.stack(losses).mean().item():.3f}")
        model.train()

    if options.evaluate:
        evaluate()
    batches = iter(loader)
    for step in range(options.steps):
        for _ in range(options.accumulate):
            ids_here, mask_here = (each.to(options.device, non_blocking=options.pin) for each in next(batches))
            loss = loss_of(ids_here, mask_here)
            scaler.scale(loss).backward()
        if options.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not options.zero)
        if options.item:
            print(f"step {step}: loss {loss.item():.3f}")
        if options.evaluate and step == 2:
            evaluate()


if __name__ == "__main__":
    main()
