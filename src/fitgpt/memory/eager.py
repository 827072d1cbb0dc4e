"""What nanoGPT's model allocates and frees in eager PyTorch on CUDA, op by op: forward, evaluation and backward.

Under autocast, matrix products and attention are in half precision; the residual stream and the layer norms stay in
float32. A weight's half copy is cached until the `with` ends; the graph keeps those of matrices until their backward.
A module's argument lives until its call returns. Half the loss's chain is half precision and `nll_loss` saves a float32
copy, so a logit costs 8 bytes forward and 12 inside nll_loss's backward.
"""

from __future__ import annotations

from . import aten
from .aten import CUBLASLT, Attention, Gpu
from .nanorun import SCALAR, NanoGPTRun
from .tape import Writer

SIMPLE_EMBEDDING = aten.SIMPLE_EMBEDDING


class EagerGPT:
    def __init__(self, run: NanoGPTRun, writer: Writer, gpu: Gpu) -> None:
        self.r, self.w, self.gpu = run, writer, gpu
        self.n, self.c = run.tokens, run.n_embd
        self.half = run.dtype != "float32"
        self.width = 2 if self.half else 4  # bytes of a number where autocast lowers
        self.attend = Attention(run, writer, gpu)
        self.padded = self.attend.padded
        self.casts: list[tuple[str, bool]] = []   # name, and whether a product saves it
        self.accumulate = False                   # whether this backward finds gradients to add to
        self.raw: list[tuple[str, int]] = []      # gradients of the last product, not yet with their parameters

    # forward

    def forward(self, logits: str, loss: str, *, grad: bool) -> None:
        w, r, n, c = self.w, self.r, self.n, self.c
        chain = self.width * n * r.vocab_size
        w.alloc("positions", "activations", 8 * r.block_size)
        w.alloc("tok_emb", "activations", 4 * n * c)
        w.alloc("pos_emb", "activations", 4 * r.block_size * c)
        w.alloc("x0", "activations", 4 * n * c)
        x = self.dropout("x0", 4, grad)
        for i in range(r.n_layer):
            x = self.block(i, x, grad)
        self.norm("ln_f", grad)
        if not grad:
            w.free(x)
        self.cast_weight("wte", r.vocab_size * c, matrix=True)
        self.cast_input("ln_f.out", c)
        w.alloc(logits, "logits", chain)
        self.drop_cast("ln_f.out", grad)
        w.alloc("log_softmax", "logits", chain)
        if self.half:
            w.alloc("log_softmax.float", "logits", 4 * n * r.vocab_size)
        w.alloc(loss, "other", SCALAR)
        w.alloc("total_weight", "other", SCALAR)
        if not grad:
            w.free("total_weight")
            w.free_if_alive("log_softmax.float")
            w.free("log_softmax", "positions")
        w.free("tok_emb", "pos_emb")
        self.drop_norm("ln_f", grad)

    def block(self, i: int, x: str, grad: bool) -> str:
        w, n, c = self.w, self.n, self.c
        self.norm(f"{i}.ln_1", grad)
        self.linear(f"{i}.qkv", f"{i}.ln_1.out", c, 3 * c)
        self.drop_cast(f"{i}.ln_1.out", grad)
        self.attention(i, grad)
        self.linear(f"{i}.proj", None, c, c)
        if not grad:
            w.free(f"{i}.attention")
        if self.padded or not grad:
            w.free(f"{i}.qkv")
        branch = self.dropout(f"{i}.proj", self.width, grad)
        self.drop_norm(f"{i}.ln_1", grad)
        w.alloc(f"{i}.x", "activations", 4 * n * c)
        w.free(branch)

        self.norm(f"{i}.ln_2", grad)
        self.linear(f"{i}.up", f"{i}.ln_2.out", c, 4 * c)
        self.drop_cast(f"{i}.ln_2.out", grad)
        w.alloc(f"{i}.gelu", "activations", self.width * n * 4 * c)
        if not grad:
            w.free(f"{i}.up")
        self.linear(f"{i}.down", None, 4 * c, c)
        if not grad:
            w.free(f"{i}.gelu")
        branch = self.dropout(f"{i}.down", self.width, grad)
        self.drop_norm(f"{i}.ln_2", grad)
        w.alloc(f"x{i + 1}", "activations", 4 * n * c)
        w.free(branch)
        if not grad:
            w.free(f"{i}.x", x)
        return f"x{i + 1}"

    def norm(self, name: str, grad: bool) -> None:
        w = self.w
        w.alloc(f"{name}.out", "activations", 4 * self.n * self.c)
        w.alloc(f"{name}.mean", "activations", 4 * self.n)
        w.alloc(f"{name}.rstd", "activations", 4 * self.n)
        if not grad:
            w.free(f"{name}.mean", f"{name}.rstd")

    def drop_norm(self, name: str, grad: bool) -> None:
        """In float32 the following matrix product saves the norm's output itself, not a half copy of it."""
        if self.half or not grad:
            self.w.free(f"{name}.out")

    def linear(self, name: str, source: str | None, inputs: int, outputs: int) -> None:
        """Arguments are cast from the last to the first: bias, weight, and `source` where it is float32."""
        if self.r.bias:
            self.cast_weight(f"{name}.bias", outputs, matrix=False)
        self.cast_weight(f"{name}.weight", outputs * inputs, matrix=True)
        if source:
            self.cast_input(source, inputs)
        self.w.alloc(name, "activations", self.width * self.n * outputs)
        if not self.w.alive("cublas"):
            self.w.alloc("cublas", "workspace", self.gpu.workspace)
            if self.r.bias:
                self.w.alloc("cublaslt", "workspace", CUBLASLT)

    def attention(self, i: int, grad: bool) -> None:
        """Heads that are no multiple of 8 wide are padded before, and the output copied to its own width after."""
        w = self.w
        for part in self.padded_inputs(i):
            w.alloc(part, "activations", self.attend.out)
        self.attend.forward(i, {}, grad=grad)
        if self.padded:
            if not grad:
                w.free(*self.padded_inputs(i))
            w.alloc(f"{i}.attention", "activations", self.width * self.n * self.c)
            if not grad:
                w.free(f"{i}.attention.wide")

    def padded_inputs(self, i: int) -> list[str]:
        return [f"{i}.{part}" for part in "qkv"] if self.padded else []

    def dropout(self, name: str, width: int, grad: bool) -> str:
        """In training: a mask of a byte a number, then the output, which stands for its input from here on."""
        if not (grad and self.r.dropout):
            return name
        self.w.alloc(f"{name}.mask", "activations", self.n * self.c)
        self.w.alloc(f"{name}.dropped", "activations", width * self.n * self.c)
        self.w.free(name)
        return f"{name}.dropped"

    def cast_weight(self, name: str, numbers: int, *, matrix: bool) -> None:
        if self.half:
            self.w.alloc(f"{name}.half", "casts", 2 * numbers)
            self.casts.append((f"{name}.half", matrix))

    def cast_input(self, name: str, width: int) -> None:
        if self.half:
            self.w.alloc(f"{name}.half", "activations", 2 * self.n * width)

    def drop_cast(self, name: str, grad: bool) -> None:
        if self.half and not grad:
            self.w.free(f"{name}.half")

    def leave_autocast(self, *, grad: bool) -> None:
        """The cache is emptied; with a graph, the matrices in it live on in what the products saved."""
        self.w.free(*(name for name, matrix in self.casts if not (matrix and grad)))
        self.casts = []

    # backward

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None:
        w, r, n, c, v = self.w, self.r, self.n, self.c, self.r.vocab_size
        self.accumulate = accumulate
        w.alloc("d log_softmax", "logits", 4 * n * v)  # the peak of most runs
        w.free("d loss", "total_weight", targets)
        chain = "d log_softmax"
        if self.half:
            w.free("log_softmax.float")
            w.alloc("d log_softmax.half", "logits", 2 * n * v)
            w.free(chain)
            chain = "d log_softmax.half"
        w.alloc("d logits", "logits", self.width * n * v)
        w.free(chain, "log_softmax")
        self.linear_backward("wte", "d logits", "ln_f.out", c, v)
        self.norm_backward("ln_f", f"x{r.n_layer}", c, "wte")
        for i in reversed(range(r.n_layer)):
            self.block_backward(i)
        dx = self.dropout_backward("x0", "dx", 4)
        w.alloc("d pos_emb", "activations", 4 * r.block_size * c)
        self.embedding_backward("wpe", r.block_size)
        w.free("d pos_emb", "positions")
        self.embedding_backward("wte", n)
        w.free(dx, inputs)
        self.tie()

    def block_backward(self, i: int) -> None:
        w, n, c = self.w, self.n, self.c
        self.linear_backward(f"{i}.down", self.branch_gradient(f"{i}.down"), f"{i}.gelu", 4 * c, c)
        self.settle(f"{i}.down")
        w.alloc("d up", "activations", self.width * n * 4 * c)
        w.free("d input", f"{i}.up")
        self.linear_backward(f"{i}.up", "d up", f"{i}.ln_2.out", c, 4 * c)
        self.norm_backward(f"{i}.ln_2", f"{i}.x", c, f"{i}.up")

        self.linear_backward(f"{i}.proj", self.branch_gradient(f"{i}.proj"), f"{i}.attention" if self.padded else None,
                             c, c)
        self.settle(f"{i}.proj")
        self.attention_backward(i)
        self.linear_backward(f"{i}.qkv", "d qkv", f"{i}.ln_1.out", c, 3 * c)
        self.norm_backward(f"{i}.ln_1", f"x{i}" if i or not self.r.dropout else "x0.dropped", c, f"{i}.qkv")

    def branch_gradient(self, name: str) -> str:
        """The residual stream's gradient as a branch sees it: in half precision, and without what dropout zeroed."""
        if not self.half:
            return self.dropout_backward(name, "dx", 4)
        self.w.alloc("d branch", "activations", 2 * self.n * self.c)
        return self.dropout_backward(name, "d branch", 2)

    def dropout_backward(self, name: str, incoming: str, width: int) -> str:
        if not self.r.dropout:
            return incoming
        self.w.alloc(f"d {name}", "activations", width * self.n * self.c)
        self.w.free(f"{name}.mask")
        if incoming != "dx" or name == "x0":
            self.w.free(incoming)
        return f"d {name}"

    def linear_backward(self, name: str, incoming: str, saved: str | None, inputs: int, outputs: int) -> None:
        """Leaves the input's gradient as `d input` and the raw gradients of weight and bias to `settle`."""
        w = self.w
        weight = name if name == "wte" else f"{name}.weight"
        raw = [(weight, inputs * outputs)]
        if self.r.bias and name != "wte":  # a product with a bias computes its input's gradient first
            w.alloc("d input", "activations", self.width * self.n * inputs)
            raw.append((f"{name}.bias", outputs))
        for each, numbers in raw:
            w.alloc(f"{each}.raw" if self.half or name == "wte" else self.fresh(each), "gradients",
                    self.width * numbers)
            if each.endswith(".bias"):
                sums = enumerate(aten.sum_over_rows(self.n, outputs, self.gpu))
                w.free(*[w.alloc(f"sum over rows {at}", "workspace", nbytes) for at, nbytes in sums])
            elif not w.alive("cublas of backward"):
                w.alloc("cublas of backward", "workspace", self.gpu.workspace)
        if len(raw) == 1:
            w.alloc("d input", "activations", self.width * self.n * inputs)
        if incoming != "dx":
            w.free(incoming)
        if self.half:
            w.free(f"{weight}.half")
        if saved:
            w.free(f"{saved}.half" if self.half and saved.endswith(".out") else saved)
        self.raw = raw

    def settle(self, name: str) -> None:
        """Raw gradients become float32 and go to their parameters; the tied matrix waits for its embedding's."""
        for each, numbers in self.raw:
            fresh = self.fresh(each)
            if self.half:
                self.w.alloc(fresh, "gradients", 4 * numbers)
                self.w.free(f"{each}.raw")
            if self.accumulate and name != "wte":
                self.w.free(fresh)

    def fresh(self, parameter: str) -> str:
        """The first gradient of a step becomes the parameter's own; a later one is added to it and dropped."""
        return f"{parameter}.fresh" if self.accumulate else f"{parameter}.grad"

    def norm_backward(self, name: str, saved: str, width: int, linear: str) -> None:
        """The gradient of a norm's input, added in place to the residual stream's."""
        w, nbytes = self.w, 4 * self.n * self.c
        incoming = "d input"
        if self.half:
            incoming = w.alloc("d norm", "activations", nbytes)
            w.free("d input")
        self.settle(linear)
        first = not w.alive("dx")
        out = w.alloc("dx" if first else "d x", "activations", nbytes)
        gradients = [self.fresh(f"{name}.{part}") for part in (("weight", "bias") if self.r.bias else ("weight",))]
        for gradient in gradients:
            w.alloc(gradient, "gradients", 4 * width)
        w.free(incoming, saved, f"{name}.mean", f"{name}.rstd")
        if not first:
            w.free(out)
        if self.accumulate:
            w.free(*gradients)

    def attention_backward(self, i: int) -> None:
        """Three gradients, gathered into one; padded ones are first cut to their own width, then laid out anew."""
        w, narrow = self.w, self.width * self.n * self.c
        spent = [name for name, _ in self.attend.made(i)]
        spent += self.padded_inputs(i) if self.padded else [f"{i}.qkv"]
        incoming = "d input"
        if self.padded:
            incoming = w.alloc("d attention.wide", "activations", self.attend.out)
            w.free("d input")
        parts = self.attend.backward(i, {})
        w.free(incoming, *spent)
        if self.padded:
            for suffix in (".narrow", ".relaid"):
                for at, part in reversed(list(enumerate(parts))):
                    parts[at] = w.alloc(f"d {'qkv'[at]}{suffix}", "activations", narrow)
                    w.free(part)
        w.alloc("d qkv", "activations", 3 * narrow)
        w.free(*parts)

    def embedding_backward(self, name: str, indices: int) -> None:
        w, r = self.w, self.r
        gradient = "wte.embedding" if name == "wte" else self.fresh(name)
        aten.embedding_backward(w, name, gradient, indices, r.vocab_size if name == "wte" else r.block_size, self.c)
        if self.accumulate and name != "wte":
            w.free(gradient)

    def tie(self) -> None:
        """The embedding's gradient is added in place to the head's; in float32, where that one is transposed, anew."""
        w, gradient = self.w, self.fresh("wte")
        if not self.half:
            w.alloc(gradient, "gradients", 4 * self.r.vocab_size * self.c)
            w.free("wte.raw")
        w.free("wte.embedding")
        if self.accumulate:
            w.free(gradient)
