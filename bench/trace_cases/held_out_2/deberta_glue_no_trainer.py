"""DeBERTa-v3-base on a GLUE-like pair task with accelerate and an own loop (after run_glue_no_trainer.py)."""
import argparse
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, get_scheduler

CLS, SEP, PAD = 1, 2, 0


class Pairs(Dataset):
    def __init__(self, size, max_length, vocab_size, num_labels, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(size):
            a = [rng.randrange(10, vocab_size) for _ in range(rng.randrange(10, max_length // 2))]
            b = [rng.randrange(10, vocab_size) for _ in range(rng.randrange(10, max_length // 2))]
            self.rows.append((([CLS, *a, SEP, *b, SEP])[:max_length], rng.randrange(num_labels)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows, multiple=8):
    longest = max(len(ids) for ids, _ in rows)
    longest = (longest + multiple - 1) // multiple * multiple
    return {
        "input_ids": torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([label for _, label in rows]),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab_size", type=int, default=128100)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--train_size", type=int, default=96)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--mixed_precision", default="bf16")
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    config = DebertaV2Config(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64, intermediate_size=4 * args.hidden_size, max_position_embeddings=512,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0, num_labels=3,
    )
    model = DebertaV2ForSequenceClassification(config)

    train_data = Pairs(args.train_size, args.max_length, args.vocab_size, 3, args.seed)
    eval_data = Pairs(40, args.max_length, args.vocab_size, 3, args.seed + 1)
    train_loader = DataLoader(train_data, shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size)
    eval_loader = DataLoader(eval_data, collate_fn=collate, batch_size=args.per_device_train_batch_size)

    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    steps = args.num_train_epochs * len(train_loader) // args.gradient_accumulation_steps
    scheduler = accelerator.prepare(get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=steps))
    accelerator.print(f"{steps} optimizer steps, {len(train_data)} examples, {accelerator.mixed_precision}")

    completed = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0.0
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1

        model.eval()
        right = seen = 0
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
            right += (predictions == references).sum().item()
            seen += references.numel()
        accelerator.print(f"epoch {epoch}: {completed} steps, loss {total_loss.item() / len(train_loader):.4f}, "
                          f"accuracy {right}/{seen}")

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
