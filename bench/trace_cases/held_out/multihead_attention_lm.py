"""Causal language model on nn.MultiheadAttention with a key padding mask; float32, NAdam, worker processes."""
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

VOCAB, DIM, HEADS, LAYERS, MAX_LEN = 20000, 512, 8, 6, 384


class Sentences(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(7)
        self.lengths = torch.randint(MAX_LEN // 2, MAX_LEN, (n,), generator=g).tolist()
        self.g = g

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        ids = torch.randint(1, VOCAB, (self.lengths[i],))
        return torch.nn.functional.pad(ids, (0, MAX_LEN - len(ids)))


class PositionalEncoding(nn.Module):
    def __init__(self):
        super().__init__()
        position = torch.arange(MAX_LEN).unsqueeze(1)
        div = torch.exp(torch.arange(0, DIM, 2) * (-math.log(10000.0) / DIM))
        pe = torch.zeros(1, MAX_LEN, DIM)
        pe[0, :, 0::2] = torch.sin(position * div)
        pe[0, :, 1::2] = torch.cos(position * div)
        self.register_buffer("pe", pe)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, HEADS, dropout=0.1, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * DIM, DIM))

    def forward(self, x, mask, padding):
        h = self.norm1(x)
        a, _ = self.attn(h, h, h, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        x = x + a
        return x + self.ff(self.norm2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.pos = PositionalEncoding()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        mask = torch.triu(torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device), diagonal=1)
        x = self.pos(self.emb(ids) * math.sqrt(DIM))
        for block in self.blocks:
            x = block(x, mask, ids == 0)
        return self.out(x)


def main():
    device = torch.device("cuda:0")
    loader = DataLoader(Sentences(24 * 7), batch_size=24, num_workers=2, pin_memory=True, drop_last=True)
    model = LM().to(device)
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    total = 0.0
    for step, ids in enumerate(loader):
        ids = ids.to(device, non_blocking=True)
        logits = model(ids[:, :-1])
        loss = criterion(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        total += loss.item()
        print(f"| step {step} | loss {total / (step + 1):5.2f} | ppl {math.exp(min(loss.item(), 20)):8.2f}")


if __name__ == "__main__":
    main()
