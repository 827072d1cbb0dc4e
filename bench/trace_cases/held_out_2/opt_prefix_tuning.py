"""Prefix tuning of an OPT-350m-sized model for a generation-style classification task, as in the PEFT examples."""
import argparse

import torch
from peft import PrefixTuningConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import OPTConfig, OPTForCausalLM, get_linear_schedule_with_warmup

PAD = 1


def make_split(size, length, vocab_size, seed):
    """Left-padded texts with a label of three tokens at the end."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, vocab_size, (size, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (size,), generator=generator)
    mask = (torch.arange(length)[None, :] >= length - lengths[:, None]).long()
    input_ids = torch.where(mask.bool(), input_ids, PAD)
    labels = torch.full_like(input_ids, -100)
    labels[:, -3:] = input_ids[:, -3:]
    return TensorDataset(input_ids, mask, labels)


def to_device(batch, device):
    return dict(zip(("input_ids", "attention_mask", "labels"), (t.to(device) for t in batch)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab_size", type=int, default=50272)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_virtual_tokens", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-2)
    args = parser.parse_args()

    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = OPTConfig(
        vocab_size=args.vocab_size, hidden_size=args.hidden_size, num_hidden_layers=args.layers,
        ffn_dim=4 * args.hidden_size, num_attention_heads=16, max_position_embeddings=2048,
        word_embed_proj_dim=args.hidden_size // 2, do_layer_norm_before=False,
    )
    model = OPTForCausalLM(config)
    peft_config = PrefixTuningConfig(
        task_type=TaskType.CAUSAL_LM,
        num_virtual_tokens=args.num_virtual_tokens,
        prefix_projection=True,
        encoder_hidden_size=args.hidden_size,
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()
    model = model.to(device)

    train_loader = DataLoader(make_split(3 * args.batch_size, args.length, args.vocab_size, 0), shuffle=True,
                              batch_size=args.batch_size, pin_memory=device == "cuda")
    eval_loader = DataLoader(make_split(2 * args.batch_size, args.length, args.vocab_size, 1),
                             batch_size=args.batch_size, pin_memory=device == "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=0, num_training_steps=len(train_loader) * args.epochs)

    for epoch in range(args.epochs):
        model.train()
        total_loss = 0
        for batch in train_loader:
            batch = to_device(batch, device)
            with torch.autocast(device, dtype=torch.bfloat16):
                outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        eval_loss, hits, count = 0, 0, 0
        for batch in eval_loader:
            batch = to_device(batch, device)
            with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
                outputs = model(**batch)
            eval_loss += outputs.loss.detach().float()
            guesses = torch.argmax(outputs.logits[:, -4:-1], -1).cpu()
            hits += (guesses == batch["labels"][:, -3:].cpu()).all(-1).sum().item()
            count += len(guesses)

        train_epoch_loss = total_loss / len(train_loader)
        eval_epoch_loss = eval_loss / len(eval_loader)
        print(f"{epoch=}: train_ppl={torch.exp(train_epoch_loss).item():.1f} train_loss={train_epoch_loss.item():.3f} "
              f"eval_ppl={torch.exp(eval_epoch_loss).item():.1f} eval_loss={eval_epoch_loss.item():.3f} "
              f"accuracy={hits / count:.3f}")


if __name__ == "__main__":
    main()
