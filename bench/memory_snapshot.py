"""A small GPT's training steps on a GPU → a memory snapshot, and torch's own figures for it.

    python bench/memory_snapshot.py tests/recorded/memory_snapshot.pickle > tests/recorded/memory_snapshot.json

The snapshot is what `torch.cuda.memory._dump_snapshot()` writes after `_record_memory_history(stacks="python")`; its
history begins before the first allocation, so the peak in it is torch's. Prints torch's figures in JSON.
tests/diagnosis/test_memory_snapshot.py compares the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, VOCAB, BATCH = 2, 4, 256, 4096, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden = self.up(self.norm2(x))
        return x + self.down(F.gelu(hidden))


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train_step(model: SmallGPT, optimizer: torch.optim.Optimizer, length: int) -> None:
    tokens = torch.randint(VOCAB, (BATCH, length), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main(path: Path) -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    model = SmallGPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for length in (192, 256, 224):  # several lengths leave unused blocks in the segments
        train_step(model, optimizer, length)
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(path))
    stats = torch.cuda.memory_stats()
    print(json.dumps({
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "allocated": torch.cuda.memory_allocated(), "max_allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(), "max_reserved": torch.cuda.max_memory_reserved(),
        "max_requested": stats["requested_bytes.all.peak"], "inactive_split": stats["inactive_split_bytes.all.current"],
        "file_bytes": path.stat().st_size}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
