"""OLMo with the Trainer: gradient checkpointing, label smoothing, examples of similar length together, saving."""
import random
import tempfile

import torch
from transformers import (
    OlmoConfig,
    OlmoForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(17)
random_lengths = random.Random(1)


class Instructions(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = []
        for _ in range(count):
            n = random_lengths.randint(200, 640)
            ids = [random_lengths.randint(2, 29999) for _ in range(n)]
            self.rows.append({"input_ids": ids, "labels": [-100] * (n // 4) + ids[n // 4:], "attention_mask": [1] * n})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Collator:
    """Right padding to a multiple of 64, without a tokenizer."""

    def __call__(self, rows):
        longest = -(-max(len(row["input_ids"]) for row in rows) // 64) * 64
        fill = {"input_ids": 1, "labels": -100, "attention_mask": 0}
        return {key: torch.tensor([row[key] + [fill[key]] * (longest - len(row[key])) for row in rows]) for key in fill}


class Memory(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, "allocated", torch.cuda.memory_allocated() // 2**20, "MiB")


model = OlmoForCausalLM(OlmoConfig(vocab_size=30000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                                   num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=1024,
                                   pad_token_id=1, eos_token_id=0))
with tempfile.TemporaryDirectory() as out:
    training_args = TrainingArguments(
        output_dir=out, max_steps=6, per_device_train_batch_size=8, gradient_accumulation_steps=1, learning_rate=1e-4,
        bf16=True, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        label_smoothing_factor=0.1, train_sampling_strategy="group_by_length", max_grad_norm=1.0, warmup_steps=2,
        logging_steps=2, save_strategy="steps", save_steps=3, save_total_limit=1, report_to="none",
        remove_unused_columns=False)
    trainer = Trainer(model=model, args=training_args, train_dataset=Instructions(64), data_collator=Collator(),
                      callbacks=[Memory()])
    print(trainer.train().metrics)
