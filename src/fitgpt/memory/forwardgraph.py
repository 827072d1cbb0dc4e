"""nanoGPT's model as torch's compiler sees it, forward: the kernels of evaluation and of training.

Casts are part of the graph, and none lives longer than its use. The sum that is the residual stream is written only
where five buffers would have to be read for it; for backward, norms keep what they normalised instead.
"""

from __future__ import annotations

from .aten import Attention, Gpu, up_to
from .kernels import Graph, GraphWriter, Made
from .nanorun import SCALAR, NanoGPTRun
from .padding import padding

MOST_READS = 4               # of which a sum is not yet written down
# Up to so many sequences the first norm's rows are lighter to keep than those of both tables; without dropout, where a
# token has more numbers than `WIDE` (seen at 768 and more, and not at up to 576), up to one fewer.
FEW_SEQUENCES, FEW_DROPPED, WIDE = 2, 4, 670
LINE, LONG_ROW = 128, 1024   # rows longer than so many numbers are laid out in lines of so many bytes
ROWS_A_LOSS = 8192           # tokens whose losses are summed at once
# Numbers that a multiprocessor takes of the first norm at once, rows counted as if a power of two long: where there are
# more, a variant that takes fewer of a row is timed, too (seen from 2048 rows of 768 on, not up to 1024 of 1024).
AT_ONCE = 2**20 / 132
ATTENTION = 5                # buffers that the compiler counts for one: it and what it hands out
PROGRAMS, LEAST_ROWS, MOST_ROWS = 8, 16, 128  # a multiprocessor's, in a norm's backward, and rows of each


def few_rows(tokens: int, sms: int) -> bool:
    """So that each one's loss is shared among several programs."""
    return tokens < 2 * sms


class Shapes:
    """Buffers of one run, by what they are."""

    def __init__(self, run: NanoGPTRun, gpu: Gpu) -> None:
        self.r = run
        self.n, self.c, self.v = run.tokens, run.n_embd, run.vocab_size
        self.half = run.dtype != "float32"
        self.width, self.kind = (2, "half") if self.half else (4, "float")
        self.padding, self.sms = padding(run), gpu.sms
        self.few_rows = few_rows(self.n, gpu.sms)
        # Whether training keeps rows of both tables.
        self.rows_kept = run.batch_size > (FEW_DROPPED if run.dropout else FEW_SEQUENCES - (self.c > WIDE))
        share = max(self.n // (PROGRAMS * gpu.sms), 1)
        self.programs = -(-self.n // min(max(1 << (share.bit_length() - 1), LEAST_ROWS), MOST_ROWS))

    def table(self, name: str, rows: int, columns: int, owner: str = "activations") -> Made:
        """In the products' precision."""
        stride = up_to(columns * self.width, LINE) // self.width if columns > LONG_ROW else columns
        return Made(name, owner, self.width * ((rows - 1) * stride + columns), self.kind)

    def stream(self, name: str) -> Made:
        return Made(name, "activations", 4 * self.n * self.c, "float")

    def narrow(self, name: str) -> Made:
        return Made(name, "activations", self.width * self.n * self.c, self.kind)

    def rows(self, name: str) -> Made:
        return Made(name, "activations", 4 * self.n, "float")

    def mask(self, name: str) -> Made:
        return Made(name, "activations", self.n * self.c, "bool")

    def gradient(self, parameter: str, numbers: int) -> Made:
        return Made(f"{parameter}.grad", "gradients", 4 * numbers, "float")


class ForwardGraph(GraphWriter):
    """`grad`: whether a backward pass will follow."""

    def __init__(self, shapes: Shapes, attend: Attention, *, grad: bool) -> None:
        super().__init__()
        self.s, self.r, self.attend, self.grad = shapes, shapes.r, attend, grad
        self.drops = grad and shapes.r.dropout > 0
        self.in_a_norm = 2 + self.drops if grad else 3  # statistics and random numbers that are no buffers of their own
        self.terms: list[str] = []  # whose sum the residual stream is
        self.unseen = 0             # terms that are inputs of the graph

    def graph(self) -> Graph:
        c, layers = self.s.c, self.r.n_layer
        self.embed()
        for i in range(layers):
            self.product(f"{i}.qkv", f"{i}.ln_1.out", self.casts(f"{i}.qkv", c, 3 * c), 3 * c,
                         keep=not self.attend.padded)
            self.attention(i)
            self.norm(f"{i}.ln_2", f"{i}.proj")
            self.mlp(i)
            self.norm(f"{i + 1}.ln_1" if i + 1 < layers else "ln_f", f"{i}.down")
        self.loss()
        return Graph(self.kernels, frozenset(self.keeps), numbers=self.numbers)

    def embed(self) -> None:
        """With a graph to keep, rows of both tables are written down, or else what the first norm makes of them."""
        s, r, rows_kept = self.s, self.r, self.grad and self.s.rows_kept
        reads: list[str] = []
        if self.grad:
            self.add(Made("positions", "activations", 8 * r.block_size, "int"), keep=True, timed="positions")
        if rows_kept:
            reads.append(self.add(Made("pos_emb", "activations", 4 * r.block_size * s.c, "float"), keep=True,
                                  timed="rows of positions"))
        if self.drops:
            reads.append(self.add(Made("seeds", "activations", 8 * (2 * r.n_layer + 1), "int")))
        makes = [s.mask("x0.mask")] if self.drops else []
        out, rstd = s.narrow("0.ln_1.out"), s.rows("0.ln_1.rstd")
        if rows_kept:
            makes += [s.stream("tok_emb"), s.rows("0.ln_1.mean"), rstd, out]
        else:
            makes += [s.stream("0.ln_1.normed"), out, rstd] if self.grad else [out]
        varied = not self.grad and s.n * (1 << (s.c - 1).bit_length()) > AT_ONCE * s.sms
        self.add(*makes, reads=reads, keep=self.grad, timed="embedding" if varied else "", unseen=self.in_a_norm)
        self.terms = ["tok_emb", "pos_emb"] if rows_kept else []
        self.unseen = 0 if rows_kept else 3  # tokens, and two tables
        self.terms += ["x0.mask"] if self.drops else []

    def norm(self, name: str, branch: str) -> None:
        """Adds a branch to the stream and normalises the sum."""
        s = self.s
        reads = [*self.terms, branch]
        makes: list[Made] = []
        self.terms.append(branch)
        if self.r.bias and not s.half:  # not yet added to it: in half precision the product does
            self.unseen += 1
        if self.drops:
            makes.append(s.mask(f"{branch}.mask"))
            self.terms.append(f"{branch}.mask")
            reads.append("seeds")
        normed, out = s.stream(f"{name}.normed"), s.narrow(f"{name}.out")
        over: dict[str, list[str]] = {}
        last = name == "ln_f"
        if len(self.terms) + self.unseen <= MOST_READS:
            if last:  # nobody reads the stream any more
                over[normed.name if self.grad else out.name] = reads
        elif last and self.grad:
            over[normed.name] = reads
        else:
            x = s.stream(f"x before {name}")
            over[x.name] = [term for term in self.terms if term not in self.keeps]
            makes.append(x)
            self.terms, self.unseen = [x.name], 0
        kept = [normed, out, s.rows(f"{name}.rstd")] if self.grad else []
        self.keeps.update(made.name for made in kept)
        if self.drops:
            self.keeps.add(makes[0].name)
        self.add(*makes, *(kept or [out]), reads=reads, over=over, unseen=self.in_a_norm)

    def cast(self, name: str, rows: int, columns: int, *, keep: bool) -> str:
        made = self.s.table(f"{name}.half", rows, columns, "casts")
        return self.add(made, keep=keep, timed=f"cast of {made.nbytes}")

    def casts(self, name: str, inputs: int, outputs: int) -> list[str]:
        """Of a product's weight and bias."""
        if not self.s.half:
            return []
        weight = self.cast(f"{name}.weight", outputs, inputs, keep=self.grad)
        return [weight, self.cast(f"{name}.bias", 1, outputs, keep=False)] if self.r.bias else [weight]

    def product(self, name: str, source: str, casts: list[str], outputs: int, *, keep: bool) -> None:
        self.add(self.s.table(name, self.s.n, outputs), reads=(source, *casts), keep=keep and self.grad,
                 calls="product with bias" if self.r.bias else "product")

    def attention(self, i: int) -> None:
        """Attention and its projection. Padded heads are cut out of its output once the weight is cast, if kept."""
        s, attend, grad = self.s, self.attend, self.grad
        parts = [f"{i}.qkv"]
        if attend.padded:
            parts = [self.add(Made(f"{i}.{part}", "activations", attend.out, s.kind), reads=[f"{i}.qkv"], keep=grad,
                              timed=f"padded {part}") for part in "qkv"]
        gets = [Made(name, "activations", nbytes, s.kind if ".attention" in name else "state")
                for name, nbytes in attend.made(i) if grad or ".attention" in name]
        self.add(reads=parts, keep=grad, calls=f"attention {i}", gets=gets, unseen=ATTENTION - len(gets))
        ahead = self.casts(f"{i}.proj", s.c, s.c) if grad and attend.padded else []
        if attend.padded:
            self.add(s.narrow(f"{i}.attention"), reads=[f"{i}.attention.wide"], keep=grad, timed="cut heads")
        self.product(f"{i}.proj", f"{i}.attention", ahead or self.casts(f"{i}.proj", s.c, s.c), s.c, keep=False)

    def mlp(self, i: int) -> None:
        s, c = self.s, self.s.c
        self.product(f"{i}.up", f"{i}.ln_2.out", self.casts(f"{i}.up", c, 4 * c), 4 * c, keep=True)
        ahead = self.casts(f"{i}.down", 4 * c, c) if self.grad and not self.r.bias else []
        self.add(s.table(f"{i}.gelu", s.n, 4 * c), reads=[f"{i}.up"], over={f"{i}.gelu": [f"{i}.up"]}, keep=self.grad,
                 timed="gelu")
        self.product(f"{i}.down", f"{i}.gelu", ahead or self.casts(f"{i}.down", 4 * c, c), c, keep=False)

    def loss(self) -> None:
        """The logits, padded where that is quicker, and the mean loss; for backward, two numbers a row."""
        s = self.s
        columns = s.padding.columns if s.padding.forward else s.v
        weights: list[str] = []
        if s.half:
            weights.append(self.cast("wte", s.v, s.c, keep=self.grad))
        if s.padding.forward:
            padded = s.table("wte.padded", columns, s.c, "casts")
            weights = [self.add(padded, reads=weights, timed="padded head")]
        self.add(Made("logits", "logits", s.width * s.n * columns, s.kind), reads=("ln_f.out", *weights), keep=True,
                 calls="product")
        rows = [s.rows("logits.largest"), s.rows("logits.log_sum")]
        self.add(*rows, reads=["logits"], keep=self.grad, within=8 * s.n, timed="split rows" if s.few_rows else "")
        reads = ["logits", *(made.name for made in rows)]
        pieces = -(-s.n // ROWS_A_LOSS)
        if pieces > 1:
            parts = [Made("counts", "other", 8 * pieces, "int"), Made("losses", "other", 4 * pieces, "float")]
            self.add(*(parts if self.grad else reversed(parts)), reads=reads)
            reads = [made.name for made in parts]
        total = [Made("total_weight", "other", SCALAR, "float")] if self.grad else []
        self.add(Made("loss", "other", SCALAR, "float"), *total, reads=reads, keep=True)
