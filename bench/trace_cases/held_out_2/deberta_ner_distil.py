"""Distil a DeBERTa-v2 NER teacher into a small student (token classification)."""
import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import DebertaV2Config, DebertaV2ForTokenClassification

LABELS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]


def config(hidden, layers, heads, vocab):
    return DebertaV2Config(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, max_position_embeddings=512, type_vocab_size=0, relative_attention=True,
        position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type="p2c|c2p",
        position_biased_input=False, pad_token_id=0, num_labels=len(LABELS),
        id2label=dict(enumerate(LABELS)), label2id={l: i for i, l in enumerate(LABELS)},
    )


class NerDataset(torch.utils.data.Dataset):
    def __init__(self, n, max_len, vocab, seed=0):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            length = rng.randint(max_len // 3, max_len)
            ids = [1] + [rng.randrange(3, vocab) for _ in range(length - 2)] + [2]
            # only the first piece of a word has a label
            tags = [-100] + [rng.randrange(len(LABELS)) if rng.random() < 0.7 else -100 for _ in ids[2:]] + [-100]
            self.rows.append((ids, tags))
        self.max_len = max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, tags = self.rows[i]
        pad = self.max_len - len(ids)
        return {"input_ids": torch.tensor(ids + [0] * pad),
                "attention_mask": torch.tensor([1] * len(ids) + [0] * pad),
                "labels": torch.tensor(tags + [-100] * pad)}


class Distiller(nn.Module):
    def __init__(self, student, teacher, temperature, alpha, hidden_weight):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.temperature, self.alpha, self.hidden_weight = temperature, alpha, hidden_weight
        self.kl = nn.KLDivLoss(reduction="none")
        self.project = nn.Linear(student.config.hidden_size, teacher.config.hidden_size)

    def forward(self, input_ids, attention_mask, labels):
        with torch.no_grad():
            t = self.teacher(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        s = self.student(input_ids=input_ids, attention_mask=attention_mask, labels=labels, output_hidden_states=True)
        T = self.temperature
        kl = self.kl(F.log_softmax(s.logits / T, dim=-1), F.softmax(t.logits / T, dim=-1)).sum(-1)
        mask = attention_mask.float()
        soft = (kl * mask).sum() / mask.sum() * T ** 2
        diff = (self.project(s.hidden_states[-1]) - t.hidden_states[-1]).pow(2).mean(-1)
        hidden = (diff * mask).sum() / mask.sum()
        loss = self.alpha * soft + (1 - self.alpha) * s.loss + self.hidden_weight * hidden
        return loss, s.loss.detach(), soft.detach(), s.logits


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch_size", type=int, default=24)
    ap.add_argument("--max_len", type=int, default=256)
    ap.add_argument("--vocab", type=int, default=50000)
    ap.add_argument("--student_layers", type=int, default=6)
    ap.add_argument("--teacher_layers", type=int, default=12)
    ap.add_argument("--temperature", type=float, default=2.0)
    ap.add_argument("--lr", type=float, default=5e-5)
    ap.add_argument("--steps", type=int, default=6)
    args = ap.parse_args()

    torch.manual_seed(11)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = DebertaV2ForTokenClassification(config(768, args.teacher_layers, 12, args.vocab)).to(device).eval()
    teacher.requires_grad_(False)
    student = DebertaV2ForTokenClassification(config(384, args.student_layers, 6, args.vocab)).to(device)
    model = Distiller(student, teacher, args.temperature, alpha=0.7, hidden_weight=0.1).to(device)
    model.student.train()
    print(f"device {device}: teacher {teacher.num_parameters() / 1e6:.1f}M, student {student.num_parameters() / 1e6:.1f}M")

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=args.steps)
    loader = torch.utils.data.DataLoader(NerDataset(args.batch_size * args.steps, args.max_len, args.vocab),
                                         batch_size=args.batch_size, shuffle=True, num_workers=2)
    for step, batch in enumerate(loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss, hard, soft, logits = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            valid = batch["labels"] != -100
            acc = (logits.argmax(-1).eq(batch["labels"]) & valid).sum() / valid.sum()
        print(f"step {step}: loss {loss.item():.4f} ce {hard.item():.4f} kl {soft.item():.4f} acc {acc.item():.3f}")

    model.eval()
    preds, refs = [], []
    with torch.no_grad():
        for batch in torch.utils.data.DataLoader(NerDataset(48, args.max_len, args.vocab, seed=1), batch_size=16):
            out = model.student(batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device))
            preds.append(out.logits.argmax(-1).cpu())
            refs.append(batch["labels"])
    preds, refs = torch.cat(preds), torch.cat(refs)
    print(f"eval accuracy {(preds == refs)[refs != -100].float().mean().item():.4f}")


if __name__ == "__main__":
    main()
