"""Fine-tune a Qwen3 model on a chat format with new special tokens.

The new tokens need trained rows in the embedding and in the output head, so both go to LoRA's modules_to_save.
"""
import argparse
import random

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, set_seed

NEW_TOKENS = ["<|tool|>", "<|/tool|>", "<|result|>", "<|/result|>", "<|plan|>", "<|/plan|>"]


class ToolChats(Dataset):
    """Random chats: a prompt (not learned), a tool call and an answer."""

    def __init__(self, size, max_length, base_vocab, first_new_id):
        self.rows = []
        rng = random.Random(0)
        for _ in range(size):
            prompt = [rng.randrange(base_vocab) for _ in range(rng.randrange(40, max_length // 2))]
            call = [rng.randrange(base_vocab) for _ in range(rng.randrange(20, 60))]
            answer = [rng.randrange(base_vocab) for _ in range(max_length)]
            body = [first_new_id, *call, first_new_id + 1, first_new_id + 2, *call[:10], first_new_id + 3, *answer]
            ids = (prompt + body)[:max_length]
            labels = ([-100] * len(prompt) + body)[:max_length]
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Collator:
    def __init__(self, pad_id, max_length):
        self.pad_id, self.max_length = pad_id, max_length

    def __call__(self, rows):
        batch = {"input_ids": [], "labels": [], "attention_mask": []}
        for row in rows:
            fill = self.max_length - len(row["input_ids"])
            batch["input_ids"].append(row["input_ids"] + [self.pad_id] * fill)
            batch["labels"].append(row["labels"] + [-100] * fill)
            batch["attention_mask"].append([1] * len(row["input_ids"]) + [0] * fill)
        return {key: torch.tensor(value) for key, value in batch.items()}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=151936)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--max_steps", type=int, default=5)
    parser.add_argument("--lora_r", type=int, default=32)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--resize_on_gpu", action="store_true", help="move the model to the GPU before the resize")
    parser.add_argument("--output_dir", default="/tmp/qwen3_tools")
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(1)
    config = Qwen3Config(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=4096, tie_word_embeddings=False, pad_token_id=0,
    )
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    if args.resize_on_gpu:
        model.to("cuda")

    old_size = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(old_size + len(NEW_TOKENS), pad_to_multiple_of=64)
    print(f"vocabulary: {old_size} -> {model.get_input_embeddings().num_embeddings}")

    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=args.lora_r, lora_alpha=2 * args.lora_r, lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    if args.gradient_checkpointing:
        model.enable_input_require_grads()

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        max_grad_norm=1.0,
        bf16=True,
        optim="adamw_torch_fused",
        gradient_checkpointing=args.gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=ToolChats(args.max_steps * args.batch_size * 2, args.max_length, old_size, old_size),
        data_collator=Collator(pad_id=0, max_length=args.max_length),
    )
    result = trainer.train()
    print("train loss", result.training_loss)
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
