"""DLRM-like click-through-rate model: embedding tables, bottom and top MLPs, pairwise dot interactions."""
import argparse

import numpy as np
import torch
import torch.nn as nn

# rows of the categorical features, roughly like Criteo after capping
TABLE_ROWS = [800_000, 38_000, 17_000, 7_400, 20_000, 3, 7_100, 1_500, 63, 700_000, 300_000, 400_000, 10,
              2_200, 12_000, 155, 4, 976, 14, 900_000, 600_000, 750_000, 110_000, 12_000, 108, 36]
MULTI_HOT = {0: 4, 9: 3, 19: 8, 20: 5}    # feature -> most values in one bag; the others have one


def mlp(sizes, last_act):
    layers = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        layers.append(nn.Linear(a, b))
        if i < len(sizes) - 2 or last_act:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    def __init__(self, rows, dim, n_dense, sparse):
        super().__init__()
        self.tables = nn.ModuleList()
        for i, n in enumerate(rows):
            if i in MULTI_HOT:
                table = nn.EmbeddingBag(n, dim, mode="sum", sparse=sparse)
            else:
                table = nn.Embedding(n, dim, sparse=sparse)
            nn.init.uniform_(table.weight, -1 / np.sqrt(n), 1 / np.sqrt(n))
            self.tables.append(table)
        self.bottom = mlp([n_dense, 512, 256, dim], last_act=True)
        f = len(rows) + 1
        self.register_buffer("tril", torch.tril_indices(f, f, offset=-1), persistent=False)
        self.top = mlp([dim + f * (f - 1) // 2, 1024, 1024, 512, 256, 1], last_act=False)

    def forward(self, dense, single, bags):
        x = self.bottom(dense)
        vectors, s = [x], 0
        for i, table in enumerate(self.tables):
            if i in bags:
                values, offsets = bags[i]
                vectors.append(table(values, offsets))
            else:
                vectors.append(table(single[:, s]))
                s += 1
        t = torch.stack(vectors, dim=1)                       # batch x features x dim
        dots = torch.bmm(t, t.transpose(1, 2))
        pairs = dots[:, self.tril[0], self.tril[1]]
        return self.top(torch.cat([x, pairs], dim=1)).squeeze(1)


def make_batch(rng, batch_size, n_dense):
    dense = torch.from_numpy(np.log1p(rng.exponential(10.0, (batch_size, n_dense))).astype(np.float32))
    single = np.stack([rng.integers(0, n, batch_size) for i, n in enumerate(TABLE_ROWS) if i not in MULTI_HOT], axis=1)
    bags = {}
    for i, most in MULTI_HOT.items():
        # the same number of values in every batch: bags of 1 to `most` values, cut at half of the maximum
        lengths = rng.integers(1, most + 1, batch_size)
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        total = batch_size * (most + 1) // 2
        offsets = np.minimum(offsets, total)
        bags[i] = (torch.from_numpy(rng.integers(0, TABLE_ROWS[i], total)), torch.from_numpy(offsets))
    label = torch.from_numpy((rng.random(batch_size) < 0.03).astype(np.float32))
    return dense, torch.from_numpy(single), bags, label


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16384)
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--n-dense", type=int, default=13)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--sparse", action="store_true", help="sparse gradients for the tables")
    args = ap.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    device = torch.device("cuda")

    model = DLRM(TABLE_ROWS, args.dim, args.n_dense, args.sparse).to(device)
    emb = sum(t.weight.numel() for t in model.tables)
    print(f"{emb / 1e6:.1f}M embedding and {sum(p.numel() for p in model.parameters()) / 1e6 - emb / 1e6:.2f}M other")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr, eps=1e-8)
    criterion = nn.BCEWithLogitsLoss()

    for step in range(args.steps):
        dense, single, bags, label = make_batch(rng, args.batch_size, args.n_dense)
        dense, single, label = dense.to(device), single.to(device), label.to(device)
        bags = {i: (v.to(device), o.to(device)) for i, (v, o) in bags.items()}
        logits = model(dense, single, bags)
        loss = criterion(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctr = logits.detach().sigmoid().mean()
        print(f"step {step}: loss {loss.item():.5f}, predicted ctr {ctr.item():.4f}")
    print(f"max reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
