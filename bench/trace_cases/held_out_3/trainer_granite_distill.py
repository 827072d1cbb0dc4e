"""Knowledge distillation of Granite models with a subclass of the Hugging Face Trainer.

The teacher is frozen in bfloat16. The evaluation collects logits, moved to the CPU every two batches
(eval_accumulation_steps), for a token accuracy in compute_metrics.
"""
import tempfile
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class DistillArguments:
    vocab_size: int = field(default=24576)
    teacher_layers: int = field(default=10)
    student_layers: int = field(default=5)
    hidden_size: int = field(default=768)
    seq_length: int = field(default=512)
    batch_size: int = field(default=8)
    max_steps: int = field(default=4)
    temperature: float = field(default=2.0)
    alpha: float = field(default=0.7, metadata={"help": "weight of the soft targets"})


class RandomChats(Dataset):
    def __init__(self, size, args, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, args.vocab_size, (size, args.seq_length), generator=generator)
        self.lengths = torch.randint(args.seq_length // 2, args.seq_length + 1, (size,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        mask = (torch.arange(self.ids.size(1)) < self.lengths[i]).long()
        ids = self.ids[i] * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher=None, temperature=2.0, alpha=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.temperature, self.alpha = temperature, alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        if not model.training:
            return (outputs.loss, {"logits": outputs.logits}) if return_outputs else outputs.loss
        with torch.no_grad():
            teacher_logits = self.teacher(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).logits.float()
        keep = (inputs["labels"][:, 1:] != -100).float()
        t = self.temperature
        soft = F.kl_div(
            F.log_softmax(outputs.logits[:, :-1] / t, dim=-1),
            F.softmax(teacher_logits[:, :-1] / t, dim=-1),
            reduction="none",
        ).sum(dim=-1)
        soft = (soft * keep).sum() / keep.sum() * t**2
        loss = self.alpha * soft + (1 - self.alpha) * outputs.loss
        self.last_soft = soft.detach()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs["soft"] = round(self.last_soft.item(), 4)
        super().log(logs, *args, **kwargs)


def compute_metrics(prediction):
    guesses = np.argmax(prediction.predictions[:, :-1], axis=-1)
    labels = prediction.label_ids[:, 1:]
    where = labels != -100
    return {"token_accuracy": float((guesses[where] == labels[where]).mean()), "tokens": int(where.sum())}


def granite(args, layers):
    heads = args.hidden_size // 64
    return GraniteForCausalLM(GraniteConfig(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, intermediate_size=args.hidden_size * 8 // 3,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 3, pad_token_id=0,
        embedding_multiplier=12.0, attention_multiplier=1 / 64, residual_multiplier=0.22, logits_scaling=8.0,
        attention_dropout=0.1, tie_word_embeddings=True, use_cache=False, max_position_embeddings=2048))


def main():
    (args,) = HfArgumentParser(DistillArguments).parse_args_into_dataclasses()
    set_seed(11)
    teacher, student = granite(args, args.teacher_layers).to(torch.bfloat16), granite(args, args.student_layers)
    with torch.no_grad():  # the student starts from every second layer of the teacher
        student.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight)
        for i, layer in enumerate(student.model.layers):
            layer.load_state_dict(teacher.model.layers[2 * i].state_dict())

    with tempfile.TemporaryDirectory() as output_dir:
        training_args = TrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            max_steps=args.max_steps,
            learning_rate=5e-4,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=1,
            weight_decay=0.05,
            max_grad_norm=0.5,
            bf16=True,
            tf32=True,
            optim="adamw_torch",
            eval_strategy="steps",
            eval_steps=args.max_steps // 2,
            eval_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            remove_unused_columns=False,
            dataloader_num_workers=1,
            report_to="none",
        )
        trainer = DistillationTrainer(
            model=student,
            args=training_args,
            train_dataset=RandomChats(args.batch_size * args.max_steps, args, seed=1),
            eval_dataset=RandomChats(args.batch_size * 3 + 2, args, seed=2),
            compute_metrics=compute_metrics,
            teacher=teacher,
            temperature=args.temperature,
            alpha=args.alpha,
        )
        trainer.train()
        print(trainer.evaluate())


if __name__ == "__main__":
    main()
