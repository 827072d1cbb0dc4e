"""What nanoGPT's model allocates and frees when compiled: its three graphs, planned once and followed at every step.

To the byte what recorded runs of torch 2.11 did, whose compiler it follows. The first time a graph runs, the compiler
times its kernels beside it.
"""

from __future__ import annotations

from .aten import CUBLASLT, Attention, Gpu, sum_over_rows
from .backwardgraph import BackwardGraph
from .forwardgraph import ForwardGraph, Shapes
from .inductor import Plan, plan
from .nanorun import SCALAR, NanoGPTRun
from .tape import Writer

VARIANTS = 2  # of a kernel that are timed


class CompiledGPT:
    def __init__(self, run: NanoGPTRun, writer: Writer, gpu: Gpu) -> None:
        self.r, self.w, self.gpu = run, writer, gpu
        self.attend, self.shapes = Attention(run, writer, gpu), Shapes(run, gpu)
        forward = ForwardGraph(self.shapes, self.attend, grad=True).graph()
        self.evaluation = plan(ForwardGraph(self.shapes, self.attend, grad=False).graph())
        self.backprop = plan(BackwardGraph(self.shapes, self.attend, forward).graph())
        self.training = plan(forward).calling(self.backprop.taken)  # a gradient may end up in what forward kept
        self.fresh = {f"{name}.grad": f"{name}.fresh" for name, _, _ in run.parameters()}
        self.timed = set[tuple[str, str]]()
        self.weighed = self.held = self.most = 0  # events that were looked at; bytes after them, and at most

    def forward(self, logits: str, loss: str, *, grad: bool) -> None:
        self.compile("training" if grad else "evaluation")
        names = {"logits": logits, "loss": loss}
        if grad:
            self.follow(self.training, "training", names | (self.fresh if self.w.alive("wte.grad") else {}))
        else:
            self.follow(self.evaluation, "evaluation", names)

    def compile(self, graph: str) -> None:
        """Before a graph first runs, patterns are tried on small tensors, soon gone again: from then on the driver puts
        segments elsewhere (ranges.py)."""
        if (graph, "tried") not in self.timed:
            self.timed.add((graph, "tried"))
            with self.w.held("pattern", "other", SCALAR):
                pass
        self.weigh_padding(graph)

    def leave_autocast(self, *, grad: bool) -> None:
        """Casts are part of the compiled code: nothing to empty."""

    def backward(self, inputs: str, targets: str, *, accumulate: bool) -> None:
        """The first gradients of a step become the parameters' own; later ones are added to them and dropped."""
        w, s = self.w, self.shapes
        w.alloc("zeros for logits", "logits", s.width * s.n * s.v)
        names = {"inputs": inputs, "targets": targets} | (self.fresh if accumulate else {})
        self.follow(self.backprop, "backward", names)
        w.free("zeros for logits", "d loss")
        if accumulate:
            w.free(*self.fresh.values())

    def follow(self, plan: Plan, graph: str, outside: dict[str, str]) -> None:
        """`outside`: what some of the graph's buffers are called there."""
        w = self.w
        names = {name: outside.get(final, final) for name, final in plan.names.items()} | outside
        for do, name, owner, nbytes in plan.steps:
            if do == "alloc":
                w.alloc(names.get(name, name), owner, nbytes)
            elif do == "free":
                w.free(names.get(name, name))
            elif do == "call":
                self.call(name, graph, names)
            else:
                self.time(graph, name, nbytes)

    def call(self, what: str, graph: str, names: dict[str, str]) -> None:
        op, _, of = what.rpartition(" ")
        if op == "sum":
            self.sum_vectors(of, names)
        elif op == "attention backward":
            self.attend.backward(int(of), names)
        elif op == "attention":
            self.attend.forward(int(of), names, grad=graph == "training")
        else:
            self.wake("cublas of backward" if graph == "backward" else "cublas", biased=what == "product with bias")

    def sum_vectors(self, norm: str, names: dict[str, str]) -> None:
        """Of a norm's vectors, from partial sums of each program."""
        w, s = self.w, self.shapes
        for vector in ("weight", "bias") if self.r.bias else ("weight",):
            gradient = f"{norm}.{vector}.grad"
            w.alloc(names.get(gradient, gradient), "gradients", 4 * s.c)
            scratch = enumerate(sum_over_rows(s.programs, s.c, self.gpu))
            w.free(*[w.alloc(f"sum over rows {at}", "workspace", nbytes) for at, nbytes in scratch])

    def wake(self, workspace: str, *, biased: bool = False) -> None:
        if not self.w.alive(workspace):
            self.w.alloc(workspace, "workspace", self.gpu.workspace)
        if biased and not self.w.alive("cublaslt"):
            self.w.alloc("cublaslt", "workspace", CUBLASLT)

    # ---- what only the first run of a graph does

    def time(self, graph: str, code: str, overwritten: int) -> None:
        """Variants of a kernel are timed at its first call, the card's cache emptied with a buffer of its size.

        What the kernel overwrites is cloned, on the card if that does not raise the highest peak so far.
        """
        if (graph, code) in self.timed:
            return
        self.timed.add((graph, code))
        w = self.w
        for _ in range(VARIANTS):
            clones = [("clone", overwritten)] if 0 < overwritten <= self.room() else []
            w.free(*(w.alloc(name, "workspace", nbytes) for name, nbytes in clones))
            w.alloc("timing", "workspace", self.gpu.cache)
            w.free(*(w.alloc(name, "workspace", nbytes) for name, nbytes in clones), "timing")

    def room(self) -> int:
        """How far below its highest peak the run is."""
        for alloc, _, _, nbytes, _ in self.w.events_since(self.weighed):
            self.held += nbytes if alloc else -nbytes
            self.most = max(self.most, self.held)
            self.weighed += 1
        return self.most - self.held

    def weigh_padding(self, graph: str) -> None:
        """Before it pads a vocabulary, the compiler times the products as they are and padded. Of what another kernel
        has made it takes the padding to be free: a parameter is padded anew each time."""
        s, pads = self.shapes, self.shapes.padding
        if not pads.weighed or (graph, "padding") in self.timed:
            return
        self.timed.add((graph, "padding"))
        n, c, v, wide = s.n, s.c, s.v, pads.columns
        if graph == "evaluation":
            self.try_product([n * c, v * c], [[n * v], [wide * c, n * wide]])
            return
        if s.half:
            self.try_product([n * v, v * c, n * wide, wide * c], [[n * c]])
        else:
            self.try_product([n * v, v * c, n * wide], [[n * c], [wide * c, n * c]])
        self.try_product([n * v, n * c], [[v * c], [n * wide, wide * c]])

    def try_product(self, operands: list[int], variants: list[list[int]]) -> None:
        w, width = self.w, self.shapes.width
        held = [w.alloc(f"operand {at}", "workspace", width * size) for at, size in enumerate(operands)]
        for sizes in variants:
            for timed in (False, True):
                timing = [w.alloc("timing", "workspace", self.gpu.cache)] if timed else []
                tried = [w.alloc(f"tried {at}", "workspace", width * size) for at, size in enumerate(sizes)]
                self.wake("cublas")
                w.free(*tried, *timing)
        w.free(*held)
