"""What nanoGPT's model allocates and frees under torch.compile: three graphs, planned once and run at every step.

Three parts: the kernels that Inductor (torch 2.11) makes of the forward pass, for evaluation and training; those of the
backward pass; and the model, which runs the graphs as inductor.py plans their buffers. To the byte what recorded runs
of torch 2.11 on an H200 did; the thresholds are those of these runs.

Letters: N tokens of a micro-batch, C n_embd, V vocab_size, T block_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..config.run_config import RunConfig
from ..memory.platform import Platform
from ..memory.tape import Writer
from .aten import SCALAR, AttentionTape, alloc_sum_scratch, alloc_workspaces, round_up
from .inductor import Buffer, BufferPlan, GraphWriter, KernelGraph, plan_buffers

# ---- padding of the head. Where the vocabulary is not a multiple of 8 (float32: 4), Inductor times each of the head's
# three matmuls on the GPU, unpadded and padded, and pads where that is at least a tenth faster
# (torch/_inductor/fx_passes/pad_mm.py). Which of them are faster cannot be computed: docs/log.md lists the runs. A
# padded copy of the logits' gradient is as large as the logits.

ODD_SIZES = "odd sizes padded as on an H200"
MULTIPLE, MULTIPLE_FLOAT32 = 8, 4  # elements: 16 bytes
# Half precision. Below FEW_TOKENS the logits' matmul was faster unpadded; up to SMALL_VOCABULARY and below LITTLE_WORK
# elements of its input, all three were.
FEW_TOKENS, SMALL_VOCABULARY, LITTLE_WORK = 1024, 128, 4 * 2**20
# float32. Vocabularies from which the logits' matmul was padded, and those of its gradients.
LARGE_FLOAT32, LARGER_FLOAT32 = 4096, 8192
WIDE_GRADIENT, WIDE_GRADIENT_FLOAT32 = 512, 1024     # n_embd from which the matmul of the weight's gradient was padded


def padding_multiple(dtype: str) -> int:
    return MULTIPLE_FLOAT32 if dtype == "float32" else MULTIPLE


class HeadPadding(NamedTuple):
    """Which of the head's matmuls are padded: the one that makes the logits, and those of its two gradients."""

    columns: int  # the vocabulary, padded
    timed: bool   # whether the compiler times the matmuls at all
    forward: bool = False
    input_grad: bool = False
    weight_grad: bool = False


def head_padding(config: RunConfig) -> HeadPadding:
    n, c, v = config.batch_size * config.block_size, config.n_embd, config.vocab_size
    columns = round_up(v, padding_multiple(config.dtype))
    if columns == v:
        return HeadPadding(columns, timed=False)
    if config.dtype == "float32":
        return HeadPadding(columns, timed=True, forward=v >= LARGE_FLOAT32, input_grad=v >= LARGER_FLOAT32,
                           weight_grad=v >= LARGER_FLOAT32 and c >= WIDE_GRADIENT_FLOAT32)
    if v <= SMALL_VOCABULARY and n * c < LITTLE_WORK:
        return HeadPadding(columns, timed=True)
    return HeadPadding(columns, timed=True, forward=n >= FEW_TOKENS, input_grad=True,
                       weight_grad=c >= WIDE_GRADIENT or v <= SMALL_VOCABULARY)


def has_odd_sizes(dtype: str, tokens: int, vocab_size: int) -> bool:
    """Whether the compiler times padded matmuls. Padding of the tokens of a micro-batch is not on the tape."""
    return bool(vocab_size % padding_multiple(dtype) or tokens % padding_multiple(dtype))


# ---- the forward graph. Casts are part of it, and none lives longer than its use. Inductor writes the residual stream
# to memory only where a kernel would otherwise read five buffers for it; for backward, norms save their normalised
# input instead.

MAX_READS = 4                # terms of the residual stream's sum, up to which it is not written to memory
# Up to FEW_SEQUENCES (with dropout FEW_SEQUENCES_DROPOUT) the first norm's input is cheaper to save than the rows of
# both embeddings. Without dropout and with n_embd above WIDE it is one sequence fewer (seen at 768 and more, and not at
# up to 576).
FEW_SEQUENCES, FEW_SEQUENCES_DROPOUT, WIDE = 2, 4, 670
LINE, LONG_ROW = 128, 1024   # rows of more than 1024 elements are aligned to 128 bytes
LOSS_ROWS = 8192             # tokens whose losses one kernel sums
# Elements of the first norm per multiprocessor, rows rounded up to a power of two: above it, Inductor also times a
# variant that takes fewer elements of a row (seen from 2048 rows of 768 on, not up to 1024 of 1024).
NORM_ELEMENTS_PER_SM = 2**20 / 132
ATTENTION_BUFFERS = 5        # that Inductor numbers for one attention: the op and what it returns
# Of a norm's backward kernel: programs per multiprocessor, and the fewest and most rows per program.
PROGRAMS_PER_SM, MIN_ROWS, MAX_ROWS = 8, 16, 128


def splits_loss_rows(tokens: int, sms: int) -> bool:
    """Whether a token's loss is shared among several programs: few rows leave multiprocessors idle."""
    return tokens < 2 * sms


class GraphShapes:
    """Buffers of one run, by what they are. `width` and `dtype`: bytes per element and kind of the matmuls."""

    def __init__(self, config: RunConfig, platform: Platform) -> None:
        self.config = config
        self.n, self.c, self.v = config.batch_size * config.block_size, config.n_embd, config.vocab_size
        self.half = config.dtype != "float32"
        self.width, self.dtype = (2, "half") if self.half else (4, "float")
        self.padding, self.sms = head_padding(config), platform.sms
        self.norm_params = ("weight", "bias") if config.bias else ("weight",)
        self.wpe_grad = self.gradient("wpe", config.block_size * self.c)
        self.splits_loss_rows = splits_loss_rows(self.n, platform.sms)
        few = FEW_SEQUENCES_DROPOUT if config.dropout else FEW_SEQUENCES - (self.c > WIDE)
        self.saves_embeddings = config.batch_size > few  # instead of the first norm's input
        share = max(self.n // (PROGRAMS_PER_SM * platform.sms), 1)
        self.programs = -(-self.n // min(max(1 << (share.bit_length() - 1), MIN_ROWS), MAX_ROWS))

    def matrix(self, name: str, rows: int, columns: int, owner: str = "activations") -> Buffer:
        """[rows, columns] in the matmuls' precision; long rows are aligned."""
        stride = round_up(columns * self.width, LINE) // self.width if columns > LONG_ROW else columns
        return Buffer(name, owner, self.width * ((rows - 1) * stride + columns), self.dtype)

    def residual(self, name: str) -> Buffer:
        """[N, C] in float32."""
        return Buffer(name, "activations", 4 * self.n * self.c, "float")

    def branch(self, name: str) -> Buffer:
        """[N, C] in the matmuls' precision."""
        return Buffer(name, "activations", self.width * self.n * self.c, self.dtype)

    def per_token(self, name: str) -> Buffer:
        """[N] in float32."""
        return Buffer(name, "activations", 4 * self.n, "float")

    def mask(self, name: str) -> Buffer:
        """[N, C], 1 byte per element."""
        return Buffer(name, "activations", self.n * self.c, "bool")

    def gradient(self, parameter: str, elements: int) -> Buffer:
        return Buffer(f"{parameter}.grad", "gradients", 4 * elements, "float")


class ForwardGraph(GraphWriter):
    """Writes the forward graph. `grad`: whether a backward pass will follow."""

    def __init__(self, shapes: GraphShapes, attend: AttentionTape, *, grad: bool) -> None:
        super().__init__()
        self.s, self.config, self.attend, self.grad = shapes, shapes.config, attend, grad
        self.dropout = grad and self.config.dropout > 0
        self.norm_virtual = 2 + self.dropout if grad else 3  # statistics and random numbers that are never allocated
        self.terms: list[str] = []  # buffers whose sum is the residual stream
        self.input_terms = 0        # more terms, which are inputs of the graph

    def graph(self) -> KernelGraph:
        c, layers = self.s.c, self.config.n_layer
        self.embed()
        for i in range(layers):
            self.matmul(f"{i}.qkv", f"{i}.ln_1.out", self.casts(f"{i}.c_attn", c, 3 * c), 3 * c,
                        save=not self.attend.padded)
            self.attention(i)
            self.norm(f"{i}.ln_2", f"{i}.proj")
            self.mlp(i)
            self.norm(f"{i + 1}.ln_1" if i + 1 < layers else "ln_f", f"{i}.down")
        self.loss()
        return KernelGraph(self.kernels, frozenset(self.outputs), numbers=self.numbers)

    def embed(self) -> None:
        """The embeddings and the first norm. For backward, it saves rows of both embeddings or the norm's input."""
        s, t = self.s, self.config.block_size
        saves_embeddings = self.grad and s.saves_embeddings
        reads: list[str] = []
        if self.grad:
            self.add(Buffer("positions", "activations", 8 * t, "int"), output=True, timed="positions")
        if saves_embeddings:
            reads.append(self.add(Buffer("pos_emb", "activations", 4 * t * s.c, "float"), output=True,
                                  timed="rows of positions"))
        if self.dropout:
            reads.append(self.add(Buffer("seeds", "activations", 8 * (2 * self.config.n_layer + 1), "int")))
        makes = [s.mask("0.x.mask")] if self.dropout else []
        out, rstd = s.branch("0.ln_1.out"), s.per_token("0.ln_1.rstd")
        if saves_embeddings:
            makes += [s.residual("tok_emb"), s.per_token("0.ln_1.mean"), rstd, out]
        else:
            makes += [s.residual("0.ln_1.normed"), out, rstd] if self.grad else [out]
        varied = not self.grad and s.n * (1 << (s.c - 1).bit_length()) > NORM_ELEMENTS_PER_SM * s.sms
        self.add(*makes, reads=reads, output=self.grad, timed="embedding" if varied else "", virtual=self.norm_virtual)
        self.terms = ["tok_emb", "pos_emb"] if saves_embeddings else []
        self.input_terms = 0 if saves_embeddings else 3  # tokens, and both embeddings' weights
        self.terms += ["0.x.mask"] if self.dropout else []

    def norm(self, name: str, branch: str) -> None:
        """Adds a branch to the residual stream and normalises the sum."""
        s = self.s
        reads = [*self.terms, branch]
        makes: list[Buffer] = []
        self.terms.append(branch)
        if self.config.bias and not s.half:  # in half precision the matmul adds the bias
            self.input_terms += 1
        if self.dropout:
            makes.append(s.mask(f"{branch}.mask"))
            self.terms.append(f"{branch}.mask")
            reads.append("seeds")
        normed, out = s.residual(f"{name}.normed"), s.branch(f"{name}.out")
        inplace: dict[str, list[str]] = {}
        last = name == "ln_f"
        if len(self.terms) + self.input_terms <= MAX_READS:
            if last:  # no later kernel reads the residual stream
                inplace[normed.name if self.grad else out.name] = reads
        elif last and self.grad:
            inplace[normed.name] = reads
        else:
            x = s.residual(f"x before {name}")
            inplace[x.name] = [term for term in self.terms if term not in self.outputs]
            makes.append(x)
            self.terms, self.input_terms = [x.name], 0
        saved = [normed, out, s.per_token(f"{name}.rstd")] if self.grad else []
        self.outputs.update(buffer.name for buffer in saved)
        if self.dropout:
            self.outputs.add(makes[0].name)
        self.add(*makes, *(saved or [out]), reads=reads, inplace=inplace, virtual=self.norm_virtual)

    def cast(self, name: str, rows: int, columns: int, *, save: bool) -> str:
        made = self.s.matrix(f"{name}.cast", rows, columns, "casts")
        return self.add(made, output=save, timed=f"cast of {made.nbytes}")

    def casts(self, module: str, inputs: int, outputs: int) -> list[str]:
        """The half-precision copies of a linear layer's weight and bias."""
        if not self.s.half:
            return []
        weight = self.cast(f"{module}.weight", outputs, inputs, save=self.grad)
        return [weight, self.cast(f"{module}.bias", 1, outputs, save=False)] if self.config.bias else [weight]

    def matmul(self, out: str, source: str, casts: list[str], outputs: int, *, save: bool) -> None:
        self.add(self.s.matrix(out, self.s.n, outputs), reads=(source, *casts), output=save and self.grad,
                 calls="matmul with bias" if self.config.bias else "matmul")

    def attention(self, i: int) -> None:
        """Attention and its projection. In training, padded heads are sliced after the projection's weight is cast."""
        s, attend, grad = self.s, self.attend, self.grad
        parts = [f"{i}.qkv"]
        if attend.padded:
            parts = [self.add(Buffer(f"{i}.{part}", "activations", attend.out_bytes, s.dtype), reads=[f"{i}.qkv"],
                              output=grad, timed=f"padded {part}") for part in "qkv"]
        returns = [Buffer(name, "activations", nbytes, s.dtype if ".att" in name else "state")
                   for name, nbytes in attend.saved(i) if grad or ".att" in name]
        self.add(reads=parts, output=grad, calls=f"attention {i}", returns=returns,
                 virtual=ATTENTION_BUFFERS - len(returns))
        early_casts = self.casts(f"{i}.attn.c_proj", s.c, s.c) if grad and attend.padded else []
        if attend.padded:
            self.add(s.branch(f"{i}.att"), reads=[f"{i}.att.padded"], output=grad, timed="sliced heads")
        self.matmul(f"{i}.proj", f"{i}.att", early_casts or self.casts(f"{i}.attn.c_proj", s.c, s.c), s.c, save=False)

    def mlp(self, i: int) -> None:
        s, c = self.s, self.s.c
        self.matmul(f"{i}.fc", f"{i}.ln_2.out", self.casts(f"{i}.c_fc", c, 4 * c), 4 * c, save=True)
        early_casts = self.casts(f"{i}.mlp.c_proj", 4 * c, c) if self.grad and not self.config.bias else []
        self.add(s.matrix(f"{i}.gelu", s.n, 4 * c), reads=[f"{i}.fc"], inplace={f"{i}.gelu": [f"{i}.fc"]},
                 output=self.grad, timed="gelu")
        self.matmul(f"{i}.down", f"{i}.gelu", early_casts or self.casts(f"{i}.mlp.c_proj", 4 * c, c), c, save=False)

    def loss(self) -> None:
        """The logits, padded where that is faster, and the mean loss; for backward, two numbers per token."""
        s = self.s
        columns = s.padding.columns if s.padding.forward else s.v
        weights: list[str] = []
        if s.half:
            weights.append(self.cast("wte", s.v, s.c, save=self.grad))
        if s.padding.forward:
            padded = s.matrix("wte.padded", columns, s.c, "casts")
            weights = [self.add(padded, reads=weights, timed="padded head")]
        self.add(Buffer("logits", "logits", s.width * s.n * columns, s.dtype), reads=("ln_f.out", *weights),
                 output=True, calls="matmul")
        rows = [s.per_token("logits.max"), s.per_token("logits.log_sum")]
        self.add(*rows, reads=["logits"], output=self.grad, scratch=8 * s.n,
                 timed="split rows" if s.splits_loss_rows else "")
        reads = ["logits", *(buffer.name for buffer in rows)]
        chunks = -(-s.n // LOSS_ROWS)
        if chunks > 1:
            parts = [Buffer("counts", "other", 8 * chunks, "int"), Buffer("losses", "other", 4 * chunks, "float")]
            self.add(*(parts if self.grad else reversed(parts)), reads=reads)
            reads = [buffer.name for buffer in parts]
        total = [Buffer("total_weight", "other", SCALAR, "float")] if self.grad else []
        self.add(Buffer("loss", "other", SCALAR, "float"), *total, reads=reads, output=True)


# ---- the backward graph. Its kernels free what the forward graph saved. Three arrays of logits are alive at once: the
# logits, their gradient, and zeros for the gradient of the `logits` that forward returns and train.py does not use. All
# gradients of a backward pass exist before the first is added to its parameter's `.grad`.

PARTIAL_ROWS = 128  # rows per partial sum of a bias's or a norm's gradient
FUSED_ELEMENTS, FUSED_ROWS = 5 * 2**20, 4096  # from here on a norm's backward kernel makes these partial sums itself


class BackwardGraph(GraphWriter):
    """Writes the backward graph that follows `forward`."""

    def __init__(self, shapes: GraphShapes, attend: AttentionTape, forward: KernelGraph) -> None:
        super().__init__()
        self.s, self.config, self.attend, self.forward = shapes, shapes.config, attend, forward
        self.d_x = ""     # the residual stream's gradient
        self.branch = ""  # the same as a branch sees it: in the matmuls' precision, with the dropout mask applied

    def graph(self) -> KernelGraph:
        self.head()
        for i in reversed(range(self.config.n_layer)):
            self.block(i)
        self.embeddings()
        made = {buffer.name: buffer.nbytes for kernel in self.forward.kernels for buffer in kernel.results}
        saved = {name: made[name] for name in sorted(self.forward.outputs - {"loss"})}
        batch = {"inputs": 8 * self.s.n, "targets": 8 * self.s.n}
        return KernelGraph(self.kernels, frozenset(self.outputs), saved | batch, borrowed=frozenset({"logits"}))

    def head(self) -> None:
        """The loss, the head and the last norm. In half precision wte's gradient waits for the embedding's; in float32
        the gradient of the logits waits."""
        s, pads = self.s, self.s.padding
        d = self.add(s.matrix("d_logits", s.n, s.v, "logits"),
                     reads=("logits", "logits.max", "logits.log_sum", "total_weight", "targets"))
        copies = [s.matrix(f"d_logits.padded for {what}", s.n, pads.columns, "logits")
                  for what, padded in (("weight_grad", pads.weight_grad), ("input_grad", pads.input_grad)) if padded]
        if copies:  # one kernel makes both
            self.add(*copies, reads=[d], timed="padded logits")
        if s.half:
            self.add(s.matrix("wte.raw", pads.columns if pads.weight_grad else s.v, s.c, "gradients"),
                     reads=(copies[0].name if pads.weight_grad else d, "ln_f.out"), calls="matmul")
        weight = ["wte.cast"] if s.half else []
        if pads.input_grad:
            weight = [self.add(s.matrix("wte.padded", pads.columns, s.c, "casts"), reads=weight, timed="padded head")]
        self.add(s.branch("d_ln_f"), reads=(copies[-1].name if pads.input_grad else d, *weight), calls="matmul")
        self.norm("ln_f", "d_ln_f", f"{self.config.n_layer - 1}.down.mask")

    def block(self, i: int) -> None:
        s, c, attend = self.s, self.s.c, self.attend
        d = self.linear(f"{i}.mlp.c_proj", self.branch, f"{i}.gelu", 4 * c, c)
        d_fc = f"d_fc.{i}"
        self.add(s.matrix(d_fc, s.n, 4 * c), reads=(d, f"{i}.fc"), inplace={d_fc: [d]}, timed="gelu")
        d = self.linear(f"{i}.c_fc", d_fc, f"{i}.ln_2.out", c, 4 * c)
        self.norm(f"{i}.ln_2", d, f"{i}.proj.mask")
        d = self.linear(f"{i}.attn.c_proj", self.branch, f"{i}.att", c, c)
        saved = [name for name, _ in attend.saved(i)]
        if attend.padded:
            d = self.add(Buffer(f"d_att.padded.{i}", "activations", attend.out_bytes, s.dtype), reads=[d],
                         timed="padded d")
        saved += [f"{i}.{part}" for part in (("q", "k", "v") if attend.padded else ("qkv",))]
        parts = [f"d_{part}.{i}" for part in "qkv"]
        self.add(reads=(d, *saved), calls=f"attention backward {i}",
                 returns=[Buffer(part, "activations", attend.out_bytes, s.dtype) for part in parts])
        d = self.add(s.matrix(f"d_qkv.{i}", s.n, 3 * c), reads=parts, timed="gather")
        d = self.linear(f"{i}.c_attn", d, f"{i}.ln_1.out", c, 3 * c)
        if i:
            self.norm(f"{i}.ln_1", d, f"{i - 1}.down.mask")
        else:
            self.first_norm(d)

    def linear(self, module: str, d: str, saved: str, inputs: int, outputs: int) -> str:
        """The gradients of a linear layer's weight, bias and input; returns the input's name. With a bias the input's
        comes first, without one the weight's."""
        s = self.s
        gradient = s.gradient(f"{module}.weight", inputs * outputs)
        raw = s.matrix(f"{module}.weight.raw", outputs, inputs, "gradients") if s.half else gradient
        incoming = s.matrix(f"d_input of {module}", s.n, inputs)
        matmuls = [(raw, [d, saved]), (incoming, [d, f"{module}.weight.cast"] if s.half else [d])]
        for made, reads in reversed(matmuls) if self.config.bias else matmuls:
            self.add(made, reads=reads, calls="matmul", output=made is gradient)
        if self.config.bias:
            self.add(self.partial_sums(f"{module}.bias", outputs), reads=[d])
            self.add(s.gradient(f"{module}.bias", outputs), reads=[f"{module}.bias.partial"], output=True)
        if s.half:
            self.add(gradient, reads=[raw.name], timed=f"cast to float32 of {raw.nbytes}", output=True)
        return incoming.name

    def partial_sums(self, name: str, columns: int) -> Buffer:
        return Buffer(f"{name}.partial", "workspace", 4 * columns * -(-self.s.n // PARTIAL_ROWS), "float")

    def norm(self, name: str, d: str, mask: str) -> None:
        """Adds the norm's gradient to the residual stream's, and leaves that as the branch before it sees it."""
        s, before, dropout = self.s, self.d_x, self.config.dropout > 0
        self.d_x = self.branch = f"d_x before {name}"
        makes, inplace = [s.residual(self.d_x)], {self.d_x: [before] if before else []}
        if s.half or dropout:
            self.branch = f"d_branch before {name}"
            makes.append(s.branch(self.branch))
            inplace[self.branch] = [] if dropout else [d]
        reads = [d, f"{name}.normed", f"{name}.rstd", *([before] if before else []), *([mask] if dropout else [])]
        self.norm_with_grads(name, makes, reads, inplace, again=[d, f"{name}.normed"])

    def norm_with_grads(self, name: str, makes: Sequence[Buffer], reads: Sequence[str], inplace: dict[str, list[str]],
                        *, again: Sequence[str]) -> None:
        """A norm's backward kernel and the gradients of its parameters: from partial sums of that kernel, or from a
        kernel of their own that reads `again`."""
        s = self.s
        gradients = [s.gradient(f"{name}.{param}", s.c) for param in s.norm_params]
        if s.n * s.c >= FUSED_ELEMENTS and s.n >= max(2 * s.c, FUSED_ROWS):
            sums = Buffer(f"{name}.partial", "workspace", 4 * s.c * len(gradients) * s.programs, "float")
            self.add(*makes, sums, reads=reads, inplace=inplace, calls=f"sum {name}", returns=gradients)
            self.outputs.update(buffer.name for buffer in gradients)
            return
        self.add(*makes, reads=reads, inplace=inplace)
        self.add(*(self.partial_sums(f"{name}.{param}", s.c) for param in s.norm_params), reads=again)
        for param, gradient in zip(s.norm_params, gradients, strict=True):
            self.add(gradient, reads=[f"{name}.{param}.partial"], output=True)

    def first_norm(self, d: str) -> None:
        """The first block's ln_1, whose input may have been saved as rows of the embeddings. Its kernel adds to wte's
        gradient too."""
        s = self.s
        saved = ["tok_emb", "pos_emb", "0.ln_1.mean"] if s.saves_embeddings else ["0.ln_1.normed"]
        if self.config.dropout:
            if s.saves_embeddings:
                normed = s.residual("0.ln_1.normed")
                saved = [self.add(normed, reads=[*saved, "0.x.mask", "0.ln_1.rstd"],
                                  inplace={normed.name: ["tok_emb"]})]
            saved.append("0.x.mask")
        saved.append("0.ln_1.rstd")
        rows = []
        if self.config.batch_size == 1:  # one sequence: nothing to sum, so it adds to wpe's gradient too
            rows += [self.add(s.wpe_grad, timed="zeros of positions", output=True), "positions"]
        rows.append(self.add(Buffer("wte.embedding", "gradients", 4 * s.v * s.c, "float"), timed="zeros"))
        before, self.d_x = self.d_x, "d_x"
        self.norm_with_grads("0.ln_1", [s.residual("d_x")], [d, *saved, before, "inputs", *rows], {"d_x": [before]},
                             again=[d, *saved])

    def embeddings(self) -> None:
        """wpe's gradient, and the sum of wte's two: from the embedding and from the tied head."""
        s, wpe = self.s, self.s.wpe_grad
        if self.config.batch_size > 1:
            zeros = self.add(wpe._replace(name="wpe.zeros"), timed="zeros of positions")
            self.add(wpe, reads=(self.d_x, "positions", zeros), inplace={wpe.name: [zeros]}, output=True,
                     timed="rows of positions")
        head = ["wte.raw"] if s.half else ["d_logits", "ln_f.out"]
        self.add(s.gradient("wte", s.v * s.c), reads=("wte.embedding", *head), calls="" if s.half else "matmul",
                 timed="tied" if s.half else "", after=self.d_x, output=True)


# ---- the model

VARIANTS = 2  # of a kernel that are timed


class CompiledGPT:
    """model.GPT, compiled."""

    def __init__(self, config: RunConfig, writer: Writer, platform: Platform) -> None:
        self.config, self.w, self.platform = config, writer, platform
        self.attend, self.shapes = AttentionTape(config, writer, platform), GraphShapes(config, platform)
        forward = ForwardGraph(self.shapes, self.attend, grad=True).graph()
        backward = BackwardGraph(self.shapes, self.attend, forward).graph()
        self.evaluation = plan_buffers(ForwardGraph(self.shapes, self.attend, grad=False).graph())
        self.backprop = plan_buffers(backward)
        # A gradient may end up in a block that forward allocated.
        self.training = plan_buffers(forward).renamed(self.backprop.taken)
        # A step's first gradients become `.grad`; later ones are fresh: added to `.grad` and freed.
        self.fresh = {gradient.name: f"{gradient.name.removesuffix('.grad')}.fresh" for kernel in backward.kernels
                      for gradient in kernel.results if gradient.name in backward.outputs}
        self.timed = set[tuple[str, str]]()       # (graph, kernel) that have been timed; (graph, ""): compiled
        self.counted = self.held = self.peak = 0  # events counted so far, bytes held after them, and their peak

    def forward(self, logits: str, loss: str, *, grad: bool) -> None:
        """Leaves `logits` and `loss`; with `grad`, what backward needs too."""
        self.compile("training" if grad else "evaluation")
        names = {"logits": logits, "loss": loss}
        if grad:
            self.run(self.training, "training", names | (self.fresh if self.w.alive("wte.grad") else {}))
        else:
            self.run(self.evaluation, "evaluation", names)

    def leave_autocast(self, *, grad: bool) -> None:
        """Nothing to free: casts are part of the compiled code."""

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None:
        """Frees what forward saved, `inputs` and `targets`; leaves `{parameter}.grad`. `accumulate`: not the first
        micro-batch of a step."""
        w, s = self.w, self.shapes
        w.alloc("zeros for logits", "logits", s.width * s.n * s.v)
        names = {"inputs": inputs, "targets": targets} | (self.fresh if accumulate else {})
        self.run(self.backprop, "backward", names)
        w.free("zeros for logits", "d_loss")
        if accumulate:
            w.free(*self.fresh.values())

    def run(self, plan: BufferPlan, graph: str, outside: dict[str, str]) -> None:
        """Writes the events of a plan. `outside`: names that some of the graph's buffers have outside it."""
        w = self.w
        names = {name: outside.get(final, final) for name, final in plan.names.items()} | outside
        for do, name, owner, nbytes in plan.steps:
            if do == "alloc":
                w.alloc(names.get(name, name), owner, nbytes)
            elif do == "free":
                w.free(names.get(name, name))
            elif do == "call":
                self.call(name, graph, names)
            elif (graph, name) not in self.timed:
                self.timed.add((graph, name))
                self.time_kernel(nbytes)

    def call(self, what: str, graph: str, names: dict[str, str]) -> None:
        """An ATen op: attention and sums allocate their results, matmuls workspaces."""
        w, s = self.w, self.shapes
        op, _, of = what.rpartition(" ")
        if op == "sum":  # the gradients of a norm's parameters, from each program's partial sums
            for param in s.norm_params:
                gradient = f"{of}.{param}.grad"
                w.alloc(names.get(gradient, gradient), "gradients", 4 * s.c)
                alloc_sum_scratch(w, s.programs, s.c, self.platform)
        elif op == "attention backward":
            self.attend.backward(int(of), names)
        elif op == "attention":
            self.attend.forward(int(of), names, grad=graph == "training")
        else:
            alloc_workspaces(w, self.platform, bias=what == "matmul with bias",
                             thread=" of backward" if graph == "backward" else "")

    # ---- the first run of a graph

    def compile(self, graph: str) -> None:
        """Before a graph first runs, Inductor tries its patterns on small tensors. They are freed at once, but later
        segments get other addresses from the driver.

        Then it times the head's matmuls, unpadded and padded. Operands that another kernel makes count as padded for
        free; a parameter is padded anew in each trial.
        """
        if (graph, "") in self.timed:
            return
        self.timed.add((graph, ""))
        self.w.free(self.w.alloc("pattern", "other", SCALAR))
        s, pads = self.shapes, self.shapes.padding
        n, c, v, wide = s.n, s.c, s.v, pads.columns
        if not pads.timed:
            return
        if graph == "evaluation":
            self.time_matmul([n * c, v * c], [[n * v], [wide * c, n * wide]])
            return
        if s.half:
            self.time_matmul([n * v, v * c, n * wide, wide * c], [[n * c]])
        else:
            self.time_matmul([n * v, v * c, n * wide], [[n * c], [wide * c, n * c]])
        self.time_matmul([n * v, n * c], [[v * c], [n * wide, wide * c]])

    def time_matmul(self, operands: list[int], variants: list[list[int]]) -> None:
        """`operands`: elements of tensors that live throughout; `variants`: of those that each variant allocates."""
        w, width = self.w, self.shapes.width
        held = [w.alloc(f"operand {at}", "workspace", width * size) for at, size in enumerate(operands)]
        for sizes in variants:
            for timed in (False, True):
                timing = [w.alloc("timing", "workspace", self.platform.cache)] if timed else []
                tried = [w.alloc(f"tried {at}", "workspace", width * size) for at, size in enumerate(sizes)]
                alloc_workspaces(w, self.platform)
                w.free(*tried, *timing)
        w.free(*held)

    def time_kernel(self, overwritten: int) -> None:
        """Times variants of a kernel at its first run, with a buffer of the L2 cache's size that flushes it.

        What the kernel overwrites is cloned: on the GPU if that does not raise the peak so far.
        """
        w = self.w
        for _ in range(VARIANTS):
            for alloc, _, _, nbytes, _ in w.events_since(self.counted):
                self.held += nbytes if alloc else -nbytes
                self.peak = max(self.peak, self.held)
                self.counted += 1
            clones = [("clone", overwritten)] if 0 < overwritten <= self.peak - self.held else []
            w.free(*(w.alloc(name, "workspace", nbytes) for name, nbytes in clones))
            w.alloc("timing", "workspace", self.platform.cache)
            w.free(*(w.alloc(name, "workspace", nbytes) for name, nbytes in clones), "timing")
