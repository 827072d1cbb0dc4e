"""Sequence-to-sequence translation with nn.Transformer, fp16 mixed precision and label smoothing."""
import argparse
import math
import random

import torch
import torch.nn as nn

PAD, BOS, EOS = 0, 1, 2


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout, max_len=512):
        super().__init__()
        pos = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(pos * div)
        pe[0, :, 1::2] = torch.cos(pos * div)
        self.register_buffer("pe", pe)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(x + self.pe[:, :x.size(1)])


class Seq2Seq(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, d_model, nhead, layers, ff, dropout):
        super().__init__()
        self.d_model = d_model
        self.src_emb = nn.Embedding(src_vocab, d_model, padding_idx=PAD)
        self.tgt_emb = nn.Embedding(tgt_vocab, d_model, padding_idx=PAD)
        self.pos = PositionalEncoding(d_model, dropout)
        self.transformer = nn.Transformer(d_model, nhead, layers, layers, ff, dropout, batch_first=True)
        self.generator = nn.Linear(d_model, tgt_vocab)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def encode(self, src, src_pad):
        return self.transformer.encoder(self.pos(self.src_emb(src) * math.sqrt(self.d_model)),
                                        src_key_padding_mask=src_pad)

    def decode(self, tgt, memory, src_pad, tgt_pad=None):
        t = tgt.size(1)
        causal = torch.triu(torch.ones(t, t, dtype=torch.bool, device=tgt.device), diagonal=1)
        x = self.pos(self.tgt_emb(tgt) * math.sqrt(self.d_model))
        return self.transformer.decoder(x, memory, tgt_mask=causal, tgt_key_padding_mask=tgt_pad,
                                        memory_key_padding_mask=src_pad)

    def forward(self, src, tgt):
        src_pad, tgt_pad = src.eq(PAD), tgt.eq(PAD)
        memory = self.encode(src, src_pad)
        return self.generator(self.decode(tgt, memory, src_pad, tgt_pad))


class ToyPairs(torch.utils.data.Dataset):
    def __init__(self, n, src_vocab, tgt_vocab, min_len, max_len, seed=0):
        rng = random.Random(seed)
        self.pairs = []
        for _ in range(n):
            ls = rng.randint(min_len, max_len)
            lt = min(max_len, max(min_len, ls + rng.randint(-8, 8)))
            self.pairs.append(([rng.randrange(3, src_vocab) for _ in range(ls)],
                               [rng.randrange(3, tgt_vocab) for _ in range(lt)]))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def collate(batch):
    src = [torch.tensor(s + [EOS]) for s, _ in batch]
    tgt = [torch.tensor([BOS] + t + [EOS]) for _, t in batch]
    return (nn.utils.rnn.pad_sequence(src, batch_first=True, padding_value=PAD),
            nn.utils.rnn.pad_sequence(tgt, batch_first=True, padding_value=PAD))


@torch.no_grad()
def greedy_decode(model, src, max_len):
    model.eval()
    src_pad = src.eq(PAD)
    memory = model.encode(src, src_pad)
    ys = torch.full((src.size(0), 1), BOS, dtype=torch.long, device=src.device)
    finished = torch.zeros(src.size(0), dtype=torch.bool, device=src.device)
    for _ in range(max_len):
        out = model.decode(ys, memory, src_pad)
        next_word = model.generator(out[:, -1]).argmax(dim=-1)
        next_word = next_word.masked_fill(finished, PAD)
        ys = torch.cat([ys, next_word.unsqueeze(1)], dim=1)
        finished |= next_word.eq(EOS)
        if finished.all():
            break
    model.train()
    return ys


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--max-len", type=int, default=120)
    ap.add_argument("--min-len", type=int, default=20)
    ap.add_argument("--d-model", type=int, default=512)
    ap.add_argument("--layers", type=int, default=6)
    ap.add_argument("--src-vocab", type=int, default=18000)
    ap.add_argument("--tgt-vocab", type=int, default=22000)
    ap.add_argument("--steps", type=int, default=6)
    args = ap.parse_args()

    torch.manual_seed(3)
    device = torch.device("cuda")
    data = ToyPairs(args.batch * args.steps, args.src_vocab, args.tgt_vocab, args.min_len, args.max_len)
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch, shuffle=True, collate_fn=collate,
                                         pin_memory=True, drop_last=True)
    model = Seq2Seq(args.src_vocab, args.tgt_vocab, args.d_model, 8, args.layers, args.d_model * 4, 0.1).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    warmup = 4000
    noam = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: args.d_model ** -0.5 * min((s + 1) ** -0.5, (s + 1) * warmup ** -1.5))
    scaler = torch.amp.GradScaler("cuda")

    model.train()
    for step, (src, tgt) in enumerate(loader):
        src, tgt = src.to(device, non_blocking=True), tgt.to(device, non_blocking=True)
        tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(src, tgt_in)
            loss = criterion(logits.reshape(-1, logits.size(-1)), tgt_out.reshape(-1))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        noam.step()
        print(f"step {step} src {tuple(src.shape)} tgt {tuple(tgt.shape)} loss {loss.item():.3f} "
              f"scale {scaler.get_scale():.0f}")

    src, _ = collate([data[i] for i in range(8)])
    out = greedy_decode(model, src.to(device), max_len=40)
    print("decoded", tuple(out.shape), out[0, :10].tolist())


if __name__ == "__main__":
    main()
