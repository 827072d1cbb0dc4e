"""Continued masked-language-model pretraining of ModernBERT.

Dynamic masking on the GPU, layer-wise learning rate decay, NAdam, stochastic weight averaging from the second step on,
and a validation pass with the averaged weights.
"""
import random
from types import SimpleNamespace

import torch
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader
from transformers import ModernBertConfig, ModernBertForMaskedLM, set_seed

cfg = SimpleNamespace(
    batch_size=16,
    max_length=512,
    steps=5,
    swa_start=1,
    lr=1e-4,
    layer_decay=0.85,
    weight_decay=0.01,
    mlm_probability=0.3,
    val_batches=2,
    device="cuda",
)
VOCAB, CLS, SEP, MASK, PAD = 50368, 50281, 50282, 50284, 50283


class Corpus(torch.utils.data.IterableDataset):
    """Random documents; most of them are shorter than the context."""

    def __init__(self, documents, max_length, seed):
        self.documents, self.max_length, self.seed = documents, max_length, seed

    def __iter__(self):
        rng = random.Random(self.seed)
        for _ in range(self.documents):
            n = min(self.max_length, int(rng.lognormvariate(5.9, 0.5)))
            yield [CLS] + [rng.randrange(10, 50000) for _ in range(n - 2)] + [SEP]


def collate(rows):
    longest = max(len(row) for row in rows)
    longest += -longest % 8  # pad_to_multiple_of=8
    ids = torch.full((len(rows), longest), PAD)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@torch.no_grad()
def mask_tokens(ids, attention_mask, probability):
    """The usual 80 / 10 / 10 split."""
    special = (ids == CLS) | (ids == SEP) | (attention_mask == 0)
    chance = torch.full(ids.shape, probability, device=ids.device).masked_fill_(special, 0.0)
    masked = torch.bernoulli(chance).bool()
    labels = torch.where(masked, ids, -100)
    dice = torch.rand(ids.shape, device=ids.device)
    ids = torch.where(masked & (dice < 0.8), MASK, ids)
    noise = torch.randint(10, 50000, ids.shape, device=ids.device)
    return torch.where(masked & (dice >= 0.9), noise, ids), labels


def llrd_groups(model, lr, decay, weight_decay):
    """The head gets the full rate, every layer below it a smaller one, embeddings the smallest."""
    depth = model.config.num_hidden_layers
    groups = {}
    for name, p in model.named_parameters():
        if "embeddings" in name:
            level = depth + 1
        elif ".layers." in name:
            level = depth - int(name.split(".layers.")[1].split(".")[0])
        else:
            level = 0
        wd = 0.0 if p.ndim < 2 else weight_decay
        group = groups.setdefault((level, wd), {"params": [], "lr": lr * decay**level, "weight_decay": wd})
        group["params"].append(p)
    return list(groups.values())


def main():
    set_seed(17)
    config = ModernBertConfig(vocab_size=VOCAB, hidden_size=768, intermediate_size=1152, num_hidden_layers=12,
                              num_attention_heads=12, local_attention=128, global_attn_every_n_layers=3,
                              pad_token_id=PAD, bos_token_id=CLS, eos_token_id=SEP, cls_token_id=CLS,
                              sep_token_id=SEP, mlp_dropout=0.1, attn_implementation="sdpa")
    model = ModernBertForMaskedLM(config).to(cfg.device)
    averaged = AveragedModel(model)
    groups = llrd_groups(model, cfg.lr, cfg.layer_decay, cfg.weight_decay)
    optimizer = torch.optim.NAdam(groups, betas=(0.9, 0.98), decoupled_weight_decay=True)
    swa_scheduler = SWALR(optimizer, swa_lr=2e-5, anneal_epochs=3)
    print(f"{len(groups)} parameter groups, lr from {groups[0]['lr']:.2e} to {max(g['lr'] for g in groups):.2e}")

    loader = DataLoader(Corpus(cfg.batch_size * cfg.steps, cfg.max_length, seed=1), batch_size=cfg.batch_size,
                        collate_fn=collate, num_workers=1, pin_memory=True)
    model.train()
    for step, batch in enumerate(loader):
        batch = {k: v.to(cfg.device, non_blocking=True) for k, v in batch.items()}
        ids, labels = mask_tokens(batch["input_ids"], batch["attention_mask"], cfg.mlm_probability)
        with torch.autocast(device_type=cfg.device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= cfg.swa_start:
            averaged.update_parameters(model)
            swa_scheduler.step()
        print(f"step {step + 1}: shape {tuple(ids.shape)} loss {loss.item():.4f}")

    averaged.eval()
    val_loader = DataLoader(Corpus(cfg.batch_size * cfg.val_batches, cfg.max_length, seed=2),
                            batch_size=cfg.batch_size, collate_fn=collate)
    correct = total = 0
    with torch.inference_mode(), torch.autocast(device_type=cfg.device, dtype=torch.bfloat16):
        for batch in val_loader:
            batch = {k: v.to(cfg.device) for k, v in batch.items()}
            ids, labels = mask_tokens(batch["input_ids"], batch["attention_mask"], 0.15)
            logits = averaged(input_ids=ids, attention_mask=batch["attention_mask"]).logits
            where = labels != -100
            correct += (logits.argmax(dim=-1)[where] == labels[where]).sum().item()
            total += where.sum().item()
    print(f"masked accuracy of the averaged weights: {correct / total:.4f} ({total} tokens)")
    torch.save({k: v.half().cpu() for k, v in averaged.module.state_dict().items()}, "modernbert_swa.pt")


if __name__ == "__main__":
    main()
