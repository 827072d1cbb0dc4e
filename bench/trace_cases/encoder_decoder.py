"""torch.nn.Transformer, as in PyTorch's translation tutorial: masks, dropout, Adam, a padded vocabulary."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--vocab", type=int, default=18000)
parser.add_argument("--device", default="cuda")
args = parser.parse_args()
WIDTH, PAD = 512, 1


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(args.vocab, WIDTH), nn.Embedding(args.vocab, WIDTH)
        self.positions = nn.Parameter(torch.randn(args.seq, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 8, 3, 3, 2048, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(WIDTH, args.vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device).isinf()
        hidden = self.transformer(self.source(source) + self.positions[:source.size(1)],
                                  self.target(target) + self.positions[:target.size(1)], tgt_mask=mask,
                                  src_key_padding_mask=source == PAD, tgt_key_padding_mask=target == PAD,
                                  memory_key_padding_mask=source == PAD)
        return self.generator(hidden)


torch.manual_seed(0)
model = Translator().to(args.device)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
losses = 0.0
for _ in range(args.steps):
    source = torch.randint(2, args.vocab, (args.batch, args.seq)).to(args.device)
    target = torch.randint(2, args.vocab, (args.batch, args.seq)).to(args.device)
    logits = model(source, target[:, :-1])
    optimizer.zero_grad()
    loss = criterion(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    losses += loss.item()
print(f"mean loss {losses / args.steps:.3f}")
