"""What nanoGPT's model allocates and frees under torch.compile: three graphs, planned once and run at every step.

To the byte what recorded runs of torch 2.11 on an H200 did. The first time a graph runs, Inductor also times variants
of its kernels (torch/_inductor/runtime/triton_heuristics.py) and padded matmuls (fx_passes/pad_mm.py).
"""

from __future__ import annotations

from ...config.run_config import RunConfig
from ...memory.platform import Platform
from ...memory.tape import Writer
from .aten import CUBLASLT, SCALAR, AttentionTape, sum_over_rows
from .backward_graph import BackwardGraph
from .forward_graph import ForwardGraph, GraphShapes
from .inductor import BufferPlan, plan_buffers

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
        self.timed = set[tuple[str, str]]()       # (graph, kernel) that have been timed
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

    # ---- running a graph

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
            else:
                self.time_kernel(graph, name, nbytes)

    def call(self, what: str, graph: str, names: dict[str, str]) -> None:
        """An ATen op: attention and sums allocate their results, matmuls a workspace at first use."""
        op, _, of = what.rpartition(" ")
        if op == "sum":
            self.sum_partials(of, names)
        elif op == "attention backward":
            self.attend.backward(int(of), names)
        elif op == "attention":
            self.attend.forward(int(of), names, grad=graph == "training")
        else:
            self.alloc_workspace("cublas of backward" if graph == "backward" else "cublas",
                                 bias=what == "matmul with bias")

    def sum_partials(self, norm: str, names: dict[str, str]) -> None:
        """The gradients of a norm's parameters, from each program's partial sums."""
        w, s = self.w, self.shapes
        for param in ("weight", "bias") if self.config.bias else ("weight",):
            gradient = f"{norm}.{param}.grad"
            w.alloc(names.get(gradient, gradient), "gradients", 4 * s.c)
            scratch = enumerate(sum_over_rows(s.programs, s.c, self.platform))
            w.free(*[w.alloc(f"sum over rows {at}", "workspace", nbytes) for at, nbytes in scratch])

    def alloc_workspace(self, name: str, *, bias: bool = False) -> None:
        if not self.w.alive(name):
            self.w.alloc(name, "workspace", self.platform.workspace)
        if bias and not self.w.alive("cublaslt"):
            self.w.alloc("cublaslt", "workspace", CUBLASLT)

    # ---- the first run of a graph

    def compile(self, graph: str) -> None:
        """Before a graph first runs, Inductor tries its patterns on small tensors. They are freed at once, but later
        segments get other addresses from the driver."""
        if (graph, "patterns") not in self.timed:
            self.timed.add((graph, "patterns"))
            with self.w.held("pattern", "other", SCALAR):
                pass
        self.time_padding(graph)

    def time_kernel(self, graph: str, kernel: str, overwritten: int) -> None:
        """Times variants of a kernel at its first run, with a buffer of the L2 cache's size that flushes it.

        What the kernel overwrites is cloned: on the GPU if that does not raise the peak so far.
        """
        if (graph, kernel) in self.timed:
            return
        self.timed.add((graph, kernel))
        w = self.w
        for _ in range(VARIANTS):
            clones = [("clone", overwritten)] if 0 < overwritten <= self.below_peak() else []
            w.free(*(w.alloc(name, "workspace", nbytes) for name, nbytes in clones))
            w.alloc("timing", "workspace", self.platform.cache)
            w.free(*(w.alloc(name, "workspace", nbytes) for name, nbytes in clones), "timing")

    def below_peak(self) -> int:
        """Bytes that are free below the run's peak so far."""
        for alloc, _, _, nbytes, _ in self.w.events_since(self.counted):
            self.held += nbytes if alloc else -nbytes
            self.peak = max(self.peak, self.held)
            self.counted += 1
        return self.peak - self.held

    def time_padding(self, graph: str) -> None:
        """Times the head's matmuls, unpadded and padded, before a graph first runs. Operands that another kernel makes
        count as padded for free; a parameter is padded anew in each trial."""
        s, pads = self.shapes, self.shapes.padding
        if not pads.timed or (graph, "padding") in self.timed:
            return
        self.timed.add((graph, "padding"))
        n, c, v, wide = s.n, s.c, s.v, pads.columns
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
                self.alloc_workspace("cublas")
                w.free(*tried, *timing)
        w.free(*held)
