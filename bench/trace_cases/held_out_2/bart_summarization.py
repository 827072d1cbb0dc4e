"""BART summarization with Seq2SeqTrainer; evaluation generates with beam search and computes ROUGE-1 on token ids."""
import argparse
from collections import Counter

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

PAD, BOS, EOS = 1, 0, 2


class Articles(Dataset):
    def __init__(self, size, max_source, max_target, vocab_size, seed):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(size):
            source = rng.integers(5, vocab_size, rng.integers(max_source // 2, max_source + 200))[: max_source - 2]
            target = rng.choice(source, size=int(rng.integers(max_target // 3, max_target - 2)))
            self.rows.append({
                "input_ids": [BOS, *source.tolist(), EOS],
                "labels": [BOS, *target.tolist(), EOS],
            })

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Seq2SeqCollator:
    """Pads to the longest of the batch, to a multiple of 8."""

    def __init__(self, model):
        self.model = model

    @staticmethod
    def pad(rows, value):
        longest = -(-max(len(row) for row in rows) // 8) * 8
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    def __call__(self, features):
        input_ids = self.pad([f["input_ids"] for f in features], PAD)
        labels = self.pad([f["labels"] for f in features], -100)
        return {
            "input_ids": input_ids,
            "attention_mask": (input_ids != PAD).long(),
            "labels": labels,
            "decoder_input_ids": self.model.prepare_decoder_input_ids_from_labels(labels=labels),
        }


def compute_metrics(prediction):
    scores, lengths = [], []
    labels = np.where(prediction.label_ids < 0, PAD, prediction.label_ids)
    guesses = np.where(prediction.predictions < 0, PAD, prediction.predictions)
    for guess, label in zip(guesses, labels):
        a = Counter(t for t in guess.tolist() if t > 4)
        b = Counter(t for t in label.tolist() if t > 4)
        common = sum((a & b).values())
        scores.append(2 * common / max(1, sum(a.values()) + sum(b.values())))
        lengths.append(sum(a.values()))
    return {"rouge1": float(np.mean(scores)), "gen_len": float(np.mean(lengths))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--d_model", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab_size", type=int, default=50265)
    parser.add_argument("--max_source", type=int, default=512)
    parser.add_argument("--max_target", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=6)
    args = parser.parse_args()

    set_seed(3)
    config = BartConfig(
        vocab_size=args.vocab_size, d_model=args.d_model, encoder_layers=args.layers, decoder_layers=args.layers,
        encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=4 * args.d_model,
        decoder_ffn_dim=4 * args.d_model, max_position_embeddings=1024,
    )
    model = BartForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=EOS,
        num_beams=args.num_beams, max_length=64, min_length=8, length_penalty=2.0, no_repeat_ngram_size=3,
        early_stopping=True,
    )
    print(f"{model.num_parameters() / 1e6:.1f}M parameters")

    training_args = Seq2SeqTrainingArguments(
        output_dir="/tmp/bart_summarization",
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=3e-5,
        warmup_steps=1,
        weight_decay=0.01,
        label_smoothing_factor=0.1,
        fp16=True,
        predict_with_generate=True,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=Articles(80, args.max_source, args.max_target, args.vocab_size, seed=0),
        eval_dataset=Articles(20, args.max_source, args.max_target, args.vocab_size, seed=1),
        data_collator=Seq2SeqCollator(model),
        compute_metrics=compute_metrics,
    )
    trainer.train()


if __name__ == "__main__":
    main()
