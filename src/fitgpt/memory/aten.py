"""What torch's own kernels hold beside their results, eager or called by compiled code, as nanoGPT calls them.

Read off recorded runs, event by event: attention, sums over rows, the sort in an embedding's backward pass, a norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..core.units import MiB
from .attention import (
    CUDNN_SCRATCH,
    DICE,
    EFFICIENT_COUNTERS,
    EFFICIENT_HEADS,
    EFFICIENT_TOKENS,
    FLASH_HEAD,
    FLASH_TOKENS,
)
from .nanorun import NanoGPTRun, padded_width
from .tape import Writer

THREADS, VECTOR, WARP = 512, 4, 32  # of a sum over rows: of a block of threads, numbers a load, threads a warp
LEAST, MOST = 16, 256               # numbers a thread adds up before a sum is split further
MOST_CUDNN = 128                    # numbers of a head that cuDNN attends to
CHUNK = 65536                       # numbers of a tensor of which a norm is taken at once
SIMPLE_EMBEDDING = 3072             # up to so many indices an embedding's backward sorts nothing
SORT_DIGITS, SORT_TILE = 16640, 4096
SCAN = 1279                         # of a scan or a search for unique keys
CUBLASLT = MiB                      # the workspace of products with a bias


class Gpu(NamedTuple):
    """What of a GPU the tape depends on; an H200's. `attention` is torch's choice of kernel there."""

    workspace: int = 32 * MiB  # cuBLAS's, of each thread that multiplies
    sms: int = 132
    threads: int = 2048        # that a multiprocessor holds at once
    cache: int = 60 * MiB      # its second-level cache
    attention: str = "cudnn"


H200 = Gpu()


def up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def sum_over_rows(rows: int, columns: int, gpu: Gpu) -> list[int]:
    """Bytes of scratch of `x.sum(0)`: partial sums and counters, where blocks of threads share a column.

    Few columns leave multiprocessors idle, so rows are split among blocks until all are busy or a thread has only
    sixteen numbers left (Reduce.cuh of torch).
    """
    wide = columns // VECTOR if columns % VECTOR == 0 else columns
    vector = VECTOR if columns % VECTOR == 0 else 1
    threads = THREADS // vector
    width = min(1 << (wide.bit_length() - 1), WARP)
    height = min(1 << (rows.bit_length() - 1), threads // width)
    blocks = -(-wide // width)
    each = -(-rows // height)
    busy = gpu.sms * (gpu.threads // (width * height))
    if rows < min(height * LEAST, MOST) or each < MOST or blocks > busy:
        return []
    share = max(min(-(-busy // blocks), -(-each // LEAST)), -(-each // MOST))
    return [4 * columns * share * width * vector, 4 * blocks] if share > 1 else []


def norm_partials(sizes: list[int]) -> int:
    """Of all gradients' norms together: as many partial sums for each tensor as the largest needs."""
    return 4 * len(sizes) * max(-(-size // CHUNK) for size in sizes)


def embedding_backward(w: Writer, name: str, gradient: str, indices: int, rows: int, width: int) -> None:
    """Many indices are sorted first, and sums of ten rows of equal ones kept apart before they are added up."""
    def held(part: str, nbytes: int) -> str:
        return w.alloc(f"{name}.{part}", "workspace", nbytes)

    def passing(nbytes: int) -> None:
        w.free(held("scan", nbytes))

    if indices <= SIMPLE_EMBEDDING:
        w.alloc(gradient, "gradients", 4 * rows * width)
        return
    segments = min(indices, rows)
    partial = indices // 10 + segments
    spent = [held("sorted", 8 * indices), held("order", 8 * indices)]
    held("range", 8 * indices)
    passing(16 * indices + 1024 * -(-indices // SORT_TILE) + SORT_DIGITS + 255)
    w.free(f"{name}.range")
    w.alloc(gradient, "gradients", 4 * rows * width)
    spent += [held("segments", 8 * indices), held("segment count", 8)]
    held("keys", 8 * indices)
    passing(SCAN)
    w.free(f"{name}.keys")
    spent += [held("partials", 8 * segments), held("partial offsets", 8 * segments)]
    passing(SCAN)
    spent += [held("partial count", 8), held("offsets", 8 * partial), held("sums", 4 * partial * width)]
    w.free(*reversed(spent))


class Attention:
    """torch's scaled_dot_product_attention of queries, keys and values that are views of one tensor.

    `math`, for cards older than any kernel, is not written: there, evaluation and training are those of `efficient`.
    """

    def __init__(self, run: NanoGPTRun, writer: Writer, gpu: Gpu) -> None:
        self.r, self.w = run, writer
        self.width = 2 if run.dtype != "float32" else 4
        self.padded = padded_width(run)  # C once heads are padded, as flash attention wants them
        wide = run.n_embd > MOST_CUDNN * run.n_head
        fused = "flash" if gpu.attention == "cudnn" and (self.padded or wide) else gpu.attention
        self.kernel = fused if self.width == 2 and fused in ("cudnn", "flash") else "efficient"
        if self.kernel == "efficient":
            self.padded = 0

    @property
    def out(self) -> int:
        return self.width * self.r.tokens * (self.padded or self.r.n_embd)

    @property
    def rows(self) -> int:
        """Of a number for each token and head."""
        r = self.r
        tokens = up_to(r.block_size, 32) if self.kernel == "efficient" else r.block_size
        return 4 * r.batch_size * r.n_head * tokens

    def made(self, i: int) -> list[tuple[str, int]]:
        """What a training forward pass keeps: name and bytes, the output first, in the order it is made."""
        out = f"{i}.attention.wide" if self.padded else f"{i}.attention"
        if self.kernel == "efficient":
            return [(out, self.out), (f"{i}.lse", self.rows)]
        dice = [(f"{i}.seed", DICE if self.kernel == "cudnn" else 2 * DICE), (f"{i}.offset", DICE)]
        results = [(out, self.out), (f"{i}.lse", self.rows)]
        return dice + results if self.kernel == "cudnn" else results + dice

    def forward(self, i: int, names: Mapping[str, str], *, grad: bool) -> None:
        """Without a graph only flash attention computes the rows' numbers, and nothing but the output stays.

        `names`: what results are to be called, if not what `made` calls them.
        """
        w = self.w
        made = [(name, nbytes) for name, nbytes in self.made(i)
                if grad or self.kernel == "flash" or not name.endswith(".lse")]
        for name, nbytes in made:
            w.alloc(names.get(name, name), "activations", nbytes)
        if self.kernel == "cudnn":
            w.free(w.alloc("attention scratch", "workspace", CUDNN_SCRATCH))
        if not grad:
            w.free(*(name for name, _ in made if ".attention" not in name))

    def backward(self, i: int, names: Mapping[str, str]) -> list[str]:
        """Leaves the gradients of queries, keys and values, which it returns."""
        w, r = self.w, self.r
        copies = [w.alloc(f"{part}.relaid", "activations", self.out) for part in ("d", "out")] if self.padded else []
        gradients = [w.alloc(names.get(f"d {i}.{part}", f"d {i}.{part}"), "activations", self.out) for part in "qkv"]
        per_head = 4 * r.batch_size * r.n_head
        head = (self.padded or r.n_embd) // r.n_head
        if self.kernel == "cudnn":
            w.free(w.alloc("attention scratch", "workspace", 4 * r.tokens * (r.n_embd + r.n_head) + CUDNN_SCRATCH))
            return gradients
        if self.kernel == "flash":
            rows = per_head * up_to(r.block_size, FLASH_TOKENS)
            w.alloc("attention delta", "workspace", rows)
            w.alloc("attention sums", "workspace", rows * up_to(head, FLASH_HEAD))
        else:
            rows = per_head * r.block_size
            if self.width == 4:
                w.alloc("d × out", "workspace", self.out)
                w.alloc("delta.sum", "workspace", rows)
            w.alloc("attention delta", "workspace", rows)
            if self.width == 4:
                w.free("delta.sum", "d × out")
            wide = next((each for each in EFFICIENT_HEADS if head <= each), head)
            tiles = r.batch_size * r.n_head * -(-r.block_size // EFFICIENT_TOKENS)
            w.alloc("attention sums", "workspace", tiles * (4 * EFFICIENT_TOKENS * wide + EFFICIENT_COUNTERS))
        w.free("attention sums", "attention delta", *copies)
        return gradients
