"""What nanoGPT's model allocates and frees in eager PyTorch on CUDA, op by op: forward, evaluation and backward.

Under autocast, matmuls and attention run in half precision; the residual stream and the layer norms stay in float32.
Autocast caches a weight's half-precision copy until its `with` ends; the autograd graph keeps the copies of matrices
until their backward. A module's argument lives until its call returns.
`cross_entropy` runs log_softmax in half precision and nll_loss saves a float32 copy, so a logit costs 8 bytes in
forward and 12 bytes inside nll_loss's backward, which is the peak of most runs.

Letters: N tokens of a micro-batch, C n_embd, V vocab_size, T block_size.
"""

from __future__ import annotations

from ...config.run_config import RunConfig
from ...memory.platform import Platform
from ...memory.tape import Writer
from . import aten
from .aten import CUBLASLT, SCALAR, AttentionTape


class EagerGPT:
    """model.GPT, eager. `width`: bytes per element where autocast lowers the precision."""

    def __init__(self, config: RunConfig, writer: Writer, platform: Platform) -> None:
        self.config, self.w, self.platform = config, writer, platform
        self.n, self.c = config.batch_size * config.block_size, config.n_embd
        self.half = config.dtype != "float32"
        self.width = 2 if self.half else 4
        self.attend = AttentionTape(config, writer, platform)
        self.padded = self.attend.padded
        self.casts: list[tuple[str, bool]] = []   # name, and whether a matmul saves it for backward
        self.accumulate = False                   # whether this backward adds to existing gradients
        self.raw: list[tuple[str, int]] = []      # the last matmul's gradients, before `accumulate_grads`: name, size

    # ---- forward

    def forward(self, logits: str, loss: str, *, grad: bool) -> None:
        """Leaves `logits` and `loss`; with `grad`, what backward needs too."""
        w, n, c, t, v = self.w, self.n, self.c, self.config.block_size, self.config.vocab_size
        w.alloc("positions", "activations", 8 * t)
        w.alloc("tok_emb", "activations", 4 * n * c)
        w.alloc("pos_emb", "activations", 4 * t * c)
        w.alloc("0.x", "activations", 4 * n * c)
        x = self.dropout("0.x", 4, grad)
        for i in range(self.config.n_layer):
            x = self.block(i, x, grad)
        self.norm("ln_f", grad)
        if not grad:
            w.free(x)
        self.cast_weight("wte", v * c, matrix=True)
        self.cast_input("ln_f.out", c)
        w.alloc(logits, "logits", self.width * n * v)
        self.drop_cast("ln_f.out", grad)
        w.alloc("log_softmax", "logits", self.width * n * v)
        if self.half:
            w.alloc("log_softmax.float", "logits", 4 * n * v)
        w.alloc(loss, "other", SCALAR)
        w.alloc("total_weight", "other", SCALAR)
        if not grad:
            w.free("total_weight")
            w.free_if_alive("log_softmax.float")
            w.free("log_softmax", "positions")
        w.free("tok_emb", "pos_emb")
        self.drop_norm("ln_f", grad)

    def block(self, i: int, x: str, grad: bool) -> str:
        """From `x` to the next block's input, whose name it returns. `{i}.x_mid` lies between attention and MLP."""
        w, n, c = self.w, self.n, self.c
        self.norm(f"{i}.ln_1", grad)
        self.linear(f"{i}.qkv", f"{i}.c_attn", f"{i}.ln_1.out", c, 3 * c)
        self.drop_cast(f"{i}.ln_1.out", grad)
        self.attention(i, grad)
        self.linear(f"{i}.proj", f"{i}.attn.c_proj", None, c, c)
        if not grad:
            w.free(f"{i}.att")
        if self.padded or not grad:
            w.free(f"{i}.qkv")
        branch = self.dropout(f"{i}.proj", self.width, grad)
        self.drop_norm(f"{i}.ln_1", grad)
        w.alloc(f"{i}.x_mid", "activations", 4 * n * c)
        w.free(branch)

        self.norm(f"{i}.ln_2", grad)
        self.linear(f"{i}.fc", f"{i}.c_fc", f"{i}.ln_2.out", c, 4 * c)
        self.drop_cast(f"{i}.ln_2.out", grad)
        w.alloc(f"{i}.gelu", "activations", self.width * n * 4 * c)
        if not grad:
            w.free(f"{i}.fc")
        self.linear(f"{i}.down", f"{i}.mlp.c_proj", None, 4 * c, c)
        if not grad:
            w.free(f"{i}.gelu")
        branch = self.dropout(f"{i}.down", self.width, grad)
        self.drop_norm(f"{i}.ln_2", grad)
        w.alloc(f"{i + 1}.x", "activations", 4 * n * c)
        w.free(branch)
        if not grad:
            w.free(f"{i}.x_mid", x)
        return f"{i + 1}.x"

    def norm(self, name: str, grad: bool) -> None:
        """`{name}.out` [N, C], and for backward a mean and an rstd per token, all in float32."""
        w = self.w
        w.alloc(f"{name}.out", "activations", 4 * self.n * self.c)
        w.alloc(f"{name}.mean", "activations", 4 * self.n)
        w.alloc(f"{name}.rstd", "activations", 4 * self.n)
        if not grad:
            w.free(f"{name}.mean", f"{name}.rstd")

    def drop_norm(self, name: str, grad: bool) -> None:
        """In float32 the following matmul saves the norm's output itself, not a half-precision copy."""
        if self.half or not grad:
            self.w.free(f"{name}.out")

    def linear(self, out: str, module: str, source: str | None, inputs: int, outputs: int) -> None:
        """Leaves `out` [N, outputs]. Autocast casts the arguments from last to first: bias, weight, then `source`
        where it is float32."""
        if self.config.bias:
            self.cast_weight(f"{module}.bias", outputs, matrix=False)
        self.cast_weight(f"{module}.weight", outputs * inputs, matrix=True)
        if source:
            self.cast_input(source, inputs)
        self.w.alloc(out, "activations", self.width * self.n * outputs)
        if not self.w.alive("cublas"):
            self.w.alloc("cublas", "workspace", self.platform.workspace)
            if self.config.bias:
                self.w.alloc("cublaslt", "workspace", CUBLASLT)

    def attention(self, i: int, grad: bool) -> None:
        """Leaves `{i}.att` [N, C]. Heads that are not a multiple of 8 wide are padded before and sliced after."""
        w = self.w
        for part in self.padded_inputs(i):
            w.alloc(part, "activations", self.attend.out_bytes)
        self.attend.forward(i, {}, grad=grad)
        if self.padded:
            if not grad:
                w.free(*self.padded_inputs(i))
            w.alloc(f"{i}.att", "activations", self.width * self.n * self.c)
            if not grad:
                w.free(f"{i}.att.padded")

    def padded_inputs(self, i: int) -> list[str]:
        return [f"{i}.{part}" for part in "qkv"] if self.padded else []

    def dropout(self, name: str, width: int, grad: bool) -> str:
        """In training, a mask of 1 byte per element, then the output, which replaces `name`. Returns its name."""
        if not (grad and self.config.dropout):
            return name
        self.w.alloc(f"{name}.mask", "activations", self.n * self.c)
        self.w.alloc(f"{name}.dropped", "activations", width * self.n * self.c)
        self.w.free(name)
        return f"{name}.dropped"

    def cast_weight(self, name: str, elements: int, *, matrix: bool) -> None:
        if self.half:
            self.w.alloc(f"{name}.cast", "casts", 2 * elements)
            self.casts.append((f"{name}.cast", matrix))

    def cast_input(self, name: str, width: int) -> None:
        if self.half:
            self.w.alloc(f"{name}.cast", "activations", 2 * self.n * width)

    def drop_cast(self, name: str, grad: bool) -> None:
        if self.half and not grad:
            self.w.free(f"{name}.cast")

    def leave_autocast(self, *, grad: bool) -> None:
        """Empties autocast's cache. With `grad`, matrices live on: the matmuls saved them."""
        self.w.free(*(name for name, matrix in self.casts if not (matrix and grad)))
        self.casts = []

    # ---- backward

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None:
        """Frees what forward saved, `inputs` and `targets`; leaves `{parameter}.grad`. `accumulate`: not the first
        micro-batch of a step."""
        w, n, c, t, v = self.w, self.n, self.c, self.config.block_size, self.config.vocab_size
        self.accumulate = accumulate
        w.alloc("d_log_softmax", "logits", 4 * n * v)  # the peak of most runs
        w.free("d_loss", "total_weight", targets)
        chain = "d_log_softmax"
        if self.half:
            w.free("log_softmax.float")
            w.alloc("d_log_softmax.half", "logits", 2 * n * v)
            w.free(chain)
            chain = "d_log_softmax.half"
        w.alloc("d_logits", "logits", self.width * n * v)
        w.free(chain, "log_softmax")
        self.linear_backward("wte", "d_logits", "ln_f.out", c, v)
        self.norm_backward("ln_f", f"{self.config.n_layer}.x", "wte")
        for i in reversed(range(self.config.n_layer)):
            self.block_backward(i)
        d_x = self.dropout_backward("0.x", "d_x", 4)
        w.alloc("d_pos_emb", "activations", 4 * t * c)
        self.embedding_grad("wpe", t, t)
        w.free("d_pos_emb", "positions")
        self.embedding_grad("wte", n, v)
        w.free(d_x, inputs)
        self.tied_grad()

    def block_backward(self, i: int) -> None:
        w, n, c = self.w, self.n, self.c
        d_down = self.branch_gradient(f"{i}.down")
        self.linear_backward(f"{i}.mlp.c_proj", d_down, f"{i}.gelu", 4 * c, c)
        self.accumulate_grads(f"{i}.mlp.c_proj")
        w.alloc("d_fc", "activations", self.width * n * 4 * c)
        w.free("d_input", f"{i}.fc")
        self.linear_backward(f"{i}.c_fc", "d_fc", f"{i}.ln_2.out", c, 4 * c)
        self.norm_backward(f"{i}.ln_2", f"{i}.x_mid", f"{i}.c_fc")

        d_proj = self.branch_gradient(f"{i}.proj")
        self.linear_backward(f"{i}.attn.c_proj", d_proj, f"{i}.att" if self.padded else None, c, c)
        self.accumulate_grads(f"{i}.attn.c_proj")
        self.attention_backward(i)
        self.linear_backward(f"{i}.c_attn", "d_qkv", f"{i}.ln_1.out", c, 3 * c)
        x = "0.x.dropped" if i == 0 and self.config.dropout else f"{i}.x"
        self.norm_backward(f"{i}.ln_1", x, f"{i}.c_attn")

    def branch_gradient(self, name: str) -> str:
        """The residual stream's gradient as a branch sees it: in half precision, with the dropout mask applied."""
        if not self.half:
            return self.dropout_backward(name, "d_x", 4)
        self.w.alloc("d_branch", "activations", 2 * self.n * self.c)
        return self.dropout_backward(name, "d_branch", 2)

    def dropout_backward(self, name: str, incoming: str, width: int) -> str:
        if not self.config.dropout:
            return incoming
        gradient = self.w.alloc(f"d_{name}", "activations", width * self.n * self.c)
        self.w.free(f"{name}.mask")
        if incoming != "d_x" or name == "0.x":
            self.w.free(incoming)
        return gradient

    def linear_backward(self, module: str, incoming: str, saved: str | None, inputs: int, outputs: int) -> None:
        """Leaves the input's gradient as `d_input` and the raw gradients of weight and bias for `accumulate_grads`."""
        w = self.w
        weight = module if module == "wte" else f"{module}.weight"
        raw = [(weight, inputs * outputs)]
        if self.config.bias and module != "wte":  # a matmul with a bias computes its input's gradient first
            w.alloc("d_input", "activations", self.width * self.n * inputs)
            raw.append((f"{module}.bias", outputs))
        for each, elements in raw:
            w.alloc(f"{each}.raw" if self.half or module == "wte" else self.new_grad(each), "gradients",
                    self.width * elements)
            if each.endswith(".bias"):
                sums = enumerate(aten.sum_over_rows(self.n, outputs, self.platform))
                w.free(*[w.alloc(f"sum over rows {at}", "workspace", nbytes) for at, nbytes in sums])
            elif not w.alive("cublas of backward"):
                w.alloc("cublas of backward", "workspace", self.platform.workspace)
        if len(raw) == 1:
            w.alloc("d_input", "activations", self.width * self.n * inputs)
        if incoming != "d_x":
            w.free(incoming)
        if self.half:
            w.free(f"{weight}.cast")
        if saved:
            w.free(f"{saved}.cast" if self.half and saved.endswith(".out") else saved)
        self.raw = raw

    def accumulate_grads(self, module: str) -> None:
        """Casts raw gradients to float32 and adds them to `.grad`. The tied wte waits for the embedding's gradient."""
        for each, elements in self.raw:
            gradient = self.new_grad(each)
            if self.half:
                self.w.alloc(gradient, "gradients", 4 * elements)
                self.w.free(f"{each}.raw")
            if self.accumulate and module != "wte":
                self.w.free(gradient)

    def new_grad(self, parameter: str) -> str:
        """A step's first gradient becomes `.grad` itself; a later one is added to it and freed."""
        return f"{parameter}.fresh" if self.accumulate else f"{parameter}.grad"

    def norm_backward(self, name: str, saved: str, module: str) -> None:
        """Adds the gradient of a norm's input to the residual stream's, `d_x`. `module`: the linear layer after it."""
        w, nbytes = self.w, 4 * self.n * self.c
        incoming = "d_input"
        if self.half:
            incoming = w.alloc("d_norm", "activations", nbytes)
            w.free("d_input")
        self.accumulate_grads(module)
        first = not w.alive("d_x")
        out = w.alloc("d_x" if first else "d_x.added", "activations", nbytes)
        gradients = [self.new_grad(f"{name}.{part}")
                     for part in (("weight", "bias") if self.config.bias else ("weight",))]
        for gradient in gradients:
            w.alloc(gradient, "gradients", 4 * self.c)
        w.free(incoming, saved, f"{name}.mean", f"{name}.rstd")
        if not first:
            w.free(out)
        if self.accumulate:
            w.free(*gradients)

    def attention_backward(self, i: int) -> None:
        """Leaves `d_qkv` [N, 3C]. Gradients of padded heads are first sliced, then made contiguous."""
        w, nbytes = self.w, self.width * self.n * self.c
        saved = [name for name, _ in self.attend.saved(i)]
        saved += self.padded_inputs(i) if self.padded else [f"{i}.qkv"]
        incoming = "d_input"
        if self.padded:
            incoming = w.alloc("d_att.padded", "activations", self.attend.out_bytes)
            w.free("d_input")
        parts = self.attend.backward(i, {})
        w.free(incoming, *saved)
        if self.padded:
            for suffix in (".narrow", ".relaid"):
                for at, part in reversed(list(enumerate(parts))):
                    parts[at] = w.alloc(f"d_{'qkv'[at]}{suffix}", "activations", nbytes)
                    w.free(part)
        w.alloc("d_qkv", "activations", 3 * nbytes)
        w.free(*parts)

    def embedding_grad(self, table: str, indices: int, rows: int) -> None:
        """The gradient of `table` [rows, C] from `indices` rows. wte's waits for `tied_grad`."""
        gradient = "wte.embedding" if table == "wte" else self.new_grad(table)
        aten.embedding_backward(self.w, table, gradient, indices, rows, self.c)
        if self.accumulate and table != "wte":
            self.w.free(gradient)

    def tied_grad(self) -> None:
        """Adds the embedding's gradient to the head's: in place in half precision; in float32, where the head's is a
        transposed view, into a new tensor."""
        w, gradient = self.w, self.new_grad("wte")
        if not self.half:
            w.alloc(gradient, "gradients", 4 * self.config.vocab_size * self.c)
            w.free("wte.raw")
        w.free("wte.embedding")
        if self.accumulate:
            w.free(gradient)
