"""The things fitgpt speaks of: frozen, no logic beyond arithmetic on themselves. Read this first.

Shape letters are the same everywhere: B batch, T block, C width, H heads, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, under nanoGPT's names and with nanoGPT's defaults."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    grad_checkpoint: bool = False

    def count_params(self, *, positions: bool = True) -> int:
        """Parameters, the tied head counted once; nanoGPT prints the count without positions."""
        c, layers = self.n_embd, self.n_layer
        matrices = layers * 12 * c * c + self.vocab_size * c
        norms = (2 * layers + 1) * c
        biases = layers * (9 * c) + norms if self.bias else 0  # qkv 3C, proj C, up 4C, down C
        return matrices + norms + biases + (self.block_size * c if positions else 0)


@dataclass(frozen=True)
class DataSummary:
    """What is known of a dataset from its headers alone, without reading a token."""

    path: str
    tokenizer: str          # "gpt2", "bytes", "chars" (nanoGPT's meta.pkl), "unknown"
    vocab_size: int | None  # None: a headerless .bin does not say
    train_tokens: int
    val_tokens: int
    fingerprint: str        # changes when the data does


@dataclass(frozen=True)
class SplitLoss:
    """A loss over fixed windows of one split. Losses at different blocks are not comparable."""

    split: str
    mean: float
    stderr: float
    windows: int
    block: int


@dataclass(frozen=True)
class MemoryReading:
    """Bytes as the allocator counts them; zeros where the device has no such counters."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0


@dataclass(frozen=True)
class Evaluation:
    step: int
    losses: tuple[SplitLoss, ...]
    tokens_per_s: float
    memory: MemoryReading  # its peaks are those of this evaluation

    def of(self, split: str) -> SplitLoss:
        return next(loss for loss in self.losses if loss.split == split)


@dataclass(frozen=True)
class StepReport:
    """One logged training step, as shown to people and written to metrics.jsonl."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float         # of one step, averaged since the last report
    tokens_per_s: float
    mfu: float | None      # of `RunFacts.peak_flops`; None where the card's peak is unknown
    skipped: int           # non-finite steps skipped since the start
    loss_scale: float      # 1.0 except in float16
    memory: MemoryReading  # its peaks are those of training since the last evaluation
    seconds_left: float


@dataclass(frozen=True)
class RunFacts:
    """What is settled before step 0 and written as the first line of metrics.jsonl."""

    config: dict[str, Any]
    params: int
    device: str            # "cuda:0", "cpu"
    device_name: str       # "NVIDIA GeForce RTX 4070"
    dtype: str             # "bfloat16"
    compiled: bool
    peak_flops: float | None
    peak_source: str       # whose peak MFU is measured against
    tokens_per_step: int
    train_tokens: int
    val_tokens: int
    start_step: int
    max_iters: int
    versions: dict[str, str]
    notes: tuple[str, ...]  # what was decided for the user, each a sentence
