"""Scratch memory of ATen's CUDA kernels, for the tapes of both trainers, and attention as nanoGPT calls it.

Attention, sums over rows, the sort in an embedding's backward pass, gradient norms, topk. Sizes are those of recorded
runs on an H200, event by event; where torch's source states the rule, the comment names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..config.run_config import RunConfig
from ..core.units import MiB
from ..memory.platform import Platform
from ..memory.tape import Writer

SCALAR = 4  # bytes of a loss, a step count, a scale
CUBLASLT = MiB                            # the workspace of matmuls with a bias
# Reduce.cuh: threads per block, elements per load, threads per warp.
THREADS, VECTOR, WARP = 512, 4, 32
MIN_PER_THREAD, MAX_PER_THREAD = 16, 256  # elements that a thread sums before a sum is split among more blocks
NORM_CHUNK = 65536                        # elements of a tensor that one block of a foreach norm sums
SIMPLE_EMBEDDING = 3072                   # up to this many indices, an embedding's backward pass sorts nothing
SORT_DIGITS, SORT_TILE = 16640, 4096      # CUB's radix sort
SORT_AT_ONCE = {4: 4864, 8: 2304}         # indices of 4 and 8 bytes that it sorts in one block of threads
SCAN = 1279                               # bytes of a CUB scan or of a search for unique keys
SCAN_32_BITS = 1023                       # of 32-bit indices
# TensorTopK.cu: from TOPK_MANY elements on, several blocks of threads count them by their digits. TOPK_BLOCKS run at
# once on a multiprocessor, whose 65,536 registers hold 40 per thread; a thread takes 4 to 64 elements.
TOPK_MANY, TOPK_BLOCKS, TOPK_THREADS, TOPK_DIGITS, TOPK_LEAST, TOPK_MOST = 20_000, 6, 256, 256, 4, 64
# Attention: read off recorded runs in which the kernels were forced one by one (tests/golden/h200_kernels.json). The
# scratch of a backward pass is known from blocks of 500 and 512 tokens and heads of 48, 64 and 80 elements.
RNG = 8                                   # a seed and an offset, 8 bytes each, are kept with and without dropout
HEAD_MULTIPLE = 8                         # flash attention pads heads to a multiple of this
CUDNN_SCRATCH = 256
FLASH_TOKENS, FLASH_HEAD = 128, 32        # multiples to which flash attention's backward rounds its scratch
EFFICIENT_TOKENS, EFFICIENT_HEADS = 64, (32, 64, 128)
EFFICIENT_COUNTERS = 16                   # bytes per head and EFFICIENT_TOKENS tokens


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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
    return 4 * len(sizes) * -(-max(sizes) // NORM_CHUNK)


def topk_scratch(elements: int, sms: int) -> dict[str, int]:
    """Bytes by name."""
    if elements < TOPK_MANY:
        return {}
    per_thread = -(-elements // (sms * TOPK_BLOCKS * TOPK_THREADS))
    blocks = -(-elements // (TOPK_THREADS * min(max(per_thread, TOPK_LEAST), TOPK_MOST)))
    return {"value": 4, "rank": 8, "digits": 8, "counts": 2 * TOPK_DIGITS * blocks, "sums": 4 * TOPK_DIGITS,
            "above": 4 * blocks, "equal": 4 * blocks, "scan": SCAN}


# ---- attention's backward kernels, of heads [B, H, T, D]


def cudnn_backward(batch: int, heads: int, tokens: int, head: int) -> int:
    return 4 * batch * heads * tokens * (head + 1) + CUDNN_SCRATCH


def flash_backward(batch: int, heads: int, tokens: int, head: int) -> tuple[int, int]:
    """Row sums, and the queries' gradient in float32."""
    rows = 4 * batch * heads * round_up(tokens, FLASH_TOKENS)
    return rows, rows * round_up(head, FLASH_HEAD)


def efficient_backward(batch: int, heads: int, tokens: int, head: int) -> int:
    """The queries' gradient in float32, tile by tile, with a counter per tile."""
    width = next((each for each in EFFICIENT_HEADS if head <= each), head)
    tiles = batch * heads * -(-tokens // EFFICIENT_TOKENS)
    return tiles * (4 * EFFICIENT_TOKENS * width + EFFICIENT_COUNTERS)


# ---- matmuls


def workspaces(platform: Platform, *, bias: bool = False) -> dict[str, int]:
    """What a matmul works in, bytes by name; `bias`: one that cuBLASLt may run, to add a bias in the same kernel."""
    rules = platform.rules
    if not rules.keeps_workspaces:
        return {"matmul workspace": CUBLASLT if bias else platform.workspace}
    return {"cublas": platform.workspace} | ({"cublaslt": CUBLASLT} if bias and not rules.shares_workspaces else {})


def alloc_workspaces(w: Writer, platform: Platform, *, bias: bool = False, thread: str = "") -> None:
    """Where workspaces are kept, those that the thread's first matmul allocates; else each matmul's, freed at once."""
    for name, nbytes in workspaces(platform, bias=bias).items():
        if not w.alive(name + thread):
            w.alloc(name + thread, "workspace", nbytes)
            if not platform.rules.keeps_workspaces:
                w.free(name + thread)


# ---- as nanoGPT calls them


def alloc_sum_scratch(w: Writer, rows: int, columns: int, platform: Platform) -> None:
    """The scratch of `x.sum(0)`, which is freed at once."""
    scratch = enumerate(sum_over_rows(rows, columns, platform))
    w.free(*[w.alloc(f"sum over rows {number}", "workspace", nbytes) for number, nbytes in scratch])


def embedding_backward(w: Writer, name: str, gradient: str, indices: int, rows: int, width: int) -> None:
    """Leaves `gradient` [rows, width]. Many indices are sorted, and up to ten rows of equal ones summed at a time."""
    if indices <= SIMPLE_EMBEDDING:
        w.alloc(gradient, "gradients", 4 * rows * width)
        return

    def scratch(part: str, nbytes: int) -> str:
        return w.alloc(f"{name}.{part}", "workspace", nbytes)

    segments = min(indices, rows)
    partial = indices // 10 + segments
    used = [scratch("sorted", 8 * indices), scratch("order", 8 * indices)]
    scratch("range", 8 * indices)
    w.free(scratch("scan", 16 * indices + 1024 * -(-indices // SORT_TILE) + SORT_DIGITS + 255), f"{name}.range")
    w.alloc(gradient, "gradients", 4 * rows * width)
    used += [scratch("segments", 8 * indices), scratch("segment count", 8)]
    scratch("keys", 8 * indices)
    w.free(scratch("scan", SCAN), f"{name}.keys")
    used += [scratch("partials", 8 * segments), scratch("partial offsets", 8 * segments)]
    w.free(scratch("scan", SCAN))
    used += [scratch("partial count", 8), scratch("offsets", 8 * partial), scratch("sums", 4 * partial * width)]
    w.free(*reversed(used))


class AttentionTape:
    """F.scaled_dot_product_attention of queries, keys and values that are views of one tensor [B, T, 3C].

    The math kernel is not modelled: its runs are written as if memory-efficient.
    """

    def __init__(self, config: RunConfig, writer: Writer, platform: Platform) -> None:
        self.w, head = writer, config.n_embd // config.n_head
        self.width = 4 if config.dtype == "float32" else 2
        kernel = platform.attention(head, config.dtype)
        self.kernel = "efficient" if kernel == "math" else kernel
        self.padded = head % HEAD_MULTIPLE != 0 and self.kernel != "efficient"  # for flash attention
        if self.padded:
            head = round_up(head, HEAD_MULTIPLE)
        self.shape = batch, heads, tokens, head = config.batch_size, config.n_head, config.block_size, head
        self.out_bytes = self.width * batch * heads * tokens * head
        # The softmax's log-sum-exp [B, H, T], in float32.
        self.lse_bytes = 4 * batch * heads * (round_up(tokens, 32) if self.kernel == "efficient" else tokens)

    def saved(self, layer: int) -> list[tuple[str, int]]:
        """What a training forward pass saves: (name, bytes), in the order of allocation."""
        out = f"{layer}.att.padded" if self.padded else f"{layer}.att"
        results = [(out, self.out_bytes), (f"{layer}.lse", self.lse_bytes)]
        if self.kernel == "efficient":
            return results
        if self.kernel == "cudnn":
            return [(f"{layer}.seed", RNG), (f"{layer}.offset", RNG), *results]
        return [*results, (f"{layer}.seed", 2 * RNG), (f"{layer}.offset", RNG)]

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
            w.free(w.alloc("attention scratch", "workspace", cudnn_backward(*self.shape)))
            return gradients
        if self.kernel == "flash":
            rows, sums = flash_backward(*self.shape)
            w.alloc("attention delta", "workspace", rows)
        else:
            rows, sums = 4 * prod(self.shape[:3]), efficient_backward(*self.shape)
            if self.width == 4:  # in half precision the kernel computes this sum itself
                w.alloc("d × out", "workspace", self.out_bytes)
                w.alloc("delta.sum", "workspace", rows)
            w.alloc("attention delta", "workspace", rows)
            if self.width == 4:
                w.free("delta.sum", "d × out")
        w.alloc("attention sums", "workspace", sums)
        w.free("attention sums", "attention delta", *copies)
        return gradients
