"""Scratch memory of the ATen kernels that nanoGPT calls, eager or from compiled code.

Attention, sums over rows, the sort in an embedding's backward pass, gradient norms. Sizes are those of recorded runs on
an H200, event by event; where torch's source states the rule, the function names the file.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...config.run_config import RunConfig
from ...core.units import MiB
from ...memory.platform import Platform
from ...memory.tape import Writer
from ..attention_scratch import (
    CUDNN_SCRATCH,
    EFFICIENT_COUNTERS,
    EFFICIENT_HEADS,
    EFFICIENT_TOKENS,
    FLASH_HEAD,
    FLASH_TOKENS,
)
from ..attention_scratch import RNG as RNG_BYTES
from .padding import round_up

SCALAR = 4  # bytes of a loss, a step count, a scale
# Reduce.cuh: threads per block, elements per load, threads per warp.
THREADS, VECTOR, WARP = 512, 4, 32
MIN_PER_THREAD, MAX_PER_THREAD = 16, 256  # elements that a thread sums before a sum is split among more blocks
NORM_CHUNK = 65536                        # elements of a tensor that one block of a foreach norm sums
SIMPLE_EMBEDDING = 3072                   # up to this many indices, an embedding's backward pass sorts nothing
SORT_DIGITS, SORT_TILE = 16640, 4096      # CUB's radix sort
SCAN = 1279                               # bytes of a CUB scan or of a search for unique keys
CUBLASLT = MiB                            # the workspace of matmuls with a bias
HEAD_MULTIPLE = 8                         # flash attention pads heads to a multiple of this


def sum_over_rows(rows: int, columns: int, platform: Platform) -> list[int]:
    """Bytes of scratch of `x.sum(0)`: partial sums and counters, where several blocks share a column.

    With few columns, multiprocessors are idle: rows are split among blocks until all are busy or a thread has only
    sixteen elements left (Reduce.cuh).
    """
    vector = VECTOR if columns % VECTOR == 0 else 1
    loads = columns // vector
    threads = THREADS // vector
    width = min(1 << (loads.bit_length() - 1), WARP)
    height = min(1 << (rows.bit_length() - 1), threads // width)
    blocks = -(-loads // width)
    per_thread = -(-rows // height)
    busy = platform.sms * (platform.threads // (width * height))
    if rows < min(height * MIN_PER_THREAD, MAX_PER_THREAD) or per_thread < MAX_PER_THREAD or blocks > busy:
        return []
    split = max(min(-(-busy // blocks), -(-per_thread // MIN_PER_THREAD)), -(-per_thread // MAX_PER_THREAD))
    return [4 * columns * split * width * vector, 4 * blocks] if split > 1 else []


def norm_partials(sizes: list[int]) -> int:
    """Bytes of a foreach norm's partial sums: every tensor gets as many as the largest needs."""
    return 4 * len(sizes) * max(-(-size // NORM_CHUNK) for size in sizes)


def embedding_backward(w: Writer, name: str, gradient: str, indices: int, rows: int, width: int) -> None:
    """Leaves `gradient` [rows, width]. Many indices are sorted, and up to ten rows of equal ones summed at a time."""
    def scratch(part: str, nbytes: int) -> str:
        return w.alloc(f"{name}.{part}", "workspace", nbytes)

    def transient(nbytes: int) -> None:
        w.free(scratch("scan", nbytes))

    if indices <= SIMPLE_EMBEDDING:
        w.alloc(gradient, "gradients", 4 * rows * width)
        return
    segments = min(indices, rows)
    partial = indices // 10 + segments
    used = [scratch("sorted", 8 * indices), scratch("order", 8 * indices)]
    scratch("range", 8 * indices)
    transient(16 * indices + 1024 * -(-indices // SORT_TILE) + SORT_DIGITS + 255)
    w.free(f"{name}.range")
    w.alloc(gradient, "gradients", 4 * rows * width)
    used += [scratch("segments", 8 * indices), scratch("segment count", 8)]
    scratch("keys", 8 * indices)
    transient(SCAN)
    w.free(f"{name}.keys")
    used += [scratch("partials", 8 * segments), scratch("partial offsets", 8 * segments)]
    transient(SCAN)
    used += [scratch("partial count", 8), scratch("offsets", 8 * partial), scratch("sums", 4 * partial * width)]
    w.free(*reversed(used))


class AttentionTape:
    """F.scaled_dot_product_attention of queries, keys and values that are views of one tensor [B, T, 3C].

    The math kernel, for GPUs older than Maxwell, is not modelled: those runs are written as if memory-efficient.
    """

    def __init__(self, config: RunConfig, writer: Writer, platform: Platform) -> None:
        self.config, self.w = config, writer
        self.b, self.t, self.c, self.heads = config.batch_size, config.block_size, config.n_embd, config.n_head
        self.width = 4 if config.dtype == "float32" else 2
        kernel = platform.attention(self.c // self.heads, config.dtype)
        self.kernel = "efficient" if kernel == "math" else kernel
        head = self.c // self.heads
        # C once every head is padded for flash attention, or 0.
        self.padded = 0 if head % HEAD_MULTIPLE == 0 or self.kernel == "efficient" else (
            round_up(head, HEAD_MULTIPLE) * self.heads)

    @property
    def out_bytes(self) -> int:
        return self.width * self.b * self.t * (self.padded or self.c)

    @property
    def lse_bytes(self) -> int:
        """The softmax's log-sum-exp [B, H, T], in float32."""
        tokens = round_up(self.t, 32) if self.kernel == "efficient" else self.t
        return 4 * self.b * self.heads * tokens

    def saved(self, layer: int) -> list[tuple[str, int]]:
        """What a training forward pass saves: (name, bytes), in the order of allocation."""
        out = f"{layer}.att.padded" if self.padded else f"{layer}.att"
        results = [(out, self.out_bytes), (f"{layer}.lse", self.lse_bytes)]
        if self.kernel == "efficient":
            return results
        if self.kernel == "cudnn":
            return [(f"{layer}.seed", RNG_BYTES), (f"{layer}.offset", RNG_BYTES), *results]
        return [*results, (f"{layer}.seed", 2 * RNG_BYTES), (f"{layer}.offset", RNG_BYTES)]

    def forward(self, layer: int, names: Mapping[str, str], *, grad: bool) -> None:
        """Leaves what `saved` lists; without `grad`, the output alone. `names` replaces names of results.

        Without `grad`, only flash attention still computes the log-sum-exp.
        """
        w = self.w
        results = [(name, nbytes) for name, nbytes in self.saved(layer)
                   if grad or self.kernel == "flash" or not name.endswith(".lse")]
        for name, nbytes in results:
            w.alloc(names.get(name, name), "activations", nbytes)
        if self.kernel == "cudnn":
            w.free(w.alloc("attention scratch", "workspace", CUDNN_SCRATCH))
        if not grad:
            w.free(*(name for name, _ in results if ".att" not in name))

    def backward(self, layer: int, names: Mapping[str, str]) -> list[str]:
        """Leaves the gradients of queries, keys and values and returns their names. `names` replaces names of them."""
        w = self.w
        copies = [w.alloc(f"{part}.relaid", "activations", self.out_bytes)
                  for part in ("d", "out")] if self.padded else []
        results = [f"d_{part}.{layer}" for part in "qkv"]
        gradients = [w.alloc(names.get(name, name), "activations", self.out_bytes) for name in results]
        if self.kernel == "cudnn":
            sums = 4 * self.b * self.t * (self.c + self.heads)
            w.free(w.alloc("attention scratch", "workspace", sums + CUDNN_SCRATCH))
            return gradients
        head = (self.padded or self.c) // self.heads
        if self.kernel == "flash":
            rows = 4 * self.b * self.heads * round_up(self.t, FLASH_TOKENS)
            w.alloc("attention delta", "workspace", rows)
            w.alloc("attention sums", "workspace", rows * round_up(head, FLASH_HEAD))
        else:
            rows = 4 * self.b * self.heads * self.t
            if self.width == 4:  # in half precision the kernel computes this sum itself
                w.alloc("d × out", "workspace", self.out_bytes)
                w.alloc("delta.sum", "workspace", rows)
            w.alloc("attention delta", "workspace", rows)
            if self.width == 4:
                w.free("delta.sum", "d × out")
            wide = next((each for each in EFFICIENT_HEADS if head <= each), head)
            tiles = self.b * self.heads * -(-self.t // EFFICIENT_TOKENS)
            w.alloc("attention sums", "workspace", tiles * (4 * EFFICIENT_TOKENS * wide + EFFICIENT_COUNTERS))
        w.free("attention sums", "attention delta", *copies)
        return gradients
