"""The kernels that torch.compile (Inductor, torch 2.11) makes of nanoGPT's backward pass.

They free what the forward graph saved. Three arrays of logits are alive at once: the logits, their gradient, and zeros
for the gradient of the `logits` that forward returns and train.py does not use. All gradients of a backward pass exist
before the first is added to its parameter's `.grad`. The thresholds are those of recorded runs on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence

from .aten import AttentionTape
from .forward_graph import GraphShapes
from .inductor import Buffer, GraphWriter, KernelGraph

PARTIAL_ROWS = 128  # rows per partial sum of a bias's or a norm's gradient
FUSED_ELEMENTS, FUSED_ROWS = 5 * 2**20, 4096  # from here on a norm's backward kernel makes these partial sums itself


class BackwardGraph(GraphWriter):
    """Writes the backward graph that follows `forward`."""

    def __init__(self, shapes: GraphShapes, attend: AttentionTape, forward: KernelGraph) -> None:
        super().__init__()
        self.s, self.config, self.attend, self.forward = shapes, shapes.config, attend, forward
        self.norm_params = ("weight", "bias") if self.config.bias else ("weight",)
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
        gradients = [s.gradient(f"{name}.{param}", s.c) for param in self.norm_params]
        if s.n * s.c >= FUSED_ELEMENTS and s.n >= max(2 * s.c, FUSED_ROWS):
            sums = Buffer(f"{name}.partial", "workspace", 4 * s.c * len(gradients) * s.programs, "float")
            self.add(*makes, sums, reads=reads, inplace=inplace, calls=f"sum {name}", returns=gradients)
            self.outputs.update(buffer.name for buffer in gradients)
            return
        self.add(*makes, reads=reads, inplace=inplace)
        self.add(*(self.partial_sums(f"{name}.{param}", s.c) for param in self.norm_params), reads=again)
        for param, gradient in zip(self.norm_params, gradients, strict=True):
            self.add(gradient, reads=[f"{name}.{param}.partial"], output=True)

    def first_norm(self, d: str) -> None:
        """The first block's ln_1, whose input may have been saved as rows of the embeddings. Its kernel adds to wte's
        gradient too."""
        s = self.s
        saved = ["0.ln_1.normed"]
        if s.saves_embeddings:
            saved = ["tok_emb", "pos_emb", "0.ln_1.mean"]
        if self.config.dropout:
            if s.saves_embeddings:
                normed = s.residual("0.ln_1.normed")
                saved = [self.add(normed, reads=[*saved, "0.x.mask", "0.ln_1.rstd"],
                                  inplace={normed.name: ["tok_emb"]})]
            saved.append("0.x.mask")
        saved.append("0.ln_1.rstd")
        rows = []
        if self.config.batch_size == 1:  # one sequence: nothing to sum, so it adds to wpe's gradient too
            rows += [self.add(self.wpe_grad, timed="zeros of positions", output=True), "positions"]
        rows.append(self.add(Buffer("wte.embedding", "gradients", 4 * s.v * s.c, "float"), timed="zeros"))
        before, self.d_x = self.d_x, "d_x"
        self.norm_with_grads("0.ln_1", [s.residual("d_x")], [d, *saved, before, "inputs", *rows], {"d_x": [before]},
                             again=[d, *saved])

    @property
    def wpe_grad(self) -> Buffer:
        return self.s.gradient("wpe", self.config.block_size * self.s.c)

    def embeddings(self) -> None:
        """wpe's gradient, and the sum of wte's two: from the embedding and from the tied head."""
        s, wpe = self.s, self.wpe_grad
        if self.config.batch_size > 1:
            zeros = self.add(wpe._replace(name="wpe.zeros"), timed="zeros of positions")
            self.add(wpe, reads=(self.d_x, "positions", zeros), inplace={wpe.name: [zeros]}, output=True,
                     timed="rows of positions")
        head = ["wte.raw"] if s.half else ["d_logits", "ln_f.out"]
        self.add(s.gradient("wte", s.v * s.c), reads=("wte.embedding", *head), calls="" if s.half else "matmul",
                 timed="tied" if s.half else "", after=self.d_x, output=True)
