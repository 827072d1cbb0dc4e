"""Sentence embeddings with MPNet: mean pooling, in-batch negatives, float16 autocast with GradScaler."""
import torch
import torch.nn.functional as F
from transformers import MPNetConfig, MPNetModel, get_cosine_schedule_with_warmup


class SentenceEncoder(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.encoder = MPNetModel(config, add_pooling_layer=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).expand(hidden.size()).float()
        pooled = torch.sum(hidden * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
        return F.normalize(pooled, p=2, dim=1)


def batches(n, size=48, seq=128):
    g = torch.Generator().manual_seed(11)
    for _ in range(n):
        pair = []
        for _ in range(2):
            lengths = torch.randint(seq // 4, seq, (size,), generator=g)
            mask = (torch.arange(seq)[None] < lengths[:, None]).long()
            ids = torch.randint(5, 30000, (size, seq), generator=g) * mask + (1 - mask)
            pair.append({"input_ids": ids, "attention_mask": mask})
        yield pair


def main():
    model = SentenceEncoder(MPNetConfig(num_hidden_layers=8)).to("cuda")
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(x in n for x in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(x in n for x in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-5)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 6)
    scale = 20.0
    scaler = torch.amp.GradScaler()
    for step, (anchors, positives) in enumerate(batches(6)):
        with torch.autocast(device_type="cuda"):
            a = model(**{k: v.cuda() for k, v in anchors.items()})
            b = model(**{k: v.cuda() for k, v in positives.items()})
            scores = torch.mm(a, b.transpose(0, 1)) * scale
            labels = torch.arange(len(scores), device=scores.device)
            loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        correct = (scores.argmax(1) == labels).float().mean().item()
        print(f"{step}: loss {loss.item():.3f} accuracy {correct:.2f}")


main()
