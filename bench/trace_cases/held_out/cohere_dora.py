"""DoRA adapters of PEFT on a frozen Cohere model in bfloat16, gradient checkpointing, a paged batch of two lengths."""
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import CohereConfig, CohereForCausalLM


def print_trainable(model):
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable {trained:,} of {total:,} ({100 * trained / total:.2f} %)")


def main(batch_size=6, lengths=(512, 384, 640), steps=6):
    base = CohereForCausalLM(CohereConfig(vocab_size=64000, hidden_size=1024, intermediate_size=2816, logit_scale=0.25,
                                          num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
                                          max_position_embeddings=1024, pad_token_id=0, bos_token_id=5, eos_token_id=6))
    base = base.to(device="cuda", dtype=torch.bfloat16)
    base.config.use_cache = False
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, lora_dropout=0.05, use_dora=True,
                        bias="none", target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model = get_peft_model(base, config)
    print_trainable(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
    model.train()
    for step in range(steps):
        ids = torch.randint(7, 64000, (batch_size, lengths[step % len(lengths)])).to(model.device)
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(step, out.loss.item())


if __name__ == "__main__":
    main()
