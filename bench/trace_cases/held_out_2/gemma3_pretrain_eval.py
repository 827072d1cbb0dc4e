"""Pretrain a small Gemma 3 text model from scratch with the Trainer, evaluating every few steps."""
import argparse
import math

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Trainer, TrainingArguments, set_seed


class PackedTokens(Dataset):
    """Fixed-length blocks out of one long stream of tokens."""

    def __init__(self, blocks, block_size, vocab_size, seed):
        rng = np.random.default_rng(seed)
        # a Zipf-like stream, as text would have
        stream = rng.zipf(1.2, size=blocks * block_size).astype(np.int64)
        self.tokens = np.clip(stream, 3, vocab_size - 1).reshape(blocks, block_size)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        ids = torch.from_numpy(self.tokens[index])
        return {"input_ids": ids, "labels": ids.clone()}


def preprocess_logits_for_metrics(logits, labels):
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(prediction):
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels).mean())}


def build_model(args):
    config = Gemma3TextConfig(
        vocab_size=args.vocab_size,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=args.block_size,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        use_cache=False,
    )
    model = Gemma3ForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.1f}M parameters, layers: {config.layer_types}")
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab_size", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--eval_batch_size", type=int, default=6)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--output_dir", default="/tmp/gemma3_pretrain")
    args = parser.parse_args()

    set_seed(7)
    model = build_model(args)
    train_data = PackedTokens(64, args.block_size, args.vocab_size, seed=0)
    eval_data = PackedTokens(14, args.block_size, args.vocab_size, seed=1)  # the last batch is smaller

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.eval_batch_size,
        learning_rate=6e-4,
        weight_decay=0.1,
        adam_beta2=0.95,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        bf16=True,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        dataloader_num_workers=2,
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_data,
        eval_dataset=eval_data,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    print(f"eval loss {metrics['eval_loss']:.3f}, perplexity {math.exp(min(metrics['eval_loss'], 20)):.1f}, "
          f"accuracy {metrics['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
