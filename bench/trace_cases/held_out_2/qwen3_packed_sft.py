"""Supervised fine-tuning of a small Qwen3 on packed sequences, with gradient checkpointing and a chunked loss."""
import argparse
import random

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

IGNORE = -100


def build_model(args):
    config = Qwen3Config(
        vocab_size=args.vocab, hidden_size=896, intermediate_size=2432, num_hidden_layers=args.layers,
        num_attention_heads=14, num_key_value_heads=2, head_dim=64, max_position_embeddings=args.pack_len,
        tie_word_embeddings=True, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_example(rng, vocab):
    prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(20, 120))]
    answer = [rng.randrange(3, vocab) for _ in range(rng.randint(50, 500))] + [2]
    return prompt + answer, [IGNORE] * len(prompt) + answer


def pack(rng, pack_len, vocab):
    """Concatenate examples up to pack_len; positions restart at each example."""
    ids, labels, positions = [], [], []
    while len(ids) < pack_len:
        x, y = make_example(rng, vocab)
        x, y = x[:pack_len - len(ids)], y[:pack_len - len(ids)]
        y = [IGNORE] + y[1:]
        ids += x
        labels += y
        positions += range(len(x))
    return torch.tensor([ids]), torch.tensor([labels]), torch.tensor([positions])


def chunk_loss(hidden, weight, labels):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def chunked_cross_entropy(hidden, weight, labels, chunk):
    hidden = hidden[:, :-1].reshape(-1, hidden.size(-1))
    labels = labels[:, 1:].reshape(-1)
    total = hidden.new_zeros((), dtype=torch.float32)
    for h, y in zip(hidden.split(chunk), labels.split(chunk)):
        total = total + checkpoint(chunk_loss, h, weight, y, use_reentrant=False)
    return total / labels.ne(IGNORE).sum().clamp(min=1)


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    all_logits, all_labels = [], []
    for ids, labels, positions in batches:
        out = model(input_ids=ids.cuda(), position_ids=positions.cuda())
        all_logits.append(out.logits[:, :-1].float())
        all_labels.append(labels[:, 1:].cuda())
    logits, labels = torch.cat(all_logits), torch.cat(all_labels)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    hits = (logits.argmax(-1) == labels).sum() / labels.ne(IGNORE).sum()
    model.train()
    return loss.item(), hits.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=60000)
    ap.add_argument("--layers", type=int, default=14)
    ap.add_argument("--pack-len", type=int, default=3072)
    ap.add_argument("--chunk", type=int, default=1024)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--eval-every", type=int, default=3)
    ap.add_argument("--eval-batches", type=int, default=2)
    ap.add_argument("--lr", type=float, default=1e-5)
    args = ap.parse_args()

    rng = random.Random(7)
    torch.manual_seed(7)
    model = build_model(args).cuda()
    model.train()
    print(f"{model.num_parameters() / 1e6:.0f}M parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, args.steps)
    eval_batches = [pack(rng, args.pack_len // 2, args.vocab) for _ in range(args.eval_batches)]

    for step in range(1, args.steps + 1):
        running = 0.0
        for _ in range(args.accum):
            ids, labels, positions = (t.cuda(non_blocking=True) for t in pack(rng, args.pack_len, args.vocab))
            hidden = model.model(input_ids=ids, position_ids=positions).last_hidden_state
            loss = chunked_cross_entropy(hidden, model.lm_head.weight, labels, args.chunk) / args.accum
            loss.backward()
            running += loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {running.item():.4f} grad_norm {grad_norm.item():.3f}")
        if step % args.eval_every == 0:
            val, acc = evaluate(model, eval_batches)
            print(f"  eval loss {val:.4f} token accuracy {acc:.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, "
          f"reserved {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
