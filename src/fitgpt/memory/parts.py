"""What each part of our engine allocates and frees: a cast, a product, a norm, attention, the loss.

Each method stands for a function of engine/pointwise.py, attention.py, block.py, gradients.py or loss.py, and writes its
events in the order in which that function makes them. Names are the engine's own; a tensor is passed on by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..savers import loss_piece_tokens
from .tape import RECORDED, Writer

SCALAR = 4
DICE = 8              # attention kernels keep a seed and an offset, 8 bytes each, whether they drop or not
CUDNN_SCRATCH = 256   # seen in every recorded run
EFFICIENT_COUNTERS = 128  # bytes a head and sequence, seen in recorded runs
HEAD_MULTIPLE = 8     # engine/attention.py pads heads to it
ROWS_A_PARTIAL = 128  # a compiled norm's backward sums so many rows at a time (seen from 4,096 to 12,288 rows)


@dataclass(frozen=True)
class Sizes:
    """The run's shape letters, and the bytes of a number of each kind."""

    b: int
    t: int
    c: int
    heads: int
    vocab: int
    layers: int
    product: int     # bytes of a number in the matrix products
    residual: int    # … in the stream between blocks
    matrix: int      # … in a matrix or table of weights
    bias: bool
    dropout: bool    # where masks are made: in training only
    compiled: bool
    kernel: str      # attention's
    triton: bool     # whether the loss has its fused kernel
    workspace: int   # cuBLAS's
    piece: int       # tokens whose logits exist at once

    @property
    def n(self) -> int:
        return self.b * self.t

    @property
    def padded(self) -> int:
        """C once every head is as wide as the kernels want it; 0 where nothing is padded."""
        head = self.c // self.heads
        return 0 if head % HEAD_MULTIPLE == 0 else -(-head // HEAD_MULTIPLE) * HEAD_MULTIPLE * self.heads


def piece_of(tokens: int, vocab: int, asked: int) -> int:
    return loss_piece_tokens(tokens, vocab, asked)


class Parts:
    def __init__(self, writer: Writer, sizes: Sizes) -> None:
        self.w, self.s = writer, sizes

    # ---- between two matrix products

    def widened(self, name: str) -> str | None:
        """A bfloat16 stream read in the norm's float32; None where it is wide already."""
        return self.w.alloc(f"{name}.wide", "activations", 4 * self.s.n * self.s.c) if self.s.residual < 4 else None

    def norm(self, out: str, x: str) -> str:
        w, s = self.w, self.s
        if s.compiled:
            return w.alloc(out, "activations", s.product * s.n * s.c)
        wide = self.widened(x)
        self._norm_of_wide(out, wide)
        return out

    def _norm_of_wide(self, out: str, *spent: str | None) -> None:
        """The norm in float32, with a mean and a steepness a row, then rounded."""
        w, s = self.w, self.s
        normed = w.alloc("normed" if s.product < 4 else out, "activations", 4 * s.n * s.c)
        w.alloc("mean", "activations", 4 * s.n)
        w.alloc("steepness", "activations", 4 * s.n)
        w.free("mean", "steepness", *(each for each in spent if each))
        if s.product < 4:
            w.alloc(out, "activations", s.product * s.n * s.c)
            w.free(normed)

    def norm_of_sum(self, out: str, x: str) -> str:
        w, s = self.w, self.s
        if s.compiled:
            return w.alloc(out, "activations", s.product * s.n * s.c)
        wide = self.widened(x)
        w.alloc("sum", "activations", 4 * s.n * s.c)
        if wide:
            w.free(wide)
        self._norm_of_wide(out)
        w.free("sum")
        return out

    def add_both(self, out: str) -> str:
        w, s = self.w, self.s
        nbytes = 4 * s.n * s.c
        if s.compiled:
            return w.alloc(out, "activations", s.residual * s.n * s.c)
        if s.product < 4:
            w.alloc("first.wide", "activations", nbytes)
        w.alloc("first+second", "activations", nbytes)
        if s.product < 4:
            w.free("first.wide")
        summed = w.alloc(out if s.residual == 4 else "all three", "activations", nbytes)
        w.free("first+second")
        if s.residual < 4:
            w.alloc(out, "activations", s.residual * s.n * s.c)
            w.free(summed)
        return out

    def norm_backward(self, rounded: str, x: str, *, added: bool, vectors: tuple[str, ...]) -> str:
        """d_x changes in place; leaves it rounded, and the gradients of the norm's vectors as `vectors`.

        Returns the name of the rounded gradient: the stream's own where the two precisions are one.
        """
        w, s = self.w, self.s
        nbytes, wide = s.n * s.c, 4 * s.n * s.c
        if s.compiled:
            w.alloc("mean", "activations", 4 * s.n)
            w.alloc("steepness", "activations", 4 * s.n)
            if s.product != s.residual:
                w.alloc(rounded, "activations", s.product * nbytes)
            partials = [w.alloc(f"{each}.partial", "workspace", 4 * s.c * -(-s.n // ROWS_A_PARTIAL))
                        for each in vectors]
            w.free("mean", "steepness")
            for vector, partial in zip(vectors, partials, strict=True):
                w.alloc(vector, "gradients", 4 * s.c)
                w.free(partial)
            return rounded if s.product != s.residual else "d_x"
        cast = self.widened(x)
        if added:
            w.alloc("sum", "activations", wide)
            if cast:
                w.free(cast)
        w.alloc("normed", "activations", wide)
        w.alloc("mean", "activations", 4 * s.n)
        w.alloc("steepness", "activations", 4 * s.n)
        if s.product < 4:
            w.alloc("d_norm.wide", "activations", wide)
        w.alloc("d_sum", "activations", wide)
        for vector in vectors:
            w.alloc(vector, "gradients", 4 * s.c)
        if s.product < 4:
            w.free("d_norm.wide")
        w.free(w.alloc("d_x+d_sum", "activations", wide))
        if s.product != s.residual:
            w.alloc(rounded, "activations", s.product * nbytes)
        w.free(*(("sum",) if added else (cast,) if cast else ()), "normed", "mean", "steepness", "d_sum")
        return rounded if s.product != s.residual else "d_x"

    # ---- matrix products

    def cast(self, weight: str, numbers: int) -> str | None:
        """The weight in the products' precision, for as long as one product takes."""
        s = self.s
        return self.w.alloc(f"{weight}.cast", "casts", s.product * numbers) if s.matrix != s.product else None

    def product(self, out: str, weight: str, numbers: int, nbytes: int, *, bias: int = 0,
                owner: str = "activations") -> str:
        """`out` of so many bytes, from a weight of so many numbers; `bias` is that vector's length."""
        w, s = self.w, self.s
        casts = [self.cast(weight, numbers)]
        if bias and s.product < 4:
            casts.append(w.alloc(f"{weight}.bias.cast", "casts", s.product * bias))
        w.alloc(out, owner, nbytes)
        self.wake_cublas()
        w.free(*(each for each in casts if each))
        return out

    def wake_cublas(self) -> None:
        """One workspace for each stream that multiplies: recorded work has a stream of its own."""
        name = "cublas of recorded work" if self.w.pool == RECORDED else "cublas"
        if not self.w.alive(name):
            self.w.alloc(name, "workspace", self.s.workspace)

    # ---- attention

    def attend(self, layer: str) -> list[str]:
        """Leaves `att` and the kernel's small state; returns the state's names."""
        w, s = self.w, self.s
        out = s.product * s.n * (s.padded or s.c)
        parts = [w.alloc(f"{layer}{part}.padded", "activations", out) for part in "qkv"] if s.padded else []
        att = f"{layer}att.padded" if s.padded else f"{layer}att"
        lse = 4 * s.n * s.heads
        if s.kernel == "math":
            return self._attend_by_hand(layer)
        if s.kernel == "efficient":
            w.alloc(att, "activations", out)
            state = [w.alloc(f"{layer}lse", "activations", 4 * s.b * s.heads * (-(-s.t // 32) * 32))]
        else:
            state = [w.alloc(f"{layer}seed", "activations", DICE), w.alloc(f"{layer}offset", "activations", DICE)]
            w.alloc(att, "activations", out)
            state = [w.alloc(f"{layer}lse", "activations", lse), *state]
        if s.kernel == "cudnn":
            w.free(w.alloc("attention scratch", "workspace", CUDNN_SCRATCH))
        if s.padded:
            w.alloc(f"{layer}att", "activations", s.product * s.n * s.c)
            w.free(att, *parts)
        return state

    def _attend_by_hand(self, layer: str) -> list[str]:
        """engine/attention._plain: scores, their wide copy, the masked ones and the softmax, each T² a head."""
        w, s = self.w, self.s
        scores = s.b * s.heads * s.t * s.t
        w.alloc("future", "activations", s.t * s.t)
        w.alloc("scores", "activations", s.product * scores)
        w.alloc("scores.scaled", "activations", s.product * scores)
        w.free("scores")
        wide = "scores.scaled"
        if s.product < 4:
            wide = w.alloc("scores.wide", "activations", 4 * scores)
        w.alloc("scores.masked", "activations", 4 * scores)
        w.alloc("probabilities", "activations", 4 * scores)
        w.free("scores.masked", *{wide, "scores.scaled"}, "future")
        if s.product < 4:
            w.alloc("probabilities.rounded", "activations", s.product * scores)
        w.alloc(f"{layer}att.heads", "activations", s.product * s.n * s.c)
        if s.product < 4:
            w.free("probabilities.rounded")
        w.free("probabilities")
        w.alloc(f"{layer}att", "activations", s.product * s.n * s.c)
        w.free(f"{layer}att.heads")
        return []

    def attend_backward(self, out: str) -> None:
        """Three gradients, beside the kernel's scratch, gathered into `out`."""
        w, s = self.w, self.s
        nbytes = s.product * s.n * (s.padded or s.c)
        padded = [w.alloc(f"{part}.padded", "activations", nbytes) for part in ("q", "k", "v", "d", "out")
                  ] if s.padded else []
        if s.kernel == "efficient":
            rows = 4 * s.n * s.heads
            parts = [w.alloc(f"d_{part}", "activations", nbytes) for part in "qkv"]
            w.alloc("d × out", "workspace", nbytes)
            w.alloc("delta.sum", "workspace", rows)
            w.alloc("delta", "workspace", rows)
            w.free("delta.sum", "d × out")
            accumulator = 4 * s.n * (s.padded or s.c) + EFFICIENT_COUNTERS * s.b * s.heads
            w.free("delta", w.alloc("attention scratch", "workspace", accumulator))
        else:
            parts = [w.alloc(f"d_{part}", "activations", nbytes) for part in "qkv"]
            scratch = 4 * s.n * ((s.padded or s.c) + s.heads) + (CUDNN_SCRATCH if s.kernel == "cudnn" else 0)
            w.free(w.alloc("attention scratch", "workspace", scratch))
        w.alloc(out, "activations", 3 * s.product * s.n * s.c)
        w.free(*padded, *reversed(parts))
