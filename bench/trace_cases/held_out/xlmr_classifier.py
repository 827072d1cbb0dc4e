"""Fine-tunes XLM-R for classification: batches padded to their longest text, evaluation in between, numpy metrics."""
import random

import numpy as np
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification, get_linear_schedule_with_warmup

rng = random.Random(42)
config = XLMRobertaConfig(vocab_size=64000, hidden_size=768, num_hidden_layers=8, num_attention_heads=12,
                          intermediate_size=3072, max_position_embeddings=514, num_labels=5, pad_token_id=1)
model = XLMRobertaForSequenceClassification(config)

texts = [[rng.randrange(5, 64000) for _ in range(rng.randrange(60, 380))] for _ in range(24 * 6 + 48)]
labels = [rng.randrange(5) for _ in texts]


def collate(rows):
    longest = max(len(ids) for ids, _ in rows)
    return {"input_ids": torch.tensor([ids + [1] * (longest - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([label for _, label in rows])}


train = DataLoader(list(zip(texts, labels, strict=False))[:-48], batch_size=24, collate_fn=collate)
val = DataLoader(list(zip(texts, labels, strict=False))[-48:], batch_size=48, collate_fn=collate)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model.to(device)
optimizer = AdamW(model.parameters(), lr=2e-5, eps=1e-8)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=len(train))


def accuracy():
    model.eval()
    predictions, truth = [], []
    for batch in val:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            outputs = model(**batch)
        predictions.append(outputs.logits.detach().cpu().numpy())
        truth.append(batch["labels"].to("cpu").numpy())
    model.train()
    return float(np.mean(np.concatenate(predictions).argmax(1) == np.concatenate(truth)))


model.train()
for step, batch in enumerate(train):
    b_ids = batch["input_ids"].to(device)
    b_mask = batch["attention_mask"].to(device)
    b_labels = batch["labels"].to(device)
    model.zero_grad()
    output = model(b_ids, attention_mask=b_mask, labels=b_labels)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print(f"batch {step} of {len(train)}: {tuple(b_ids.shape)} loss {output.loss.item():.3f}")
    if step % 3 == 2:
        print("accuracy", accuracy())
