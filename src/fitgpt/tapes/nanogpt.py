"""RunConfig → the tape of a run of nanoGPT's train.py (commit 3adf61e1): load, evaluation, iterations, evaluation.

First the training loop, which holds memory of its own: `logits` outlives its step, the next batch is on the GPU before
the backward pass, and evaluation replaces its `logits` only when the next ones exist. Then the model's forward and
backward passes in eager PyTorch, op by op; the compiled ones are in nanogpt_compiled.py.

Under autocast, matmuls and attention run in half precision; the residual stream and the layer norms stay in float32.
Autocast caches a weight's half-precision copy until its `with` ends; the autograd graph keeps the copies of matrices
until their backward. A module's argument lives until its call returns.
`cross_entropy` runs log_softmax in half precision and nll_loss saves a float32 copy, so a logit costs 8 bytes in
forward and 12 bytes inside nll_loss's backward, which is the peak of most runs.

Letters: N tokens of a micro-batch, C n_embd, V vocab_size, T block_size.
"""

from __future__ import annotations

import math
from functools import partial

from ..config.architectures import parameter_shapes
from ..config.run_config import RunConfig
from ..memory.platform import Platform
from ..memory.tape import Tape, Writer
from . import aten
from .aten import SCALAR, AttentionTape
from .nanogpt_compiled import CompiledGPT

# Batches written of the first evaluation and of a later one: more were not seen to change a figure, fewer were
# (docs/log.md, 2026-11-16).
EVAL_BATCHES = (4, 3)
# Micro-batches written of each iteration between two evaluations, by the number of events of a micro-batch (up to the
# first number): as many as the run has, or fewer of the same parity.
HISTORIES = {True: ((1400, (16, 6, 6, 6, 6, 6)), (2000, (16, 6, 6, 6)), (math.inf, (4, 4, 2))),   # compiled
             False: ((1100, (16, 6, 6, 6, 6, 6)), (1400, (16, 6, 6, 6, 2, 2)), (2000, (16, 6, 6, 6)),
                     (math.inf, (4, 4, 2)))}
MIN_ITERATIONS = {1: 4, 2: 4, 3: 3, 4: 3}  # by gradient_accumulation_steps: iterations written at least
# Names of the batch X: two in turn, so that every second micro-batch has the same names. Y is X's name with a prime.
TRAIN_BATCHES, EVAL_BATCH_NAMES = ("X0", "X1"), ("X2", "X3")


def write(config: RunConfig, platform: Platform, *, eval_batches: tuple[int, int] = EVAL_BATCHES,
          history: tuple[int, ...] = ()) -> Tape:
    """The tape of a run whose dtype, compile and vocab_size are resolved. `eval_batches`: batches written of the first
    evaluation and of the next; `history`: micro-batches of each iteration between them, by default `history_of`'s."""
    writer = Writer()
    model = (CompiledGPT if config.compile else EagerGPT)(config, writer, platform)
    return TrainPy(config, writer, model).run(eval_batches, history)


def history_of(config: RunConfig, events: int) -> tuple[int, ...]:
    """How many micro-batches of each iteration to write, if a micro-batch has that many events.

    Reserved memory grows until the third iteration, in some runs until the fifth, and may depend on the number of
    micro-batches of the first; with deep models less so. See docs/log.md, 2026-11-16.
    """
    micro_steps = config.gradient_accumulation_steps
    written = next(history for up_to, history in HISTORIES[bool(config.compile)] if events <= up_to)
    if len(written) <= MIN_ITERATIONS.get(micro_steps, 0):
        return (micro_steps,) * MIN_ITERATIONS[micro_steps]
    return tuple([min(micro_steps, most if micro_steps % 2 == 0 else max(most - 1, 3)) for most in written])


def parameters(config: RunConfig) -> list[tuple[str, int, bool]]:
    """(name, elements, is a matrix), in the model's order. The head is tied to wte."""
    found = []
    for name, shape in parameter_shapes(config.gpt_config()).items():
        name = name.removeprefix("transformer.").removeprefix("h.")
        for long, short in ((".attn.c_attn", ".c_attn"), (".mlp.c_fc", ".c_fc"), ("wte.weight", "wte"),
                            ("wpe.weight", "wpe")):
            name = name.replace(long, short)
        found.append((name, math.prod(shape), len(shape) == 2))
    return found


class TrainPy:
    """train.py, from top to bottom. Tensors that a call of the model leaves alive are freed here."""

    def __init__(self, config: RunConfig, writer: Writer, model: EagerGPT | CompiledGPT) -> None:
        self.config, self.w, self.model = config, writer, model
        self.scaled = config.dtype == "float16"  # by a GradScaler
        self.parameters = parameters(config)
        self.batch = ""                     # the name of X
        self.outputs: tuple[str, ...] = ()  # the names of `logits` and `loss`
        self.names: tuple[str, ...] = ()    # those of a micro-batch that differ in the next

    def run(self, eval_batches: tuple[int, int], history: tuple[int, ...]) -> Tape:
        w = self.w
        w.phase("load")
        for name, elements, _ in self.parameters:
            w.alloc(name, "weights", 4 * elements)
        self.batch = self.get_batch(TRAIN_BATCHES[0])
        w.phase("first_eval")
        self.evaluate(eval_batches[0], first=True)
        if self.config.eval_only:
            return w.tape()
        w.phase("first_train")
        events = self.micro_batches(range(min(2, self.config.gradient_accumulation_steps, *history[:1])))
        first, *later = history or history_of(self.config, events)
        self.micro_batches(range(2, first))
        self.step(first=True)
        for micro_steps in later:
            w.phase("train")
            self.micro_batches(range(micro_steps))
            w.phase("step")
            w.section("step", self.names, partial(self.step, first=False))
        w.phase("eval")
        self.evaluate(eval_batches[1], first=False)
        return w.tape()

    def get_batch(self, name: str) -> str:
        """X and Y: 8 bytes per token each."""
        for each in (name, f"{name}'"):
            self.w.alloc(each, "data", 8 * self.config.batch_size * self.config.block_size)
        return name

    def evaluate(self, batches: int, *, first: bool) -> None:
        """estimate_loss: its variables live until the next batch replaces them or the function returns."""
        w, batch = self.w, ""
        outputs: tuple[str, ...] = ()
        for number in range(batches):
            # The batch before, X and Y, is freed when the next one exists; its logits and loss after the forward pass.
            replaced, previous = (batch, f"{batch}'") if batch else (), outputs
            batch = self.get_batch(EVAL_BATCH_NAMES[number % 2])
            outputs = (f"logits of {batch}", f"loss of {batch}")
            w.section(("evaluation", number > 0, first and number == 0),
                      (batch, f"{batch}'", *outputs, *replaced, *previous),
                      partial(self.evaluate_batch, outputs, replaced, previous))
        w.free(batch, f"{batch}'", *outputs)

    def evaluate_batch(self, outputs: tuple[str, str], replaced: tuple[str, ...], previous: tuple[str, ...]) -> None:
        self.w.free(*replaced)
        self.model.forward(*outputs, grad=False)
        self.w.free(*previous)
        self.model.leave_autocast(grad=False)

    def micro_batches(self, micro_steps: range) -> int:
        """Writes micro-batches; returns the number of events of the last."""
        w, begin = self.w, 0
        for micro_step in micro_steps:
            begin = w.length
            batch, previous = self.batch, self.outputs
            following = TRAIN_BATCHES[batch == TRAIN_BATCHES[0]]
            outputs = (f"logits of {batch}", f"loss of {batch}")
            self.names = (batch, f"{batch}'", following, f"{following}'", *outputs, *previous)
            w.section(("micro-batch", micro_step > 0, bool(previous)), self.names,
                      partial(self.micro_batch, batch, following, outputs, previous, accumulate=micro_step > 0))
            self.batch, self.outputs = following, outputs
        return w.length - begin

    def micro_batch(self, batch: str, following: str, outputs: tuple[str, str], previous: tuple[str, ...], *,
                    accumulate: bool) -> None:
        w, (logits, loss) = self.w, outputs
        self.model.forward(logits, "mean loss", grad=True)
        w.free(*previous)
        w.alloc(loss, "other", SCALAR)
        w.free("mean loss")
        self.model.leave_autocast(grad=True)
        self.get_batch(following)
        if self.scaled:
            if not w.alive("scale"):
                w.alloc("scale", "optimizer", SCALAR)
                w.alloc("growth tracker", "optimizer", SCALAR)
            w.alloc("scaled loss", "other", SCALAR)
        w.alloc("d_root", "other", SCALAR)
        if self.scaled:
            w.alloc("d_scaled", "other", SCALAR)
        w.alloc("d_loss", "other", SCALAR)
        if self.scaled:
            w.free("d_scaled")
        self.model.backward(batch, f"{batch}'", accumulate=accumulate)
        w.free("d_root")
        if self.scaled:
            w.free("scaled loss")

    def step(self, *, first: bool) -> None:
        """Fused AdamW allocates its state in the first step, that of the decayed matrices first."""
        w = self.w

        def scalar(name: str) -> str:
            return w.alloc(name, "other", SCALAR)

        if self.scaled:  # GradScaler.unscale_: the inverse of the scale, computed in float64, found_inf, copies of both
            w.alloc("scale.wide", "other", 2 * SCALAR)
            w.alloc("inverse.wide", "other", 2 * SCALAR)
            w.free("scale.wide")
            scalar("inverse")
            w.free("inverse.wide")
            scalar("none found")
            scalar("found_inf")
            w.free(scalar("inverse.copy"), "none found", "inverse")
        if self.config.grad_clip:  # clip_grad_norm_: partial sums, a norm per gradient, the total norm, the coefficient
            w.alloc("partial norms", "other", aten.norm_partials([elements for _, elements, _ in self.parameters]))
            norms = [scalar(f"{name}.norm") for name, _, _ in self.parameters]
            w.free("partial norms")
            w.alloc("all norms", "other", SCALAR * len(norms))
            scalar("norm")
            w.free("all norms", *norms)
            scalar("norm + 1e-6")
            scalar("1 / norm")
            scalar("coefficient")
            w.free("1 / norm", "norm + 1e-6")
            scalar("clamped")
            w.free("coefficient", "clamped", "norm")
        if self.scaled:
            scalar("found_inf of all")
        if first:
            for name, elements, _ in sorted(self.parameters, key=lambda each: not each[2]):
                w.alloc(f"{name}.step", "optimizer", SCALAR)
                w.alloc(f"{name}.exp_avg", "optimizer", 4 * elements)
                w.alloc(f"{name}.exp_avg_sq", "optimizer", 4 * elements)
        if self.scaled:
            w.free("found_inf of all", "found_inf")
        w.free(*(f"{name}.grad" for name, _, _ in self.parameters))


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
        self.linear(logits, "wte", "ln_f.out", c, v, grad)
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
        self.linear(f"{i}.qkv", f"{i}.c_attn", f"{i}.ln_1.out", c, 3 * c, grad)
        # Heads that are not a multiple of 8 wide are padded before attention and sliced after.
        for part in self.padded_inputs(i):
            w.alloc(part, "activations", self.attend.out_bytes)
        self.attend.forward(i, {}, grad=grad)
        if self.padded:
            if not grad:
                w.free(*self.padded_inputs(i))
            w.alloc(f"{i}.att", "activations", self.width * n * c)
            if not grad:
                w.free(f"{i}.att.padded")
        self.linear(f"{i}.proj", f"{i}.attn.c_proj", None, c, c, grad)
        if not grad:
            w.free(f"{i}.att")
        if self.padded or not grad:
            w.free(f"{i}.qkv")
        branch = self.dropout(f"{i}.proj", self.width, grad)
        self.drop_norm(f"{i}.ln_1", grad)
        w.alloc(f"{i}.x_mid", "activations", 4 * n * c)
        w.free(branch)

        self.norm(f"{i}.ln_2", grad)
        self.linear(f"{i}.fc", f"{i}.c_fc", f"{i}.ln_2.out", c, 4 * c, grad)
        w.alloc(f"{i}.gelu", "activations", self.width * n * 4 * c)
        if not grad:
            w.free(f"{i}.fc")
        self.linear(f"{i}.down", f"{i}.mlp.c_proj", None, 4 * c, c, grad)
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

    def linear(self, out: str, module: str, source: str | None, inputs: int, outputs: int, grad: bool) -> None:
        """Leaves `out` [N, outputs]. Autocast casts the arguments from last to first: bias, weight, then `source`
        where it is float32. The head is `wte`, without a bias."""
        w, is_head = self.w, module == "wte"
        bias = self.config.bias and not is_head
        if self.half:
            casts = [(f"{module}.bias.cast", outputs)] if bias else []
            casts.append(("wte.cast" if is_head else f"{module}.weight.cast", outputs * inputs))
            for name, elements in casts:
                w.alloc(name, "casts", 2 * elements)
                self.casts.append((name, not name.endswith(".bias.cast")))
            if source:
                w.alloc(f"{source}.cast", "activations", 2 * self.n * inputs)
        w.alloc(out, "logits" if is_head else "activations", self.width * self.n * outputs)
        aten.alloc_workspaces(w, self.platform, bias=bias)
        if source and self.half and not grad:
            w.free(f"{source}.cast")

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
        wpe = self.new_grad("wpe")
        aten.embedding_backward(w, "wpe", wpe, t, t, c)
        if accumulate:
            w.free(wpe)
        w.free("d_pos_emb", "positions")
        aten.embedding_backward(w, "wte", "wte.embedding", n, v, c)
        w.free(d_x, inputs)
        # The embedding's gradient is added to the head's: in place in half precision; in float32, where the head's is
        # a transposed view, into a new tensor.
        wte = self.new_grad("wte")
        if not self.half:
            w.alloc(wte, "gradients", 4 * v * c)
            w.free("wte.raw")
        w.free("wte.embedding")
        if accumulate:
            w.free(wte)

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
            self.alloc_d_input(inputs)
            raw.append((f"{module}.bias", outputs))
        for each, elements in raw:
            w.alloc(f"{each}.raw" if self.half or module == "wte" else self.new_grad(each), "gradients",
                    self.width * elements)
            if each.endswith(".bias"):
                aten.alloc_sum_scratch(w, self.n, outputs, self.platform)
            else:
                aten.alloc_workspaces(w, self.platform, thread=" of backward")
        if len(raw) == 1:
            self.alloc_d_input(inputs)
        if incoming != "d_x":
            w.free(incoming)
        if self.half:
            w.free(f"{weight}.cast")
        if saved:
            w.free(f"{saved}.cast" if self.half and saved.endswith(".out") else saved)
        self.raw = raw

    def alloc_d_input(self, inputs: int) -> None:
        self.w.alloc("d_input", "activations", self.width * self.n * inputs)
        aten.alloc_workspaces(self.w, self.platform, thread=" of backward")

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
