"""DPO without trl: the policy is a Mistral with LoRA, the reference is the same model with the adapters disabled."""
import argparse

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import MistralConfig, MistralForCausalLM


class Preferences(Dataset):
    def __init__(self, size, prompt_length, answer_length, vocab_size):
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for _ in range(size):
            prompt = torch.randint(3, vocab_size, (prompt_length,), generator=generator)
            sizes = torch.randint(answer_length // 2, answer_length, (2,), generator=generator).tolist()
            chosen, rejected = (torch.randint(3, vocab_size, (n,), generator=generator) for n in sizes)
            self.rows.append((prompt, chosen, rejected))
        self.length = prompt_length + answer_length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def collate(self, rows):
        """The chosen answers in the first half of the batch, the rejected ones in the second."""
        count = 2 * len(rows)
        input_ids = torch.zeros(count, self.length, dtype=torch.long)
        attention_mask = torch.zeros(count, self.length, dtype=torch.long)
        labels = torch.full((count, self.length), -100)
        for i, (prompt, *answers) in enumerate(rows):
            for j, answer in enumerate(answers):
                tokens = torch.cat([prompt, answer])
                row = i + j * len(rows)
                input_ids[row, : len(tokens)] = tokens
                attention_mask[row, : len(tokens)] = 1
                labels[row, len(prompt) : len(tokens)] = answer
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def sequence_log_probs(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    logits = logits[:, :-1].float()
    labels = batch["labels"][:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    log_probs = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (log_probs * mask).sum(-1)


def dpo_loss(policy, reference, beta):
    policy_chosen, policy_rejected = policy.chunk(2)
    reference_chosen, reference_rejected = reference.chunk(2)
    chosen_reward = beta * (policy_chosen - reference_chosen)
    rejected_reward = beta * (policy_rejected - reference_rejected)
    loss = -F.logsigmoid(chosen_reward - rejected_reward).mean()
    accuracy = (chosen_reward > rejected_reward).float().mean()
    return loss, accuracy, (chosen_reward - rejected_reward).detach().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_size", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--answer_length", type=int, default=256)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = MistralConfig(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, intermediate_size=args.hidden_size * 7 // 2,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden_size // 128,
        num_key_value_heads=args.hidden_size // 384, head_dim=128, sliding_window=None, max_position_embeddings=4096,
    )
    with device:
        model = MistralForCausalLM(config).to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    model.train()

    data = Preferences(args.steps * args.accumulate * args.batch_size, args.prompt_length, args.answer_length,
                       args.vocab_size)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, collate_fn=data.collate, drop_last=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=3)

    for index, batch in enumerate(loader):
        batch = {key: value.to(device) for key, value in batch.items()}
        with torch.no_grad(), model.disable_adapter():
            reference = sequence_log_probs(model, batch)
        policy = sequence_log_probs(model, batch)
        loss, accuracy, margin = dpo_loss(policy, reference, args.beta)
        (loss / args.accumulate).backward()
        if (index + 1) % args.accumulate == 0:
            norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {(index + 1) // args.accumulate}: loss {loss.item():.4f} accuracy {accuracy.item():.2f} "
                  f"margin {margin.item():.4f} norm {norm.item():.2f}")

    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
