"""What each part of our engine allocates and frees: a cast, a product, a norm, attention, the loss.

Each method stands for a function of engine/pointwise.py, attention.py, block.py, gradients.py or loss.py, and writes
its events in the order in which that function makes them. Names are the engine's own; a tensor goes by its name.
"""

from __future__ import annotations

from typing import NamedTuple

from .tape import RECORDED, Writer

SCALAR = 4
HEAD_MULTIPLE = 8     # engine/attention.py pads heads to it
CUBLASLT = 2**20      # the workspace of products with a bias
NUMBERS_A_TURN = {4: 2048, 2: 1024}  # engine/kernels.py's norm_backward_: by the stream's bytes a number …
PROGRAMS_A_MULTIPROCESSOR = 8        # … and how many of its programs run at once


class Sizes(NamedTuple):
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
    casts: bool      # whether a matrix is cast for a product …
    copies: bool     # … once, and the copy kept
    rounds: bool     # whether the stream is
    widens: bool     # whether a table's rows are, on their way into the stream
    bias: bool
    dropout: bool    # where masks are made: in training only
    compiled: bool
    kernel: str      # attention's
    triton: bool     # whether the loss has its fused kernel
    workspace: int   # cuBLAS's
    sms: int         # multiprocessors of the card
    piece: int       # tokens whose logits exist at once

    @property
    def n(self) -> int:
        return self.b * self.t

    @property
    def padded(self) -> int:
        """C once every head is as wide as the kernels want it; 0 where nothing is padded."""
        head = self.c // self.heads
        return 0 if head % HEAD_MULTIPLE == 0 else -(-head // HEAD_MULTIPLE) * HEAD_MULTIPLE * self.heads


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

    def norm_backward(self, rounded: str, x: str, *, added: bool, vectors: tuple[str, ...], again: str = "") -> str:
        """d_x changes in place; leaves it rounded, the gradients of the norm's vectors, and its output if `again`.

        Returns the name of the rounded gradient: the stream's own where the two precisions are one.
        """
        w, s = self.w, self.s
        numbers, wide = s.n * s.c, 4 * s.n * s.c
        if s.compiled:
            return self._norm_backward_in_one_pass(rounded, vectors, again)
        cast = self.widened(x)
        if added:
            w.alloc("sum", "activations", wide)
            if cast:
                w.free(cast)
        normed = again if again and s.product == 4 else "normed"
        w.alloc(normed, "activations", wide)
        w.alloc("mean", "activations", 4 * s.n)
        w.alloc("steepness", "activations", 4 * s.n)
        if s.product < 4:
            if again:
                w.alloc(again, "activations", s.product * numbers)
            w.alloc("d_norm.wide", "activations", wide)
        w.alloc("d_sum", "activations", wide)
        for vector in vectors:
            w.alloc(vector, "gradients", 4 * s.c)
        if s.product < 4:
            w.free("d_norm.wide")
        w.free(w.alloc("d_x+d_sum", "activations", wide))
        if s.rounds:
            w.alloc(rounded, "activations", s.product * numbers)
        w.free(*(("sum",) if added else (cast,) if cast else ()), *(("normed",) if normed == "normed" else ()),
               "mean", "steepness", "d_sum")
        return rounded if s.rounds else "d_x"

    def _norm_backward_in_one_pass(self, rounded: str, vectors: tuple[str, ...], again: str) -> str:
        """engine/kernels.py's: partial sums a program; the vectors' gradients are views of one tensor."""
        w, s = self.w, self.s
        rows_a_turn = max(1, NUMBERS_A_TURN[s.residual] // (1 << (s.c - 1).bit_length()))
        programs = min(-(-s.n // rows_a_turn), PROGRAMS_A_MULTIPROCESSOR * s.sms)
        count = 2 if s.bias else 1
        w.alloc("norm sums", "workspace", 4 * count * programs * s.c)
        if s.rounds:
            w.alloc(rounded, "activations", s.product * s.n * s.c)
        if again:
            w.alloc(again, "activations", s.product * s.n * s.c)
        w.alloc(vectors[0], "gradients", 4 * count * s.c)
        w.free("norm sums")
        return rounded if s.rounds else "d_x"

    # ---- matrix products

    def cast(self, weight: str, numbers: int) -> str | None:
        """The weight in the products' precision, for as long as one product takes."""
        s = self.s
        return self.w.alloc(f"{weight}.cast", "casts", s.product * numbers) if s.casts and not s.copies else None

    def product(self, out: str, weight: str, numbers: int, nbytes: int, *, bias: int = 0,
                owner: str = "activations") -> str:
        """`out` of so many bytes, from a weight of so many numbers; `bias` is that vector's length."""
        w, s = self.w, self.s
        casts = [self.cast(weight, numbers)]
        if bias and s.product < 4:
            casts.append(w.alloc(f"{weight}.bias.cast", "casts", s.product * bias))
        w.alloc(out, owner, nbytes)
        self.wake_cublas(with_bias=bias > 0)
        w.free(*(each for each in casts if each))
        return out

    def wake_cublas(self, *, with_bias: bool = False) -> None:
        """Workspaces for each stream that multiplies: recorded work has a stream of its own."""
        of = " of recorded work" if self.w.pool == RECORDED else ""
        for name, nbytes, needed in (("cublas", self.s.workspace, True), ("cublaslt", CUBLASLT, with_bias)):
            if needed and not self.w.alive(name + of):
                self.w.alloc(name + of, "workspace", nbytes)

    # ---- the loss

    def cross_entropy(self, rows: int, *, gradient: bool) -> None:
        w, s = self.w, self.s
        if s.triton:
            w.alloc("losses", "other", 4 * rows)
        else:
            self._plain_cross_entropy(rows, gradient=gradient)
        if gradient:
            w.alloc("losses.sum", "other", SCALAR)
        w.free("losses")
        if gradient:
            w.free("losses.sum")

    def _plain_cross_entropy(self, rows: int, *, gradient: bool) -> None:
        """loss.plain_cross_entropy_: in float32, in a copy of the piece where logits are rounded."""
        w, s = self.w, self.s
        spent = [w.alloc("logits.wide", "logits", 4 * rows * s.vocab)] if s.product < 4 else []
        spent += [w.alloc("counted", "other", rows), w.alloc("chosen", "other", 8 * rows)]
        w.free(w.alloc("highest", "other", 4 * rows))
        spent += [w.alloc(name, "other", 4 * rows) for name in ("target logits", "exp sums")]
        if gradient:
            spent.append(w.alloc("weight", "other", 4 * rows))
            for each in ("weight / sums", "-weight"):
                w.free(w.alloc(each, "other", 4 * rows))
        w.alloc("log", "other", 4 * rows)
        w.alloc("difference", "other", 4 * rows)
        w.free("log")
        w.alloc("losses", "other", 4 * rows)
        w.free("difference", *spent)
