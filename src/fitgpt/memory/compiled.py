"""What nanoGPT's model allocates and frees when compiled, as the recorded runs of torch 2.11 show it: within about 1 %.

The compiler keeps for backward what eager PyTorch keeps, but no float32 copy of the logits, no layer norm's float32
output, and in evaluation no cast longer than its product. Three half-precision arrays of logits meet in backward: the
logits, their gradient, and zeros for the gradient of the `logits` that are returned and not used. All gradients of
a backward pass are made before the first is added to its parameter's.
"""

from __future__ import annotations

from ..units import MiB
from .nanorun import SCALAR, NanoGPTRun, padded_width
from .tape import Writer

# Of an H200. That a buffer of this size passes by is inferred from reserved bytes, not seen by itself.
L2_CACHE = 60 * MiB


class CompiledGPT:
    def __init__(self, run: NanoGPTRun, writer: Writer, workspace: int) -> None:
        self.r, self.w, self.workspace = run, writer, workspace
        self.n, self.c, self.heads = run.tokens, run.n_embd, run.n_head
        self.half = run.dtype != "float32"
        self.width = 2 if self.half else 4
        self.padded = padded_width(run)
        self.suffix = "grad"         # of a new gradient: "fresh" where there is one to add it to
        self.fresh: list[str] = []
        self.incoming = ""
        self.timed: set[str] = set()  # kernels the compiler has timed already

    def forward(self, logits: str, loss: str, *, grad: bool) -> None:
        w, n, c, v = self.w, self.n, self.c, self.r.vocab_size
        if grad:
            w.alloc("x0", "activations", 4 * n * c)
        self.norm("0.ln_1", grad)
        for i in range(self.r.n_layer):
            self.block(i, grad)
        if not grad:
            w.free("x")
        self.cast("wte", v * c)
        w.alloc(logits, "logits", self.width * n * v)
        if not grad:
            w.free("ln_f.out", *self.casts("wte"))
        for part in ("largest", "log_sum"):
            w.alloc(f"logits.{part}", "activations", 4 * n)
        w.alloc(loss, "other", SCALAR)
        w.alloc("total_weight", "other", SCALAR)
        if not grad:
            w.free("logits.largest", "logits.log_sum", "total_weight")

    def norm(self, name: str, grad: bool) -> None:
        w = self.w
        w.alloc(f"{name}.mean", "activations", 4 * self.n)
        w.alloc(f"{name}.rstd", "activations", 4 * self.n)
        w.alloc(f"{name}.out", "activations", self.width * self.n * self.c)
        if not grad:
            w.free(f"{name}.mean", f"{name}.rstd")

    def cast(self, name: str, numbers: int) -> None:
        if self.half:
            self.w.alloc(f"{name}.half", "casts", 2 * numbers)
            self.time_kernel(f"cast {numbers}")

    def time_kernel(self, kernel: str) -> None:
        """The compiler times variants of a kernel at its first call, and empties the card's cache with a buffer."""
        if kernel not in self.timed:
            self.timed.add(kernel)
            self.w.free(self.w.alloc("timing", "workspace", L2_CACHE))

    def casts(self, name: str) -> list[str]:
        return [f"{name}.half"] if self.half else []

    def linear(self, name: str, inputs: int, outputs: int, grad: bool, *spent: str) -> None:
        """`spent` is what goes after the product where nothing is kept for backward."""
        w = self.w
        self.cast(f"{name}.weight", inputs * outputs)
        w.alloc(name, "activations", self.width * self.n * outputs)
        if not w.alive("cublas"):
            w.alloc("cublas", "workspace", self.workspace)
        if not grad:
            w.free(*self.casts(f"{name}.weight"), *spent)

    def block(self, i: int, grad: bool) -> None:
        w, n, c = self.w, self.n, self.c
        self.linear(f"{i}.qkv", c, 3 * c, grad, f"{i}.ln_1.out")
        self.attention(i, grad)
        self.linear(f"{i}.proj", c, c, grad, f"{i}.attention")
        self.residual(f"{i}.x", grad)
        self.norm(f"{i}.ln_2", grad)
        w.free(f"{i}.proj")
        self.linear(f"{i}.up", c, 4 * c, grad, f"{i}.ln_2.out")
        w.alloc(f"{i}.gelu", "activations", self.width * n * 4 * c)
        self.time_kernel("gelu")
        if not grad:
            w.free(f"{i}.up")
        self.linear(f"{i}.down", 4 * c, c, grad, f"{i}.gelu")
        self.residual(f"x{i + 1}", grad)
        self.norm(f"{i + 1}.ln_1" if i + 1 < self.r.n_layer else "ln_f", grad)
        w.free(f"{i}.down")

    def residual(self, name: str, grad: bool) -> None:
        """Kept for backward; without one, the stream is written once, after the first branch, and added to in place."""
        if grad or not self.w.alive("x"):
            self.w.alloc(name if grad else "x", "activations", 4 * self.n * self.c)

    def attention(self, i: int, grad: bool) -> None:
        w, n = self.w, self.n
        wide = self.width * n * self.padded
        if wide:
            for part in "qkv":
                w.alloc(f"{i}.{part}", "activations", wide)
            if grad:
                w.free(f"{i}.qkv")
            w.alloc(f"{i}.attention.wide", "activations", wide)
        else:
            w.alloc(f"{i}.attention", "activations", self.width * n * self.c)
        w.alloc(f"{i}.lse", "activations", 4 * n * self.heads)
        w.alloc(f"{i}.seed", "activations", 8)
        w.alloc(f"{i}.offset", "activations", 8)
        if wide:
            w.alloc(f"{i}.attention", "activations", self.width * n * self.c)
            if not grad:
                w.free(f"{i}.qkv")
        if not grad:
            w.free(f"{i}.lse", f"{i}.seed", f"{i}.offset", *self.attention_inputs(i))
            if wide:
                w.free(f"{i}.attention.wide")

    def attention_inputs(self, i: int) -> list[str]:
        return [f"{i}.{part}" for part in "qkv"] if self.padded else [f"{i}.qkv"]

    def leave_autocast(self, *, grad: bool) -> None:
        """Casts are part of the compiled code: nothing to empty."""

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None:
        w, r, n, c, v = self.w, self.r, self.n, self.c, self.r.vocab_size
        self.suffix, self.fresh = "fresh" if accumulate else "grad", []
        w.alloc("zeros for logits", "logits", self.width * n * v)
        w.alloc("d logits", "logits", self.width * n * v)
        w.free("d loss", "total_weight", targets, "logits.largest", "logits.log_sum")
        w.alloc("wte.raw", "gradients", self.width * v * c)
        if not w.alive("cublas of backward"):
            w.alloc("cublas of backward", "workspace", self.workspace)
        self.incoming = w.alloc("d ln_f", "activations", self.width * n * c)
        w.free("d logits", "ln_f.out", *self.casts("wte"))
        w.alloc("dx", "activations", 4 * n * c)
        self.norm_backward("ln_f", f"x{r.n_layer}")
        for i in reversed(range(r.n_layer)):
            self.linear_backward(f"{i}.down", 4 * c, c, f"{i}.gelu")
            self.time_kernel("gelu backward")
            w.free(f"{i}.up")  # gelu's backward overwrites the gradient that comes in
            self.linear_backward(f"{i}.up", c, 4 * c, f"{i}.ln_2.out")
            self.norm_backward(f"{i}.ln_2", f"{i}.x")
            self.linear_backward(f"{i}.proj", c, c, None)
            self.attention_backward(i)
            self.linear_backward(f"{i}.qkv", c, 3 * c, f"{i}.ln_1.out")
            self.norm_backward(f"{i}.ln_1", f"x{i}")
        self.gradient("wpe", r.block_size * c)
        self.gradient("wte", v * c)
        w.free(self.incoming, "dx", "wte.raw", inputs, "zeros for logits")
        if accumulate:
            w.free(*self.fresh)

    def gradient(self, parameter: str, numbers: int) -> None:
        self.fresh.append(self.w.alloc(f"{parameter}.{self.suffix}", "gradients", 4 * numbers))

    def norm_backward(self, name: str, saved: str) -> None:
        """Adds to the residual stream's gradient in place; its half copy, the next product's input, takes d's place."""
        self.w.free(saved, f"{name}.mean", f"{name}.rstd")
        for part in ("weight", "bias") if self.r.bias else ("weight",):
            self.gradient(f"{name}.{part}", self.c)

    def linear_backward(self, name: str, inputs: int, outputs: int, saved: str | None) -> None:
        w = self.w
        w.alloc(f"{name}.raw", "gradients", self.width * inputs * outputs)
        outgoing = w.alloc(f"d before {name}", "activations", self.width * self.n * inputs)
        w.free(self.incoming, *self.casts(f"{name}.weight"), *([saved] if saved else []))
        self.gradient(f"{name}.weight", inputs * outputs)
        if self.r.bias:
            self.gradient(f"{name}.bias", outputs)
        w.free(f"{name}.raw")
        self.incoming = outgoing

    def attention_backward(self, i: int) -> None:
        """Scratch sums the queries' gradient in float32; flash attention, for padded heads, rounds them to 32."""
        w, n = self.w, self.n
        wide = self.width * n * (self.padded or self.c)
        rounded = -(-self.padded // self.heads // 32) * 32 * self.heads if self.padded else self.c
        spent = [self.incoming, *self.attention_inputs(i), f"{i}.lse", f"{i}.seed", f"{i}.offset", f"{i}.attention"]
        if self.padded:
            spent += [w.alloc("d attention.wide", "activations", wide), f"{i}.attention.wide"]
        parts = [w.alloc(f"d {part}", "activations", wide) for part in "qkv"]
        w.free(w.alloc("attention scratch", "workspace", 4 * n * (rounded + self.heads)))
        w.free(*spent)
        self.incoming = w.alloc("d qkv", "activations", 3 * self.width * n * self.c)
        w.free(*parts)
