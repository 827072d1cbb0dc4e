"""nanoGPT's model as torch's compiler sees it, backward: kernels that free what the forward graph kept.

Three arrays of logits meet here: the logits, their gradient, and zeros for the gradient of the `logits` that are
returned and not used. All gradients of a backward pass are made before the first is added to its parameter's.
"""

from __future__ import annotations

from collections.abc import Sequence

from .aten import Attention
from .forwardgraph import Shapes
from .kernels import Graph, GraphWriter, Made

ROWS_A_PARTIAL = 128         # rows that are summed before their partial sums are
FUSED_NUMBERS, FUSED_ROWS = 5 * 2**20, 4096  # from here on a norm's backward sums its vectors' gradients by itself


class BackwardGraph(GraphWriter):
    def __init__(self, shapes: Shapes, attend: Attention, forward: Graph) -> None:
        super().__init__()
        self.s, self.r, self.attend, self.before = shapes, shapes.r, attend, forward
        self.vectors = ("weight", "bias") if shapes.r.bias else ("weight",)
        self.dx = ""       # the stream's gradient
        self.branch = ""   # the same as a branch sees it: in the products' precision, without what dropout zeroed

    def graph(self) -> Graph:
        self.head()
        for i in reversed(range(self.r.n_layer)):
            self.block(i)
        self.embeddings()
        made = {each.name: each.nbytes for kernel in self.before.kernels for each in kernel.results}
        inputs = {name: made[name] for name in sorted(self.before.keeps - {"loss"})}
        return Graph(self.kernels, frozenset(self.keeps), inputs | {"inputs": 8 * self.s.n, "targets": 8 * self.s.n},
                     lent=frozenset({"logits"}))

    def head(self) -> None:
        """Its own gradient waits for the embedding's in half precision; in float32 the gradient of the logits does."""
        s, pads = self.s, self.s.padding
        d = self.add(s.table("d logits", s.n, s.v, "logits"),
                     reads=("logits", "logits.largest", "logits.log_sum", "total_weight", "targets"))
        copies = [s.table(f"d logits.padded for {what}", s.n, pads.columns, "logits")
                  for what, padded in (("weights", pads.weights), ("inputs", pads.inputs)) if padded]
        if copies:  # one kernel makes both
            self.add(*copies, reads=[d], timed="padded logits")
        if s.half:
            self.add(s.table("wte.raw", pads.columns if pads.weights else s.v, s.c, "gradients"),
                     reads=(copies[0].name if pads.weights else d, "ln_f.out"), calls="product")
        weight = ["wte.half"] if s.half else []
        if pads.inputs:
            weight = [self.add(s.table("wte.padded", pads.columns, s.c, "casts"), reads=weight, timed="padded head")]
        self.add(s.narrow("d ln_f"), reads=(copies[-1].name if pads.inputs else d, *weight), calls="product")
        self.norm("ln_f", "d ln_f", f"{self.r.n_layer - 1}.down.mask")

    def block(self, i: int) -> None:
        s, c, attend = self.s, self.s.c, self.attend
        d = self.linear(f"{i}.down", self.branch, f"{i}.gelu", 4 * c, c)
        d = self.add(s.table(f"d {i}.up", s.n, 4 * c), reads=(d, f"{i}.up"), over={f"d {i}.up": [d]}, timed="gelu")
        d = self.linear(f"{i}.up", d, f"{i}.ln_2.out", c, 4 * c)
        self.norm(f"{i}.ln_2", d, f"{i}.proj.mask")
        d = self.linear(f"{i}.proj", self.branch, f"{i}.attention", c, c)
        kept = [name for name, _ in attend.made(i)]
        if attend.padded:
            d = self.add(Made(f"d {i}.attention.wide", "activations", attend.out, s.kind), reads=[d], timed="padded d")
        kept += [f"{i}.{part}" for part in (("q", "k", "v") if attend.padded else ("qkv",))]
        parts = [f"d {i}.{part}" for part in "qkv"]
        self.add(reads=(d, *kept), calls=f"attention backward {i}",
                 gets=[Made(part, "activations", attend.out, s.kind) for part in parts])
        d = self.add(s.table(f"d {i}.qkv", s.n, 3 * c), reads=parts, timed="gather")
        d = self.linear(f"{i}.qkv", d, f"{i}.ln_1.out", c, 3 * c)
        if i:
            self.norm(f"{i}.ln_1", d, f"{i - 1}.down.mask")
        else:
            self.first_norm(d)

    def linear(self, name: str, d: str, saved: str, inputs: int, outputs: int) -> str:
        """Returns the gradient of its input. With a bias that one comes first, without one the weight's."""
        s = self.s
        gradient = s.gradient(f"{name}.weight", inputs * outputs)
        raw = s.table(f"{name}.weight.raw", outputs, inputs, "gradients") if s.half else gradient
        incoming = s.table(f"d before {name}", s.n, inputs)
        products = [(raw, [d, saved]), (incoming, [d, f"{name}.weight.half"] if s.half else [d])]
        for made, reads in reversed(products) if self.r.bias else products:
            self.add(made, reads=reads, calls="product", keep=made is gradient)
        if self.r.bias:
            self.add(self.partial(f"{name}.bias", outputs), reads=[d])
            self.add(s.gradient(f"{name}.bias", outputs), reads=[f"{name}.bias.partial"], keep=True)
        if s.half:
            self.add(gradient, reads=[raw.name], timed=f"widened {raw.nbytes}", keep=True)
        return incoming.name

    def partial(self, name: str, columns: int) -> Made:
        return Made(f"{name}.partial", "workspace", 4 * columns * -(-self.s.n // ROWS_A_PARTIAL), "float")

    def norm(self, name: str, d: str, mask: str) -> None:
        """Adds to the stream's gradient, and leaves it as the branch before sees it."""
        s, before, drops = self.s, self.dx, self.r.dropout > 0
        self.dx = self.branch = f"dx before {name}"
        makes, over = [s.stream(self.dx)], {self.dx: [before] if before else []}
        if s.half or drops:
            self.branch = f"d branch before {name}"
            makes.append(s.narrow(self.branch))
            over[self.branch] = [] if drops else [d]
        reads = [d, f"{name}.normed", f"{name}.rstd", *([before] if before else []), *([mask] if drops else [])]
        self.with_sums(name, makes, reads, over, again=[d, f"{name}.normed"])

    def with_sums(self, name: str, makes: Sequence[Made], reads: Sequence[str], over: dict[str, list[str]], *,
                  again: Sequence[str]) -> None:
        """A norm's backward, and its vectors' gradients: from its own partial sums, or by reading `again`."""
        s = self.s
        gradients = [s.gradient(f"{name}.{vector}", s.c) for vector in self.vectors]
        if s.n * s.c >= FUSED_NUMBERS and s.n >= max(2 * s.c, FUSED_ROWS):
            sums = Made(f"{name}.partial", "workspace", 4 * s.c * len(gradients) * s.programs, "float")
            self.add(*makes, sums, reads=reads, over=over, calls=f"sum {name}", gets=gradients)
            self.keeps.update(made.name for made in gradients)
            return
        self.add(*makes, reads=reads, over=over)
        self.add(*(self.partial(f"{name}.{vector}", s.c) for vector in self.vectors), reads=again)
        for vector, gradient in zip(self.vectors, gradients, strict=True):
            self.add(gradient, reads=[f"{name}.{vector}.partial"], keep=True)

    def first_norm(self, d: str) -> None:
        """The first norm may have only what it was made from; its backward adds to rows of the tokens' table too."""
        s = self.s
        saved = ["0.ln_1.normed"]
        if s.rows_kept:
            saved = ["tok_emb", "pos_emb", "0.ln_1.mean"]
        if self.r.dropout:
            if s.rows_kept:
                normed = s.stream("0.ln_1.normed")
                saved = [self.add(normed, reads=[*saved, "x0.mask", "0.ln_1.rstd"], over={normed.name: ["tok_emb"]})]
            saved.append("x0.mask")
        saved.append("0.ln_1.rstd")
        rows = []
        if self.r.batch_size == 1:  # there is nothing to be summed over sequences: it adds to the positions' rows, too
            rows += [self.add(self.wpe, timed="zeros of positions", keep=True), "positions"]
        rows.append(self.add(Made("wte.embedding", "gradients", 4 * s.v * s.c, "float"), timed="zeros"))
        before, self.dx = self.dx, "dx"
        self.with_sums("0.ln_1", [s.stream("dx")], [d, *saved, before, "inputs", *rows], {"dx": [before]},
                       again=[d, *saved])

    @property
    def wpe(self) -> Made:
        return self.s.gradient("wpe", self.r.block_size * self.s.c)

    def embeddings(self) -> None:
        s, wpe = self.s, self.wpe
        if self.r.batch_size > 1:
            zeros = self.add(wpe._replace(name="wpe.zeros"), timed="zeros of positions")
            self.add(wpe, reads=(self.dx, "positions", zeros), over={wpe.name: [zeros]}, keep=True,
                     timed="rows of positions")
        head = ["wte.raw"] if s.half else ["d logits", "ln_f.out"]
        self.add(s.gradient("wte", s.v * s.c), reads=("wte.embedding", *head), calls="" if s.half else "product",
                 timed="tied" if s.half else "", after=self.dx, keep=True)
