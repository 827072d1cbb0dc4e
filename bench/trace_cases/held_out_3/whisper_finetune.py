"""Fine-tune a Whisper of about the size of "base" on random log-mel features, with an own loop.

SpecAugment is done by the model, the targets are padded with -100, bfloat16 autocast, AdamW with a warm-up. Afterwards
a validation batch is decoded greedily with the cache of encoder and decoder.
"""
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperConfig, WhisperForConditionalGeneration, get_linear_schedule_with_warmup

SOT, EOT, LANG, TRANSCRIBE, NO_TIMESTAMPS = 50258, 50257, 50259, 50359, 50363
BATCH_SIZE = 16
GRAD_ACCUM = 2
UPDATES = 3
MAX_TARGET = 160


class FakeSpeech(Dataset):
    """30 seconds of features per utterance, a transcript of 20 to 160 tokens."""

    def __init__(self, n: int, seed: int):
        self.n, self.seed = n, seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        rng = random.Random(self.seed * 10_000 + i)
        generator = torch.Generator().manual_seed(self.seed * 10_000 + i)
        words = rng.randint(20, MAX_TARGET - 5)
        tokens = [SOT, LANG, TRANSCRIBE, NO_TIMESTAMPS, *(rng.randrange(50000) for _ in range(words)), EOT]
        return {"input_features": torch.randn(80, 3000, generator=generator) * 0.5, "labels": tokens}


@dataclass
class DataCollatorSpeechSeq2SeqWithPadding:
    decoder_start_token_id: int

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = [torch.tensor(f["labels"]) for f in features]
        padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        if (padded[:, 0] == self.decoder_start_token_id).all():
            padded = padded[:, 1:]  # the model shifts the labels to the right and puts it there again
        return {"input_features": torch.stack([f["input_features"] for f in features]), "labels": padded}


def build_model() -> WhisperForConditionalGeneration:
    config = WhisperConfig(vocab_size=51865, num_mel_bins=80, d_model=512, encoder_layers=6, decoder_layers=6,
                           encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
                           decoder_ffn_dim=2048, decoder_start_token_id=SOT, bos_token_id=EOT, eos_token_id=EOT,
                           pad_token_id=EOT, dropout=0.1, activation_dropout=0.1, apply_spec_augment=True,
                           mask_time_prob=0.05, mask_feature_prob=0.05, attn_implementation="sdpa")
    return WhisperForConditionalGeneration(config)


@torch.no_grad()
def greedy_decode(model, features, max_new_tokens):
    encoder_outputs = model.model.encoder(features)
    tokens = torch.tensor([[SOT, LANG, TRANSCRIBE, NO_TIMESTAMPS]], device=features.device).repeat(len(features), 1)
    step_input, cache = tokens, None
    finished = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    for _ in range(max_new_tokens):
        out = model(encoder_outputs=encoder_outputs, decoder_input_ids=step_input, past_key_values=cache,
                    use_cache=True)
        cache = out.past_key_values
        best = out.logits[:, -1].argmax(dim=-1)
        best = torch.where(finished, EOT, best)
        finished |= best == EOT
        step_input = best.unsqueeze(1)
        tokens = torch.cat([tokens, step_input], dim=1)
    return tokens[:, 4:]


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    device = "cuda"
    model = build_model().to(device)
    model.config.use_cache = False
    model.model.encoder.embed_positions.requires_grad_(False)
    collate = DataCollatorSpeechSeq2SeqWithPadding(decoder_start_token_id=model.config.decoder_start_token_id)
    train = DataLoader(FakeSpeech(BATCH_SIZE * GRAD_ACCUM * UPDATES, seed=1), batch_size=BATCH_SIZE, shuffle=True,
                       collate_fn=collate, num_workers=2, pin_memory=True, drop_last=True)
    validation = DataLoader(FakeSpeech(BATCH_SIZE, seed=2), batch_size=BATCH_SIZE, collate_fn=collate)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, eps=1e-6)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=UPDATES)

    model.train()
    for i, batch in enumerate(train):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            loss = model(**batch).loss / GRAD_ACCUM
        loss.backward()
        print(f"micro step {i}: labels {tuple(batch['labels'].shape)}, loss {loss.item() * GRAD_ACCUM:.4f}")
        if (i + 1) % GRAD_ACCUM == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)

    model.eval()
    errors, reference_tokens = 0, 0
    for batch in validation:
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            guesses = greedy_decode(model, batch["input_features"].to(device), max_new_tokens=40)
        labels = batch["labels"][:, 3:43]
        known = labels != -100
        n = min(guesses.size(1), labels.size(1))
        errors += ((guesses[:, :n].cpu() != labels[:, :n]) & known[:, :n]).sum().item()
        reference_tokens += known[:, :n].sum().item()
    print(f"token error rate: {100 * errors / reference_tokens:.1f} %")


if __name__ == "__main__":
    main()
