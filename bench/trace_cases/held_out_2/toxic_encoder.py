"""Multi-label toxic comment classification with a BERT encoder: every block is compiled in place
and wrapped in an activation checkpoint."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

LABELS = ["toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate"]


class ToxicClassifier(nn.Module):
    def __init__(self, config, compile_blocks=True, checkpointing=True):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.checkpointing = checkpointing
        if compile_blocks:
            for block in self.bert.encoder.layer:
                block.compile()
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Sequential(nn.Linear(2 * config.hidden_size, 256), nn.GELU(), nn.Linear(256, len(LABELS)))

    def forward(self, input_ids, attention_mask):
        x = self.bert.embeddings(input_ids=input_ids)
        B, S = input_ids.shape
        mask = attention_mask.bool()[:, None, None, :].expand(B, 1, S, S)
        for block in self.bert.encoder.layer:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        m = attention_mask.unsqueeze(-1).to(x.dtype)
        mean = (x * m).sum(1) / m.sum(1)
        peak = x.masked_fill(m == 0, -1e4).amax(1)
        return self.head(self.dropout(torch.cat([mean, peak], dim=-1)))


def focal_bce(logits, targets, gamma=2.0):
    bce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p = torch.exp(-bce)
    return ((1 - p) ** gamma * bce).mean()


def batches(n, batch_size, seq_len, vocab, device):
    g = torch.Generator().manual_seed(1)
    for _ in range(n):
        lengths = torch.randint(seq_len // 8, seq_len + 1, (batch_size,), generator=g)
        ids = torch.randint(1000, vocab, (batch_size, seq_len), generator=g)
        mask = (torch.arange(seq_len)[None, :] < lengths[:, None]).long()
        ids = ids * mask
        y = (torch.rand(batch_size, len(LABELS), generator=g) < 0.1).float()
        yield ids.to(device), mask.to(device), y.to(device)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--seq", type=int, default=384)
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--hidden", type=int, default=768)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--eager", action="store_true", help="do not compile the blocks")
    ap.add_argument("--no-checkpoint", action="store_true")
    args = ap.parse_args()

    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = BertConfig(
        vocab_size=30522, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, intermediate_size=4 * args.hidden,
        max_position_embeddings=512, attn_implementation="sdpa")
    model = ToxicClassifier(config, not args.eager, not args.no_checkpoint).to("cuda")
    model.train()

    # layer-wise learning rate decay
    groups = [{"params": list(model.bert.embeddings.parameters()), "lr": 2e-5 * 0.9 ** args.layers}]
    for i, block in enumerate(model.bert.encoder.layer):
        groups.append({"params": list(block.parameters()), "lr": 2e-5 * 0.9 ** (args.layers - 1 - i)})
    groups.append({"params": list(model.head.parameters()), "lr": 1e-4})
    opt = torch.optim.AdamW(groups, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, [g["lr"] for g in groups], total_steps=args.steps + 1)

    for step, (ids, mask, y) in enumerate(batches(args.steps, args.batch, args.seq, config.vocab_size, "cuda")):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids, mask)
        loss = focal_bce(logits.float(), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        hits = ((logits > 0) == y.bool()).float().mean()
        print(f"step {step}: loss {loss.item():.4f}, accuracy {hits.item():.3f}")
    print(f"max reserved: {torch.cuda.max_memory_reserved() / 1024**2:.0f} MiB")


if __name__ == "__main__":
    main()
