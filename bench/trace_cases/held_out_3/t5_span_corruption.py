"""Pretrain a T5 v1.1 with span corruption (random token ids instead of C4), with accelerate.

Gradient accumulation uses accelerator.no_sync by hand, so the script also runs on several GPUs. Adafactor of torch.
"""
import argparse
from contextlib import nullcontext

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration

PAD, EOS, VOCAB, SENTINELS = 0, 1, 32128, 100


def corrupt(tokens, rng, noise_density=0.15, mean_span=3.0):
    """Splits tokens into inputs with sentinels and targets, as t5.data.preprocessors.random_spans does."""
    length = len(tokens)
    noise_tokens = max(1, round(length * noise_density))
    spans = max(1, round(noise_tokens / mean_span))

    def segment(total, parts):
        cuts = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False))
        return np.diff(np.concatenate([[0], cuts, [total]]))

    noise, keep = segment(noise_tokens, spans), segment(length - noise_tokens, spans)
    inputs, targets, at = [], [], 0
    for i in range(spans):
        sentinel = VOCAB - 1 - i
        inputs += [*tokens[at : at + keep[i]], sentinel]
        at += keep[i]
        targets += [sentinel, *tokens[at : at + noise[i]]]
        at += noise[i]
    return np.array([*inputs, EOS]), np.array([*targets, EOS])


class SpanCorruption(Dataset):
    def __init__(self, size, length):
        self.size, self.length = size, length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        inputs, targets = corrupt(rng.integers(2, VOCAB - SENTINELS, self.length), rng)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(targets)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=568)
    parser.add_argument("--max_steps", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16", log_with=None)
    torch.manual_seed(accelerator.process_index)
    config = T5Config(vocab_size=VOCAB, d_model=768, d_kv=64, d_ff=2048, num_layers=8, num_decoder_layers=8,
                      num_heads=12, feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0,
                      decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=EOS)
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=args.learning_rate, beta2_decay=-0.8, d=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (max(step, 1)) ** -0.5)
    micro_batches = args.max_steps * args.gradient_accumulation_steps
    data = SpanCorruption(micro_batches * args.per_device_batch_size, args.length)
    loader = DataLoader(data, batch_size=args.per_device_batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")

    model.train()
    running = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(loader):
        last = (i + 1) % args.gradient_accumulation_steps == 0
        with nullcontext() if last else accelerator.no_sync(model):
            loss = model(**batch).loss
            running += loss.detach() / args.gradient_accumulation_steps
            accelerator.backward(loss / args.gradient_accumulation_steps)
        if not last:
            continue
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = accelerator.gather(running.unsqueeze(0)).mean().item()
        accelerator.print(f"step {(i + 1) // args.gradient_accumulation_steps}: loss {mean:.4f}, "
                          f"input {tuple(batch['input_ids'].shape)}, target {tuple(batch['labels'].shape)}")
        running.zero_()

    model.eval()
    prompt = next(iter(loader))["input_ids"][:4]
    with torch.no_grad(), accelerator.autocast():
        generated = accelerator.unwrap_model(model).generate(prompt, max_new_tokens=16, do_sample=False)
    accelerator.print("generated", tuple(generated.shape))
    accelerator.end_training()


if __name__ == "__main__":
    main()
