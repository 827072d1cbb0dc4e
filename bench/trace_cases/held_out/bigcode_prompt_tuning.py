"""Prompt tuning with PEFT on GPT-BigCode: only virtual tokens are trained, so activations are nearly everything."""
import torch
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

torch.manual_seed(0)
device = "cuda"
base = GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=49152, n_positions=1024, n_embd=768, n_layer=8, n_head=12,
                                              multi_query=True))
model = get_peft_model(base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=20,
                                                token_dim=768, num_layers=8, num_attention_heads=12))
model.print_trainable_parameters()
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

model.train()
total_loss = 0
for step in range(6):
    ids = torch.randint(0, 49152, (8, 396))
    lengths = torch.arange(200, 200 + 8 * 28, 28)[:, None]
    mask = (torch.arange(396)[None] < lengths).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}
    batch = {k: v.to(device) for k, v in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        outputs = model(**batch)
        loss = outputs.loss
    total_loss += loss.detach().float()
    loss.backward()
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
    print(f"{step=}: {total_loss / (step + 1)}")
