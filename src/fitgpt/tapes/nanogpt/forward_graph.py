"""The kernels that torch.compile (Inductor, torch 2.11) makes of nanoGPT's forward pass, for evaluation and training.

Casts are part of the graph, and none lives longer than its use. Inductor writes the residual stream to memory only
where a kernel would otherwise read five buffers for it; for backward, norms save their normalised input instead. The
thresholds are those of recorded runs on an H200.

Letters: N tokens of a micro-batch, C n_embd, V vocab_size, T block_size.
"""

from __future__ import annotations

from ...config.run_config import RunConfig
from ...memory.platform import Platform
from .aten import SCALAR, AttentionTape
from .inductor import Buffer, GraphWriter, KernelGraph
from .padding import head_padding, round_up

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
