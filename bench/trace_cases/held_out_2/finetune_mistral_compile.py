"""Instruction-style fine-tuning of a small Mistral in pure bf16 with torch.compile and gradient accumulation."""
import argparse

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import MistralConfig, MistralForCausalLM, get_cosine_schedule_with_warmup, set_seed


class SyntheticInstructions(Dataset):
    """Prompt + answer pairs, right padded to max_len; the prompt and the padding carry no loss."""

    def __init__(self, n, vocab_size, max_len):
        g = torch.Generator().manual_seed(0)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(max_len // 2, max_len + 1, (1,), generator=g))
            prompt = int(torch.randint(8, max_len // 4, (1,), generator=g))
            ids = torch.randint(3, vocab_size, (length,), generator=g)
            self.rows.append((ids, prompt))
        self.max_len = max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, prompt = self.rows[i]
        input_ids = torch.full((self.max_len,), 2, dtype=torch.long)
        labels = torch.full((self.max_len,), -100, dtype=torch.long)
        mask = torch.zeros(self.max_len, dtype=torch.long)
        input_ids[: len(ids)] = ids
        labels[prompt: len(ids)] = ids[prompt:]
        mask[: len(ids)] = 1
        return {"input_ids": input_ids, "labels": labels, "attention_mask": mask}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_len", type=int, default=1024)
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    set_seed(42)

    config = MistralConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        sliding_window=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = MistralForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)
    model.model.embed_tokens.weight.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in model.parameters())
    print(f"{total / 1e6:.0f}M parameters, {sum(p.numel() for p in trainable) / 1e6:.0f}M trainable")

    micro_batches = args.batch_size * args.accum * args.steps
    loader = DataLoader(
        SyntheticInstructions(micro_batches, config.vocab_size, args.max_len),
        batch_size=args.batch_size, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, args.steps)

    compiled = torch.compile(model)
    compiled.train()
    running = 0.0
    for i, batch in enumerate(loader):
        batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
        out = compiled(**batch)
        loss = out.loss / args.accum
        loss.backward()
        running += loss.item()
        if (i + 1) % args.accum == 0:
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {(i + 1) // args.accum}: loss {running:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
            running = 0.0
    print(f"max reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
