"""Direct preference optimization by hand: policy and frozen reference in bfloat16, chosen and rejected in one batch."""
import copy
import random

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

PAD = 0
rnd = random.Random(5)


def make_batch(pairs, longest):
    rows, prompt_lengths = [], []
    for _ in range(pairs):
        prompt = [rnd.randrange(1, 32000) for _ in range(rnd.randrange(50, 150))]
        for _ in ("chosen", "rejected"):
            rows.append(prompt + [rnd.randrange(1, 32000) for _ in range(rnd.randrange(100, longest - 150))])
            prompt_lengths.append(len(prompt))
    ids = torch.full((len(rows), longest), PAD)
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, prompt_lengths[i] : len(row)] = torch.tensor(row[prompt_lengths[i] :])
    order = list(range(0, len(rows), 2)) + list(range(1, len(rows), 2))
    return ids[order], (ids[order] != PAD).long(), labels[order]


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * loss_mask).sum(-1)


def dpo_loss(policy, reference, beta=0.1):
    chosen, rejected = policy.chunk(2)
    ref_chosen, ref_rejected = reference.chunk(2)
    ratio = (chosen - rejected) - (ref_chosen - ref_rejected)
    rewards = beta * (chosen - ref_chosen).detach(), beta * (rejected - ref_rejected).detach()
    return -F.logsigmoid(beta * ratio).mean(), rewards


policy = Qwen2ForCausalLM(Qwen2Config(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
                                      num_attention_heads=12, num_key_value_heads=4, use_cache=False,
                                      tie_word_embeddings=True)).to("cuda", torch.bfloat16)
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-7)
policy.train()
for step in range(5):
    ids, mask, labels = (t.cuda() for t in make_batch(pairs=3, longest=448))
    with torch.no_grad():
        ref_logps = get_batch_logps(reference(ids, attention_mask=mask).logits.to(torch.float32), labels)
    logits = policy(ids, attention_mask=mask).logits.to(torch.float32)
    loss, (good, bad) = dpo_loss(get_batch_logps(logits, labels), ref_logps)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f} accuracy {(good > bad).float().mean().item():.2f}")
